package pool

import (
	"fmt"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Makes says whether the Function is one of those SFs that are made for whoever the pool hands them out to (spec.sfs),
// where the pool has it.
func (p Pool) Makes(id function.ID) bool {
	sfnum, isSF := id.SFNum()
	return isSF && p.Spec.SFs.Has(sfnum)
}

// pfs are the PFs of a node that may have SFs, and the SFs that they have.
type pfs struct {
	list     []function.Function
	existing map[function.ID]function.Function
	// unable says what keeps a PF that has a driver from having SFs; nil if nothing does. It is asked once for each.
	unable func(pf pci.Address) *v1alpha1.Shortage
	asked  map[pci.Address]*v1alpha1.Shortage
}

func newPFs(functions []function.Function, unable func(pf pci.Address) *v1alpha1.Shortage) *pfs {
	found := &pfs{
		existing: map[function.ID]function.Function{}, unable: unable, asked: map[pci.Address]*v1alpha1.Shortage{},
	}
	for _, f := range functions {
		switch {
		case f.Kind == function.SF:
			found.existing[f.ID] = f
		case f.Kind == function.PF && f.Class != function.Accelerator:
			found.list = append(found.list, f)
		}
	}
	return found
}

// shortage says why no SFs can be made at the PF.
func (p *pfs) shortage(pf function.Function) *v1alpha1.Shortage {
	if pf.Driver == "" {
		return &v1alpha1.Shortage{
			PF: string(pf.PF), Reason: v1alpha1.ReasonNotSupported,
			Message: fmt.Sprintf("PF %s has no driver that could make SFs: bind it to the kernel's", pf.PF),
		}
	}
	answer, known := p.asked[pf.PF]
	if !known {
		answer = p.unable(pf.PF)
		p.asked[pf.PF] = answer
	}
	return answer
}

// fillMade gives the pool the SFs of spec.sfs, whether they exist or not: at each PF that a selector names, and that
// can have SFs. Of one that cannot it has those that are there nevertheless, as a pod may have them. What selectors
// say of an SF itself does not count, as nobody knows what a driver makes of one that is not there.
func (p *filling) fillMade(pfs *pfs, owners map[function.ID]string) {
	if p.Spec.SFs == nil {
		return
	}
	for _, pf := range pfs.list {
		if !slices.ContainsFunc(p.selectors, func(s selector) bool { return s.isPF(pf) }) {
			continue
		}
		shortage := pfs.shortage(pf)
		if shortage != nil {
			p.Shortages = append(p.Shortages, *shortage)
		}
		first := uint32(p.Spec.SFs.FirstNumber)
		for sfnum := first; sfnum < first+uint32(p.Spec.SFs.Count); sfnum++ {
			f, exists := pfs.existing[function.SubfunctionID(pf.PF, sfnum)]
			switch {
			case !exists && shortage == nil:
				p.take(function.PotentialSF(pf, sfnum), owners)
			case exists && !f.DefaultRoute: // which the node needs itself
				p.take(f, owners)
			}
		}
	}
}
