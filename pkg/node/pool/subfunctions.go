package pool

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// NoSFs says what keeps a PF that has a driver from having SFs; nil if nothing does.
type NoSFs func(pf pci.Address) *v1alpha1.Shortage

// Makes says whether the Function is one of the SFs that are made when the pool hands them out (spec.sfs), provided that
// the pool has it.
func (p Pool) Makes(id function.ID) bool {
	sfnum, isSF := id.SFNum()
	return isSF && p.Spec.SFs.Has(sfnum)
}

// shortageOf says why no SFs can be made at the PF; nil if they can.
func shortageOf(pf function.Function, noSFs NoSFs) *v1alpha1.Shortage {
	switch {
	case pf.Driver == "":
		return &v1alpha1.Shortage{
			PF: string(pf.PF), Reason: v1alpha1.ReasonNotSupported,
			Message: fmt.Sprintf("PF %s has no driver that could make SFs: bind it to the kernel's", pf.PF),
		}
	case noSFs == nil:
		return nil
	}
	return noSFs(pf.PF)
}

// fillMade gives the pool the SFs of spec.sfs, whether they exist or not, at each PF that a selector names. At a PF that
// cannot have SFs it gives only those that exist nevertheless, as a pod may have them. The fields of selectors that
// describe the SF itself do not count, as nobody knows what a driver makes of one that does not exist.
func (p *filling) fillMade(functions []function.Function, noSFs NoSFs, owners map[function.ID]string) {
	if p.Spec.SFs == nil {
		return
	}
	existing := map[function.ID]function.Function{}
	for _, f := range functions {
		existing[f.ID] = f
	}
	for _, pf := range p.NamedPFs(functions) {
		if pf.Class == function.Accelerator {
			continue
		}
		shortage := shortageOf(pf, noSFs)
		if shortage != nil {
			p.Shortages = append(p.Shortages, *shortage)
		}
		first := uint32(p.Spec.SFs.FirstNumber)
		for sfnum := first; sfnum < first+uint32(p.Spec.SFs.Count); sfnum++ {
			f, exists := existing[function.SubfunctionID(pf.PF, sfnum)]
			switch {
			case !exists && shortage == nil:
				p.take(function.PotentialSF(pf, sfnum), owners)
			case exists && !f.DefaultRoute: // which the node needs itself
				p.take(f, owners)
			}
		}
	}
}
