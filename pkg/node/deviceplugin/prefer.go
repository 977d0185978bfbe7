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

// prefer chooses size device IDs: all of must, then those of available that nobody has, by the
// pool's policy, then those that are taken. The order of available does not matter. It chooses
// fewer only if there are not enough, and skips unknown ones.
//
// The kubelet offers Functions that pods still have, as it forgets an Allocate that runs when
// another pod ends meanwhile (kubernetes/kubernetes#137534).
func (o *offer) prefer(available, must []string, size int, taken func(function.ID) bool) []string {
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
		case taken(f.ID):
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

// takeFrom takes the best of the Functions by the policy until size are chosen, or all are.
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
	// to choose from, by PF, sorted by index; a PF without any is absent
	free  map[pci.Address][]function.Function
	taken map[pci.Address]int // how many of each PF are chosen
	roots map[string]int      // 1 for each PCIe root that has one of the chosen
	nodes map[int]int         // 1 for each NUMA node that has one of the chosen
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

// pack compares two PFs for the next Function; wanted is how many are still to be chosen. To use
// few PFs, a PF that is in use comes first, then the one that lacks least of wanted, then the one
// nearest to what was chosen. To leave room for large requests, the one with the fewest free
// Functions is next.
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
