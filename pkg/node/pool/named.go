package pool

import (
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// NamedPFs are the PFs of the node that the selectors name by pfNames or rootDevices, whatever indexes they name. Of
// what else a selector says, the vendor counts, which VFs have in common with their PF; the rest is about the VFs.
func (p Pool) NamedPFs(functions []function.Function) []function.Function {
	if p.Err != nil {
		return nil
	}
	selectors, err := compileAll(p.Spec)
	if err != nil {
		return nil // it is p.Err
	}
	var named []function.Function
	for _, f := range functions {
		if f.Kind == function.PF && slices.ContainsFunc(selectors, func(s selector) bool { return s.isPF(f) }) {
			named = append(named, f)
		}
	}
	return named
}

// isPF says whether the PF, or that of an SF, is one that the selector names.
func (s selector) isPF(pf function.Function) bool {
	return len(s.pfNames)+len(s.rootDevices) > 0 &&
		anyOf(s.vendors, func(v string) bool { return v == pf.Vendor }) &&
		anyOf(s.pfNames, func(p indexed) bool { return p.names(pf.PFName) }) &&
		anyOf(s.rootDevices, func(p indexed) bool { return pci.Address(p.name) == pf.PF })
}
