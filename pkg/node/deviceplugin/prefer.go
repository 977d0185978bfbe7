// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"maps"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// prefer chooses size device IDs: all of must, then those of available that no pod uses, by the
// pool's policy, then those in use. The order of available does not matter. prefer returns fewer
// IDs if there are not enough, and skips unknown ones.
//
// Kubelets before 1.38 offer Functions that pods still have, because they forget a running Allocate
// when another pod ends in the meantime (kubernetes/kubernetes#137534).
func (o *offer) prefer(available, must []string, size int, inUse func(function.ID) bool) []string {
	c := &choice{taken: map[pci.Address]int{}, roots: map[string]int{}, nodes: map[int]int{}}
	for _, id := range must {
		if f, known := o.functions[id]; known && !slices.Contains(c.chosen, id) {
			c.take(f)
		}
	}

	var free, rest []function.Function
	for _, id := range available {
		f, known := o.functions[id]
		switch {
		case !known || slices.Contains(must, id):
		case inUse(f.ID):
			rest = append(rest, f)
		default:
			free = append(free, f)
		}
	}

	policy := devicePlugin(o.pool).PreferredAllocation
	c.takeFrom(free, size, policy)
	c.takeFrom(rest, size, policy)

	return c.chosen
}

// takeFrom takes the best of the Functions by the policy, until size Functions are chosen or none
// is left.
func (c *choice) takeFrom(
	functions []function.Function, size int, policy v1alpha1.PreferredAllocation,
) {
	slices.SortFunc(functions, func(a, b function.Function) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.ID.String(), b.ID.String()))
	})
	c.free = map[pci.Address][]function.Function{}
	for _, f := range functions {
		c.free[f.PF] = append(c.free[f.PF], f)
	}

	for len(c.chosen) < size && len(c.free) > 0 {
		// of PFs that are equally good, the first is chosen
		byAddress := slices.Sorted(maps.Keys(c.free))
		pf := slices.MinFunc(byAddress, func(a, b pci.Address) int {
			if policy == v1alpha1.PreferSpread {
				return cmp.Or(cmp.Compare(c.taken[a], c.taken[b]),
					cmp.Compare(len(c.free[b]), len(c.free[a])))
			}
			return c.pack(a, b, size-len(c.chosen))
		})

		c.take(c.free[pf][0])
		if c.free[pf] = c.free[pf][1:]; len(c.free[pf]) == 0 {
			delete(c.free, pf)
		}
	}
}

type choice struct {
	chosen []string // device IDs
	// free has the Functions to choose from, by PF, sorted by index. A PF without such Functions
	// has no entry.
	free map[pci.Address][]function.Function
	// taken is the number of chosen Functions of each PF.
	taken map[pci.Address]int
	// roots is 1 for each PCIe root with a chosen Function.
	roots map[string]int
	// nodes is 1 for each NUMA node with a chosen Function.
	nodes map[int]int
}

func (c *choice) take(f function.Function) {
	c.chosen = append(c.chosen, f.ID.String())
	c.taken[f.PF]++
	if f.PCIeRoot != "" {
		c.roots[f.PCIeRoot] = 1
	}
	if f.NUMANode >= 0 {
		c.nodes[f.NUMANode] = 1
	}
}

// pack compares two PFs for the next Function. wanted is the number of Functions that are still to
// be chosen.
//
// In order to use few PFs, a PF that is in use comes first, then the PF that has most of the wanted
// Functions, then the PF nearest to the chosen Functions. In order to leave room for large
// requests, the PF with the fewest free Functions comes next.
func (c *choice) pack(a, b pci.Address, wanted int) int {
	ofA, ofB := c.free[a], c.free[b]
	return cmp.Or(
		cmp.Compare(min(c.taken[b], 1), min(c.taken[a], 1)),
		cmp.Compare(max(wanted-len(ofA), 0), max(wanted-len(ofB), 0)),
		cmp.Compare(c.roots[ofB[0].PCIeRoot], c.roots[ofA[0].PCIeRoot]),
		cmp.Compare(c.nodes[ofB[0].NUMANode], c.nodes[ofA[0].NUMANode]),
		cmp.Compare(len(ofA), len(ofB)),
	)
}
