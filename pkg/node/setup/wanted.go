package setup

import (
	"cmp"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Wanted is what the owner of a Function wants done to it; nil for nothing. spec is that of the Function's DevicePool,
// driver the one that the pod itself asks for, "" for the pool's, and mac the one that an SF is made with, "" for any.
func Wanted(
	spec v1alpha1.DevicePoolSpec, f function.ID, driver v1alpha1.FunctionDriver, mac function.MAC,
) *journal.Setup {
	wish := journal.Setup{Driver: string(cmp.Or(driver, spec.Driver))}
	if number, isSF := f.SFNum(); isSF && spec.SFs.Has(number) {
		wish.SF, wish.MAC = true, mac
	}
	if wish == (journal.Setup{}) {
		return nil
	}
	return &wish
}
