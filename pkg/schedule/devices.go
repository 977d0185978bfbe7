// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// devices are the devices of the cluster and their allocations.
type devices struct {
	slices    []*resourceapi.ResourceSlice // with the taints of DeviceTaintRules
	allocated structured.AllocatedState
	owners    map[structured.DeviceID][]objectName // claims that use the device
	pools     map[poolID]*pool
	onNode    map[string][]*pool // pools with a slice for exactly this node
	shared    []*pool            // pools with a slice for several nodes
}

type poolID struct{ driver, name string }

func (p poolID) String() string { return p.driver + "/" + p.name }

// pool is the newest generation of a resource pool.
type pool struct {
	poolID
	generation     int64
	expectedSlices int64                        // spec.pool.resourceSliceCount
	slices         []*resourceapi.ResourceSlice // by name

	checked  sync.Once
	counters map[string]map[string]resource.Quantity // by counter set and counter
	// why the allocator rejects the pool; "" if it does not
	invalid string
}

func (p *pool) complete() bool { return int64(len(p.slices)) == p.expectedSlices }

func newDevices(all []*resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule) *devices {
	d := &devices{
		slices: make([]*resourceapi.ResourceSlice, len(all)),
		allocated: structured.AllocatedState{
			AllocatedDevices:         sets.New[structured.DeviceID](),
			AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
		},
		owners: map[structured.DeviceID][]objectName{},
		pools:  map[poolID]*pool{},
		onNode: map[string][]*pool{},
	}

	for i, slice := range all {
		d.slices[i] = withTaints(slice, rules)
		d.addSlice(d.slices[i])
	}

	for _, p := range d.pools {
		slices.SortFunc(p.slices, func(a, b *resourceapi.ResourceSlice) int {
			return cmp.Compare(a.Name, b.Name)
		})
		d.addToNodes(p)
	}

	return d
}

// addToNodes adds the pool to the nodes that its slices are for.
func (d *devices) addToNodes(p *pool) {
	nodes := sets.New[string]()
	for _, slice := range p.slices {
		nodes.Insert(ptr.Deref(slice.Spec.NodeName, ""))
	}

	for node := range nodes {
		if node == "" {
			d.shared = append(d.shared, p)
		} else {
			d.onNode[node] = append(d.onNode[node], p)
		}
	}
}

// withTaints returns the slice with the taints that the rules give to its devices.
func withTaints(
	slice *resourceapi.ResourceSlice, rules []*resourceapi.DeviceTaintRule,
) *resourceapi.ResourceSlice {
	copied := false
	for _, rule := range rules {
		for i := range slice.Spec.Devices {
			if !selects(rule.Spec.DeviceSelector, slice, slice.Spec.Devices[i].Name) {
				continue
			}
			if !copied {
				slice, copied = slice.DeepCopy(), true
			}
			device := &slice.Spec.Devices[i]
			device.Taints = append(device.Taints, rule.Spec.Taint)
		}
	}

	return slice
}

// selects reports whether a rule's selector matches the device. A nil selector matches no device,
// an empty one every device.
func selects(
	selector *resourceapi.DeviceTaintSelector, slice *resourceapi.ResourceSlice, device string,
) bool {
	is := func(want *string, value string) bool { return want == nil || *want == value }
	return selector != nil &&
		is(selector.Driver, slice.Spec.Driver) && is(selector.Pool, slice.Spec.Pool.Name) &&
		is(selector.Device, device)
}

// addSlice adds a slice to its pool, unless the pool has a newer generation.
func (d *devices) addSlice(slice *resourceapi.ResourceSlice) {
	id := poolID{slice.Spec.Driver, slice.Spec.Pool.Name}
	p := d.pools[id]
	if p == nil || p.generation < slice.Spec.Pool.Generation {
		p = &pool{poolID: id, generation: slice.Spec.Pool.Generation,
			expectedSlices: slice.Spec.Pool.ResourceSliceCount}
		d.pools[id] = p
	}

	if p.generation == slice.Spec.Pool.Generation {
		p.slices = append(p.slices, slice)
	}
}

