// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

// limited returns a pool of VFs and of SFs that do not exist yet. At most maxAllocated may be
// allocated at each PF.
func limited(maxAllocated int32, functions ...function.Function) pool.Pool {
	p := pooltest.DRA("fast", functions...)
	p.Spec.MaxAllocated = ptr.To(maxAllocated)
	return p
}

func TestSharedCounters(t *testing.T) {
	functions := append(pooltest.VFs(0x3b, 70), pooltest.SF(0x3b, 1), pooltest.SF(0x3b, 2))
	slices := published(limited(5, functions...)).Pools["node1/0000-3b-00-0/fast"].Slices
	if len(slices) != 4 {
		t.Fatalf("%d slices, want one of counters, two of VFs and one of SFs", len(slices))
	}

	for i, slice := range slices {
		if (len(slice.SharedCounters) > 0) != (i == 0) || (len(slice.Devices) > 0) != (i > 0) {
			t.Errorf("slice %d has %d sets of counters and %d devices; the first has counters, "+
				"the others devices",
				i, len(slice.SharedCounters), len(slice.Devices))
		}
	}

	set := slices[0].SharedCounters[0]
	if value := set.Counters[counterFunctions].Value; value.Value() != 5 {
		t.Errorf("counter is %s, want 5", value.String())
	}

	for _, slice := range slices[1:] {
		for _, d := range slice.Devices {
			if len(d.ConsumesCounters) != 1 || d.ConsumesCounters[0].CounterSet != set.Name {
				t.Fatalf("%s consumes %+v, want of %s", d.Name, d.ConsumesCounters, set.Name)
			}
			if one := d.ConsumesCounters[0].Counters[counterFunctions].Value; one.Value() != 1 {
				t.Errorf("%s consumes %s, want 1", d.Name, one.String())
			}
		}
	}

	if without := published(pooltest.DRA("fast", functions...)).
		Pools["node1/0000-3b-00-0/fast"].Slices; len(without) != 3 ||
		without[0].SharedCounters != nil || without[0].Devices[0].ConsumesCounters != nil {
		t.Errorf("a pool without maxAllocated has counters: %+v", without[0])
	}
}

// TestAnSFIsPublishedTheSameWhetherItExists checks that properties that come with the SF's driver
// are not published.
func TestAnSFIsPublishedTheSameWhetherItExists(t *testing.T) {
	pf := function.Function{
		ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF, PF: "0000:3b:00.0",
		PFName:   "ens59f0",
		PFDriver: "mlx5_core", Driver: "mlx5_core", Index: -1, NumVFs: 4, Vendor: "15b3",
		Device:   "a2dc",
		PCIeRoot: "pci0000:3a", NUMANode: 1, LinkUp: true, LinkType: "ether", Netdev: "ens59f0",
		IOMMUGroup: "7",
	}

	potential := function.PotentialSF(pf, 88)
	existing := potential
	existing.Potential, existing.Driver = false, "mlx5_core.sf"
	existing.Netdev, existing.AuxDevice = "en3f0pf0sf88", "mlx5_core.sf.4"
	existing.RDMA, existing.RDMADevices = true, []string{"mlx5_4"}
	with := func(sf function.Function) pool.Pool {
		p := limited(5, sf)
		p.Spec.SFs = &v1alpha1.SFSpec{Count: 5, FirstNumber: 88}
		return p
	}
	if n := differing(published(with(potential)), published(with(existing))); n != 0 {
		t.Errorf("%d slices differ", n)
	}
}

// classes are the cluster's DeviceClasses.
type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error) { return c, nil }

func (c classes) Get(name string) (*resourceapi.DeviceClass, error) {
	for _, class := range c {
		if class.Name == name {
			return class, nil
		}
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "deviceclasses"}, name)
}

// GetDeviceClass is for extended resources, which have no class in these tests.
func (c classes) GetDeviceClass(corev1.ResourceName) *resourceapi.DeviceClass { return nil }

// allocateUntilFull has the scheduler's allocator allocate devices one after the other, and returns
// the number of allocated devices in each DRA pool.
func allocateUntilFull(t *testing.T, resources resourceslice.DriverResources) map[string]int {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}
	var slices []*resourceapi.ResourceSlice
	for name, p := range resources.Pools {
		for i := range p.Slices {
			slices = append(slices, &resourceapi.ResourceSlice{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("slice-", len(slices))},
				Spec: resourceapi.ResourceSliceSpec{
					Driver: v1alpha1.GroupName, NodeName: &node.Name,
					Pool: resourceapi.ResourcePool{
						Name: name, Generation: 1, ResourceSliceCount: int64(len(p.Slices)),
					},
					Devices: p.Slices[i].Devices, SharedCounters: p.Slices[i].SharedCounters,
				},
			})
		}
	}

	class := classes{{ObjectMeta: metav1.ObjectMeta{Name: "xpu"}}}
	state := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}

	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: "xpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount,
				Count: 1,
			},
		}}}},
	}

	allocated := map[string]int{}
	for {
		features := structured.Features{PartitionableDevices: true, DeviceTaints: true}
		expressions := cel.NewCache(1, cel.Features{})
		allocator, err := structured.NewAllocator(t.Context(), features, state, class, slices,
			expressions)
		if err != nil {
			t.Fatal(err)
		}

		results, err := allocator.Allocate(t.Context(), node, []*resourceapi.ResourceClaim{claim})
		if err != nil {
			t.Fatal(err)
		}
		if results == nil {
			return allocated
		}

		got := results[0].Devices.Results[0]
		state.AllocatedDevices.Insert(structured.MakeDeviceID(v1alpha1.GroupName, got.Pool,
			got.Device))
		allocated[got.Pool]++
	}
}

// TestMaxAllocated checks that the scheduler allocates exactly maxAllocated devices of a PF that
// has more VFs and SFs.
func TestMaxAllocated(t *testing.T) {
	first := append(pooltest.VFs(0x3b, 6), pooltest.SF(0x3b, 1), pooltest.SF(0x3b, 2),
		pooltest.SF(0x3b, 3), pooltest.SF(0x3b, 4))
	second := append(pooltest.VFs(0x5e, 3), pooltest.SF(0x5e, 1))
	for _, test := range []struct {
		name string
		pool pool.Pool
		want map[string]int
	}{
		{"fewer than there are, at each PF", limited(5, append(first, second...)...),
			map[string]int{"node1/0000-3b-00-0/fast": 5, "node1/0000-5e-00-0/fast": 4}},
		{"one", limited(1, first...), map[string]int{"node1/0000-3b-00-0/fast": 1}},
		{"no limit", pooltest.DRA("fast", first...), map[string]int{"node1/0000-3b-00-0/fast": 10}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := allocateUntilFull(t,
				published(test.pool)); fmt.Sprint(got) != fmt.Sprint(test.want) {
				t.Errorf("allocated %v, want %v", got, test.want)
			}
		})
	}
}
