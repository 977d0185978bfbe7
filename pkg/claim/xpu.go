package claim

import (
	"cmp"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// XPUOf chooses the XPU that serves a PF from those of the PF's node: one that names the PF before one that takes every
// PF of the node, and of equals the one whose name sorts first. It is nil if there is none; else it points into the
// slice, which is not changed.
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

// before compares two XPUs that serve the same PF.
func before(a, b *v1alpha1.XPU) bool {
	if names := len(a.Spec.PFs) > 0; names != (len(b.Spec.PFs) > 0) {
		return names
	}
	return cmp.Less(a.Name, b.Name)
}