// check reads the pool's counters and finds out whether the allocator rejects the pool. It runs
// once, on demand, because most pools are never asked.
func (p *pool) check() { p.checked.Do(p.doCheck) }

func (p *pool) doCheck() {
	p.counters = map[string]map[string]resource.Quantity{}
	for _, slice := range p.slices {
		for _, set := range slice.Spec.SharedCounters {
			if p.counters[set.Name] != nil {
				p.invalid = "it has the counter set " + set.Name + " twice"
			}
			p.counters[set.Name] = map[string]resource.Quantity{}
			for name, counter := range set.Counters {
				p.counters[set.Name][name] = counter.Value
			}
		}
	}

	names := sets.New[string]()
	for _, slice := range p.slices {
		for _, device := range slice.Spec.Devices {
			if names.Has(device.Name) {
				p.invalid = "it has the device " + device.Name + " twice"
			}

			names.Insert(device.Name)
			for _, consumed := range device.ConsumesCounters {
				for counter := range consumed.Counters {
					if _, has := p.counters[consumed.CounterSet][counter]; !has {
						p.invalid = "device " + device.Name + " consumes counter " + counter +
							" of counter set " + consumed.CounterSet + ", which the pool does " +
							"not have"
					}
				}
			}
		}
	}
}

// markAllocated records the devices that a claim uses.
func (d *devices) markAllocated(claim *resourceapi.ResourceClaim) {
	if claim.Status.Allocation == nil {
		return
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if ptr.Deref(result.AdminAccess, false) {
			continue
		}

		id := structured.MakeDeviceID(result.Driver, result.Pool, result.Device)
		d.owners[id] = append(d.owners[id], objectName{claim.Namespace, claim.Name})
		if result.ShareID == nil {
			d.allocated.AllocatedDevices.Insert(id)
			continue
		}

		d.allocated.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id,
			result.ShareID))
		d.allocated.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id,
			result.ConsumedCapacity))
	}
}

// isAllocated reports whether a claim uses the device, or a share of it.
func (d *devices) isAllocated(id structured.DeviceID) bool {
	_, shared := d.allocated.AggregatedCapacity[id]
	return shared || d.allocated.AllocatedDevices.Has(id)
}

// remainingCounters returns how much of each of the pool's counters is unused.
func (d *devices) remainingCounters(p *pool) map[string]map[string]resource.Quantity {
	p.check()
	left := map[string]map[string]resource.Quantity{}
	for set, counters := range p.counters {
		left[set] = maps.Clone(counters)
	}

	for _, slice := range p.slices {
		for _, device := range slice.Spec.Devices {
			if len(device.ConsumesCounters) == 0 ||
				!d.isAllocated(structured.MakeDeviceID(p.driver, p.name, device.Name)) {
				continue
			}
			for _, consumed := range device.ConsumesCounters {
				for name, counter := range consumed.Counters {
					if value, has := left[consumed.CounterSet][name]; has {
						value.Sub(counter.Value)
						left[consumed.CounterSet][name] = value
					}
				}
			}
		}
	}

	return left
}

// uses returns what the claim's devices take of common resources, in the order of the allocation's
// results.
func (d *devices) uses(claim *resourceapi.ResourceClaim) []Use {
	uses := make([]Use, len(claim.Status.Allocation.Devices.Results))
	for i, result := range claim.Status.Allocation.Devices.Results {
		device := d.device(result)
		if device == nil {
			continue
		}

		for _, consumed := range device.ConsumesCounters {
			for _, name := range slices.Sorted(maps.Keys(consumed.Counters)) {
				uses[i].Counters = append(uses[i].Counters,
					CounterUse{consumed.CounterSet, name, consumed.Counters[name].Value})
			}
		}
	}

	return uses
}

// device returns the device of a result, or nil if no pool has it.
func (d *devices) device(result resourceapi.DeviceRequestAllocationResult) *resourceapi.Device {
	p := d.pools[poolID{result.Driver, result.Pool}]
	if p == nil {
		return nil
	}

	for _, slice := range p.slices {
		for i := range slice.Spec.Devices {
			if slice.Spec.Devices[i].Name == result.Device {
				return &slice.Spec.Devices[i]
			}
		}
	}

	return nil
}
