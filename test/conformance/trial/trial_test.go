// SPDX-License-Identifier: Apache-2.0

package trial_test

import (
	"context"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
	"github.com/opiproject/xpu-device-plugin/test/conformance/trial"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestFaults checks that the conformance test finds the faults that show only where bridges filter
// VLANs and there are VRFs.
func TestFaults(t *testing.T) {
	card.InGuest(t, "simnic")
	all := slices.DeleteFunc(faults.All(), func(f faults.Fault) bool { return !f.IsVLANAware() })
	program := func(context.Context, faults.Fault) (string, error) { return plan.SeededBridge, nil }
	found, err := trial.All(t.Context(), t.Output(), program, all)
	must.Succeed(t, err)
	t.Logf("%d of %d faults found", found, len(all))
	must.Succeed(t, trial.Check(found, len(all), 98))
}
