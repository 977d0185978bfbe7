package claim

import (
	"cmp"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// XPUOf chooses the XPU that serves a PF from the XPUs of the PF's node: one that names the PF before one that serves all
// PFs, then the one whose name sorts first. It returns a pointer into the slice, nil if there is none.
func XPUOf(xpus []v1alpha1.XPU, pf pci.Address) *v1alpha1.XPU {
	var chosen *v1alpha1.XPU
	for i := range xpus {
		x := &xpus[i]
		serves := len(x.Spec.PFs) == 0 || slices.Contains(x.Spec.PFs, string(pf))
		if x.DeletionTimestamp.IsZero() && serves && (chosen == nil || before(x, chosen)) {
			chosen = x
		}
	}
	return chosen
}

// before says whether XPUOf prefers a to b.
func before(a, b *v1alpha1.XPU) bool {
	if names := len(a.Spec.PFs) > 0; names != (len(b.Spec.PFs) > 0) {
		return names
	}
	return cmp.Less(a.Name, b.Name)
}
