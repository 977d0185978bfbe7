// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// shared returns the slice of a PF of a pool with model: Ports: one device that claims share. Its
// port capacity is the number of VFs that can be given to pods. Its bandwidth is the speed of the
// link, if the driver reports it. Problems that keep all VFs from pods become taints of the device.
func shared(
	p pool.Pool, pf function.Function, functions []function.Function,
	problems func(function.Function) []function.Problem,
) []resourceslice.Slice {
	vfs := onlyVFs(functions)
	if len(vfs) == 0 || pf.Kind != function.PF {
		return nil
	}

	common, usable := ofAll(p.Spec, vfs, problems)
	// the taints keep claims away; the API refuses a capacity of 0 if claims take 1 of it
	if usable == 0 {
		usable = int64(len(vfs))
	}

	d := device(p, pf, common, false)
	d.ConsumesCounters, d.AllowMultipleAllocations = nil, new(true)
	one, most := quantity(1), min(allocatable(p, vfs), int64(len(vfs)))
	d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
		claim.CapacityPorts: {
			Value: quantity(min(usable, most)),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: &one, ValidValues: []resource.Quantity{one},
			},
		},
	}

	if pf.LinkSpeed > 0 {
		d.Capacity[claim.CapacityBandwidth] = bandwidth(int64(pf.LinkSpeed), most)
	}

	return []resourceslice.Slice{{Devices: []resourceapi.Device{d}}}
}

func onlyVFs(functions []function.Function) []function.Function {
	return slices.DeleteFunc(slices.Clone(functions), func(f function.Function) bool {
		return f.Kind != function.VF
	})
}

// ofAll returns the problems that all VFs have in common, and the number of VFs without a problem
// that keeps pods away. If all VFs have such problems but none in common, it returns the problems of
// the first VF.
func ofAll(
	spec v1alpha1.DevicePoolSpec, vfs []function.Function,
	problems func(function.Function) []function.Problem,
) (common []function.Problem, usable int64) {
	keepsAway := func(p function.Problem) bool { return KeepsPodsAway(spec, p) }
	for i, f := range vfs {
		has := problems(f)
		if !slices.ContainsFunc(has, keepsAway) {
			usable++
		}
		if i == 0 {
			common = has
		}
		common = both(common, has)
	}

	if usable == 0 && !slices.ContainsFunc(common, keepsAway) && len(vfs) > 0 {
		common = problems(vfs[0])
	}

	return common, usable
}

// bandwidth returns the capacity of a link with this speed in Mbit/s. A claim that does not ask for
// bandwidth gets an equal share, because an unlimited VF could take the bandwidth of others.
func bandwidth(speed, ports int64) resourceapi.DeviceCapacity {
	share, step, all := quantity(max(1, speed/ports)*claim.Megabit), quantity(
		claim.Megabit,
	), quantity(speed*claim.Megabit)
	return resourceapi.DeviceCapacity{
		Value: all,
		RequestPolicy: &resourceapi.CapacityRequestPolicy{
			Default: &share, ValidRange: &resourceapi.CapacityRequestPolicyRange{
				Min: &step, Step: &step,
			},
		},
	}
}

func quantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// both returns the problems of a whose taints b has too.
func both(a, b []function.Problem) []function.Problem {
	var out []function.Problem
	for _, problem := range a {
		for _, other := range b {
			if problem.Taint == other.Taint {
				out = append(out, problem)
				break
			}
		}
	}

	return out
}
