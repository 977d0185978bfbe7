package deviceplugin

import (
	"cmp"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// prefer chooses size Functions: those that must be included, then the best of those that are available. Fewer are
// chosen only where there are not enough. The result depends on nothing but the arguments, and not on the order of
// available, which may or may not have those of must too.
func prefer(policy v1alpha1.PreferredAllocation, available, must []function.Function, size int) []function.Function {
	c := &choice{taken: map[pci.Address]int{}, roots: map[string]bool{}, nodes: map[int]bool{}}
	included := map[function.ID]bool{}
	for _, f := range must {
		if !included[f.ID] {
			included[f.ID] = true
			c.take(f)
		}
	}
	next := c.pack
	if policy == v1alpha1.PreferSpread {
		next = c.spread
	}
	groups := byPF(available, included)
	for len(c.chosen) < size && len(groups) > 0 {
		i := next(groups, size-len(c.chosen))
		c.take(groups[i].free[0])
		if groups[i].free = groups[i].free[1:]; len(groups[i].free) == 0 {
			groups = slices.Delete(groups, i, i+1)
		}
	}
	return c.chosen
}

// group is the Functions of one PF that are free, by their index at the PF.
type group struct {
	pf   pci.Address
	root string
	node int // NUMA node, -1 if unknown
	free []function.Function
}

// byPF groups what is available and not included yet, by the PF's address.
func byPF(available []function.Function, included map[function.ID]bool) []group {
	members := map[pci.Address][]function.Function{}
	for _, f := range available {
		if !included[f.ID] {
			members[f.PF] = append(members[f.PF], f)
		}
	}
	groups := make([]group, 0, len(members))
	for pf, free := range members {
		slices.SortFunc(free, func(a, b function.Function) int {
			return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID.String(), b.ID.String()))
		})
		groups = append(groups, group{pf: pf, root: free[0].PCIeRoot, node: free[0].NUMANode, free: free})
	}
	slices.SortFunc(groups, func(a, b group) int { return cmp.Compare(a.pf, b.pf) })
	return groups
}

// choice is what was chosen so far and where it is.
type choice struct {
	chosen []function.Function
	taken  map[pci.Address]int // how many of each PF
	roots  map[string]bool
	nodes  map[int]bool
}

func (c *choice) take(f function.Function) {
	c.chosen = append(c.chosen, f)
	c.taken[f.PF]++
	if f.PCIeRoot != "" {
		c.roots[f.PCIeRoot] = true
	}
	if f.NUMANode >= 0 {
		c.nodes[f.NUMANode] = true
	}
}

// pack finds the group to take the next Function of, where so many are still wanted: a PF that is in use anyway, else
// one that has enough, else the one that has most, so that there are as few PFs as can be. Among equals it is the one
// nearest to what was chosen, then, so that large requests find room later, the one that has least to spare.
func (c *choice) pack(groups []group, wanted int) int {
	return best(groups, func(a, b group) int {
		aFits, bFits := len(a.free) >= wanted, len(b.free) >= wanted
		bySize := cmp.Compare(len(b.free), len(a.free))
		if aFits && bFits {
			bySize = 0
		}
		return cmp.Or(
			first(c.taken[a.pf] > 0, c.taken[b.pf] > 0),
			first(aFits, bFits),
			bySize,
			first(c.roots[a.root], c.roots[b.root]),
			first(c.nodes[a.node], c.nodes[b.node]),
			cmp.Compare(len(a.free), len(b.free)),
		)
	})
}

// spread finds the PF that has given least so far, and of several the one that has most to give.
func (c *choice) spread(groups []group, _ int) int {
	return best(groups, func(a, b group) int {
		return cmp.Or(cmp.Compare(c.taken[a.pf], c.taken[b.pf]), cmp.Compare(len(b.free), len(a.free)))
	})
}

// best returns the index of the group that compares least; of equals, the first.
func best(groups []group, compare func(a, b group) int) int {
	found := 0
	for i := range groups {
		if compare(groups[i], groups[found]) < 0 {
			found = i
		}
	}
	return found
}

// first puts what is true before what is not.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}
