package deviceplugin

import (
	"cmp"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// prefer chooses size Functions: all of must, then the best of available, which may have those of must too. It chooses
// fewer only if there are not enough. The result does not depend on the order of available.
func prefer(policy v1alpha1.PreferredAllocation, available, must []function.Function, size int) []function.Function {
	c := &choice{taken: map[pci.Address]int{}, roots: map[string]int{}, nodes: map[int]int{}}
	included := map[function.ID]bool{}
	for _, f := range must {
		if !included[f.ID] {
			included[f.ID] = true
			c.take(f)
		}
	}
	groups := byPF(available, included)
	for len(c.chosen) < size && len(groups) > 0 {
		best := slices.MinFunc(groups, func(a, b *group) int {
			if policy == v1alpha1.PreferSpread {
				return c.spread(a, b)
			}
			return c.pack(a, b, size-len(c.chosen))
		})
		c.take(best.free[0])
		if best.free = best.free[1:]; len(best.free) == 0 {
			groups = slices.DeleteFunc(groups, func(g *group) bool { return g == best })
		}
	}
	return c.chosen
}

// group has the free Functions of one PF, sorted by their index.
type group struct {
	pf   pci.Address
	root string
	node int // NUMA node, -1 if unknown
	free []function.Function
}

// byPF groups the available Functions that are not included yet, sorted by the PF's address.
func byPF(available []function.Function, included map[function.ID]bool) []*group {
	sorted := slices.SortedFunc(slices.Values(available), func(a, b function.Function) int {
		return cmp.Or(cmp.Compare(a.PF, b.PF), cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID.String(), b.ID.String()))
	})
	var groups []*group
	for _, f := range sorted {
		switch last := len(groups) - 1; {
		case included[f.ID]:
		case last >= 0 && groups[last].pf == f.PF:
			groups[last].free = append(groups[last].free, f)
		default:
			groups = append(groups, &group{pf: f.PF, root: f.PCIeRoot, node: f.NUMANode, free: []function.Function{f}})
		}
	}
	return groups
}

// choice is what was chosen so far, and where that is.
type choice struct {
	chosen []function.Function
	taken  map[pci.Address]int // how many of each PF
	roots  map[string]int      // 1 for each PCIe root that has one of them
	nodes  map[int]int         // 1 for each NUMA node that has one of them
}

func (c *choice) take(f function.Function) {
	c.chosen = append(c.chosen, f)
	c.taken[f.PF]++
	if f.PCIeRoot != "" {
		c.roots[f.PCIeRoot] = 1
	}
	if f.NUMANode >= 0 {
		c.nodes[f.NUMANode] = 1
	}
}

// pack compares two PFs for the next Function; wanted is how many are still to be chosen. To use few PFs, a PF that is in
// use comes first, then the one that lacks least of wanted, then the one nearest to what was chosen. To leave room for
// large requests, the one with the fewest free Functions is next.
func (c *choice) pack(a, b *group, wanted int) int {
	return cmp.Or(
		cmp.Compare(min(c.taken[b.pf], 1), min(c.taken[a.pf], 1)),
		cmp.Compare(max(wanted-len(a.free), 0), max(wanted-len(b.free), 0)),
		cmp.Compare(c.roots[b.root], c.roots[a.root]),
		cmp.Compare(c.nodes[b.node], c.nodes[a.node]),
		cmp.Compare(len(a.free), len(b.free)),
	)
}

// spread compares two PFs: the one with the fewest chosen Functions comes first, then the one with the most free ones.
func (c *choice) spread(a, b *group) int {
	return cmp.Or(cmp.Compare(c.taken[a.pf], c.taken[b.pf]), cmp.Compare(len(b.free), len(a.free)))
}
