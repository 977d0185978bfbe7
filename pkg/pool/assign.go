// Package pool decides which Functions of a node belong to which DevicePool.
package pool

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// Pool is what one DevicePool has on this node.
type Pool struct {
	// Name and Spec are the DevicePool's.
	Name string
	Spec v1alpha1.DevicePoolSpec
	// Functions are those of the pool, in the order of the inventory.
	Functions []inventory.Function
	// Overlaps are Functions that the pool selects but that belong to another one.
	Overlaps []Overlap
	// Err says why the pool's selectors cannot be used; the pool is empty then.
	Err error
}

// Overlap is a Function that a pool selects but may not have.
type Overlap struct {
	Function inventory.ID
	// Owner is the name of the DevicePool that has it.
	Owner string
}

// String is "0000:3b:00.2 in fast".
func (o Overlap) String() string { return o.Function.String() + " in " + o.Owner }

// Assign gives every VF and SF to the first DevicePool, by name, that selects it. PFs are never given away: they
// carry their VFs, the node's own traffic, or both. The result has an entry for every DevicePool that is meant for
// a node with these labels, sorted by name, and depends on nothing but the arguments.
func Assign(functions []inventory.Function, devicePools []v1alpha1.DevicePool, nodeLabels map[string]string) []Pool {
	sorted := slices.SortedFunc(slices.Values(devicePools), func(a, b v1alpha1.DevicePool) int { return cmp.Compare(a.Name, b.Name) })
	owners := map[inventory.ID]string{}
	var pools []Pool
	for _, devicePool := range sorted {
		if !labels.SelectorFromSet(devicePool.Spec.NodeSelector).Matches(labels.Set(nodeLabels)) {
			continue
		}
		pools = append(pools, assign(functions, devicePool, owners))
	}
	return pools
}

func assign(functions []inventory.Function, devicePool v1alpha1.DevicePool, owners map[inventory.ID]string) Pool {
	pool := Pool{Name: devicePool.Name, Spec: devicePool.Spec}
	var selectors []selector
	for i, s := range devicePool.Spec.Selectors {
		compiled, err := compile(s)
		if err != nil {
			pool.Err = fmt.Errorf("DevicePool %s: spec.selectors[%d].%w", devicePool.Name, i, err)
			return pool
		}
		selectors = append(selectors, compiled)
	}
	for _, f := range functions {
		if f.Kind == inventory.PF || !slices.ContainsFunc(selectors, func(s selector) bool { return s.matches(f) }) {
			continue
		}
		if owner, taken := owners[f.ID]; taken {
			pool.Overlaps = append(pool.Overlaps, Overlap{Function: f.ID, Owner: owner})
			continue
		}
		owners[f.ID] = devicePool.Name
		pool.Functions = append(pool.Functions, f)
	}
	return pool
}
