// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

func healthy(function.Function) []function.Problem { return nil }

func noneAhead(function.ID, string) bool { return false }

func published(pools ...pool.Pool) resourceslice.DriverResources {
	return Resources("node1", pools, healthy, noneAhead)
}

// differing counts the slices that a and b do not have in common.
func differing(a, b resourceslice.DriverResources) int {
	count := 0
	names := map[string]bool{}
	for name := range a.Pools {
		names[name] = true
	}

	for name := range b.Pools {
		names[name] = true
	}

	for name := range names {
		before, after := a.Pools[name].Slices, b.Pools[name].Slices
		for i := range max(len(before), len(after)) {
			if i >= len(before) || i >= len(after) ||
				!equality.Semantic.DeepEqual(before[i], after[i]) {
				count++
			}
		}
	}

	return count
}

func Test1024VFsOn4PFs(t *testing.T) {
	var all []function.Function
	for bus := range 4 {
		all = append(all, pooltest.VFs(0x10+0x10*bus, 256)...)
	}

	got := published(pooltest.DRA("fast", all...))
	if len(got.Pools) != 4 {
		t.Fatalf("%d DRA pools, want one for each PF", len(got.Pools))
	}

	seen := map[string]bool{}
	for name, p := range got.Pools {
		if len(p.Slices) != 4 {
			t.Errorf("pool %s has %d slices, want 4", name, len(p.Slices))
		}
		for i, slice := range p.Slices {
			if len(slice.Devices) != resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures {
				t.Errorf("slice %d of pool %s has %d devices, want %d", i, name, len(slice.Devices),
					resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures)
			}
			for n, device := range slice.Devices {
				if index := *device.Attributes["index"].IntValue; index != int64(64*i+n) {
					t.Errorf("device %d in slice %d of pool %s has index %d: not in order",
						n, i, name, index)
				}

				if problems := validation.IsDNS1123Label(device.Name); len(problems) > 0 ||
					seen[device.Name] {
					t.Errorf("device name %q is no DNS label or not unique: %v",
						device.Name, problems)
				}

				seen[device.Name] = true
			}
		}
	}

	if len(seen) != 1024 {
		t.Errorf("%d devices, want 1024", len(seen))
	}

	// The order of the inventory does not matter.
	shuffled := slices.Clone(all)
	slices.SortFunc(shuffled, func(a, b function.Function) int {
		return -cmp.Compare(a.ID.String(), b.ID.String())
	})
	if n := differing(got, published(pooltest.DRA("fast", shuffled...))); n > 0 {
		t.Errorf("%d slices differ with the Functions in another order", n)
	}
}

func TestAFunctionThatComesOrGoesChangesOneSlice(t *testing.T) {
	var all []function.Function
	for index := range 70 {
		all = append(all, pooltest.VF(0x10, index), pooltest.SF(0x10, index),
			pooltest.VF(0x20, index))
	}

	before := published(pooltest.DRA("fast", all...))
	if got := len(before.Pools); got != 2 {
		t.Fatalf("%d DRA pools, want 2", got)
	}

	for i, f := range all {
		after := published(pooltest.DRA("fast", slices.Delete(slices.Clone(all), i, i+1)...))
		if n := differing(before, after); n != 1 {
			t.Errorf("%d slices change when %s %s goes, want 1", n, f.Kind, f.ID)
		}
	}
}

func TestAPoolThatComesLeavesTheOthersAlone(t *testing.T) {
	fast := pooltest.DRA("fast", pooltest.VFs(0x10, 10)[:5]...)
	alone := published(fast)
	both := published(pooltest.DRA("all", pooltest.VFs(0x10, 10)[5:]...), fast)
	if n := differing(alone, both); n != 1 || len(both.Pools) != 2 {
		t.Errorf("%d slices differ in %d pools, want only the one of the new pool",
			n, len(both.Pools))
	}

	unpublished := pooltest.DRA("other", pooltest.VFs(0x20, 3)...)
	unpublished.Spec.Publish = "DevicePlugin"
	if n := differing(alone, published(fast, unpublished)); n != 0 {
		t.Error("a pool that is not published by DRA is in the slices")
	}
}

func TestDevice(t *testing.T) {
	got := published(pooltest.DRA("fast", pooltest.VF(0x3b, 0), pooltest.SF(0x3b, 88)))
	want := map[string]map[string]any{
		"0000-3b-00-2": {
			"kind": "VF", "pool": "fast", "pf": "0000:3b:00.0", "pfName": "ens59f0",
			"index": int64(0), "vendor": "15b3", "device": "101e",
			"k8s.cni.cncf.io/deviceID":        "0000:3b:00.2",
			"k8s.cni.cncf.io/resourceName":    "xpu.opiproject.org/fast",
			"resource.kubernetes.io/pciBusID": "0000:3b:00.2",
			"resource.kubernetes.io/pcieRoot": "pci0000:3a",
			"resource.kubernetes.io/numaNode": int64(1), "rdma": false,
		},
		"0000-3b-00-0-sf88": {
			"kind": "SF", "pool": "fast", "pf": "0000:3b:00.0", "pfName": "ens59f0",
			"index": int64(88), "vendor": "15b3", "device": "101e",
			"k8s.cni.cncf.io/deviceID":        "0000:3b:00.0/sf88",
			"k8s.cni.cncf.io/resourceName":    "xpu.opiproject.org/fast",
			"resource.kubernetes.io/pciBusID": "0000:3b:00.0",
			"resource.kubernetes.io/pcieRoot": "pci0000:3a",
			"resource.kubernetes.io/numaNode": int64(1), "rdma": false,
		},
	}

	if diff := gocmp.Diff(want, attributes(got)); diff != "" {
		t.Errorf("attributes: -want +got\n%s", diff)
	}
	if name := slices.Collect(maps.Keys(got.Pools)); !slices.Equal(name,
		[]string{"node1/0000-3b-00-0/fast"}) {
		t.Errorf("pools are %q", name)
	}
}

// TestAttributesOfThePF checks that a device has what is known of its link, its RDMA device and its
// eswitch, and that nothing of it changes when a pod takes the Function.
func TestAttributesOfThePF(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	f.LinkSpeed, f.SwitchID = 100_000, "e8ebd30300a9b0f8"
	f.RDMA, f.RDMADevices = true, []string{"mlx5_2", "mlx5_3"}
	want := map[string]any{
		"linkSpeed": int64(100_000), "switchID": "e8ebd30300a9b0f8", "rdma": true,
		"rdmaDevice": "mlx5_2",
	}

	got := attributes(published(pooltest.DRA("fast", f)))["0000-3b-00-2"]
	for name, value := range want {
		if got[name] != value {
			t.Errorf("%s is %v, want %v", name, got[name], value)
		}
	}

	bound := pooltest.DRA("fast", f)
	bound.Spec.Driver = "vfio-pci"
	got = attributes(published(bound))["0000-3b-00-2"]
	if value, has := got["rdmaDevice"]; has || got["rdma"] != true {
		t.Errorf("pool that binds a driver: rdma %v, rdmaDevice %v; the kernel may give the RDMA "+
			"device another name after each pod", got["rdma"], value)
	}

	down := f
	down.LinkUp = false
	if n := differing(published(pooltest.DRA("fast", f)),
		published(pooltest.DRA("fast", down))); n != 0 {
		t.Error("the device changed with the link, whose taint says that already")
	}

	unknown := pooltest.VF(0x3b, 0)
	unknown.RDMAUnknown = true
	got = attributes(published(pooltest.DRA("fast", unknown)))["0000-3b-00-2"]
	for name := range want {
		if value, has := got[name]; has {
			t.Errorf("%s is %v, want it to be absent", name, value)
		}
	}
}

// TestOwnAttributes checks that devices have the attributes of their DevicePool, that none of these
// replaces another one, and that a device never has more than the API allows.
func TestOwnAttributes(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	p := pooltest.DRA("fast", f)
	p.Spec.Attributes = []v1alpha1.PoolAttribute{
		{Name: "rail", Int: new(int64(0))}, {Name: "fabric", String: new("blue")},
		{Name: "example.com/tested", Bool: new(true)}, {Name: "vendor", String: new("mine")},
	}

	got := attributes(published(p))["0000-3b-00-2"]
	for name, want := range map[string]any{
		"rail": int64(0), "fabric": "blue", "example.com/tested": true, "vendor": "15b3",
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}

	ports := modelled(v1alpha1.ModelPorts, 4, 100_000)
	pf := ports.PFs[pfAddress]
	pf.RDMA, pf.RDMADevices, pf.SwitchID = true, []string{"mlx5_0"}, "e8ebd30300a9b0f8"
	ports.PFs[pfAddress], f = pf, pf
	f.Kind, f.ID = function.VF, function.ID{Address: "0000:3b:00.2"}
	functions := pooltest.DRA("fast", f)
	for i := range v1alpha1.MaxPoolAttributes {
		a := v1alpha1.PoolAttribute{Name: fmt.Sprint("a", i), Bool: new(true)}
		ports.Spec.Attributes = append(ports.Spec.Attributes, a)
	}
	functions.Spec.Attributes = ports.Spec.Attributes
	for _, p := range []pool.Pool{ports, functions} {
		d := devicesOf(t, p, healthy)[0]
		if n := len(d.Attributes) + len(d.Capacity); n >
			resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
			t.Errorf("a device has %d attributes and capacities", n)
		}
	}
}

// TestUnknownIsAbsent checks that devices with an unknown value do not match each other by it.
func TestUnknownIsAbsent(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	f.PFName, f.PCIeRoot, f.NUMANode = "", "", -1
	long := strings.Repeat("x", 63)
	got := attributes(published(pooltest.DRA(long, f)))["0000-3b-00-2"]
	for _, absent := range []string{
		"pfName", "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode",
		"k8s.cni.cncf.io/resourceName",
	} {
		if value, ok := got[absent]; ok {
			t.Errorf("%s is %q, want it to be absent", absent, value)
		}
	}

	for name, value := range got {
		if text, ok := value.(string); ok &&
			(text == "" || len(text) > resourceapi.DeviceAttributeMaxValueLength) {
			t.Errorf("%s is %q, which the API refuses or makes no sense", name, text)
		}
	}
}

func TestNoAttributeChangesWhenAPodTakesTheNetdev(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	f.Netdev, f.Driver = "ens3f0v0", "mlx5_core"
	taken := f
	taken.Netdev, taken.Driver = "", "vfio-pci"
	if n := differing(published(pooltest.DRA("fast", f)),
		published(pooltest.DRA("fast", taken))); n != 0 {
		t.Error("the device changed")
	}
}

func TestBindingConditionsAndTaints(t *testing.T) {
	p := pooltest.DRA("fast", pooltest.VF(0x3b, 0), pooltest.VF(0x3b, 1))
	p.Spec.Provision = v1alpha1.ProvisionBeforeBind
	got := Resources("node1", []pool.Pool{p}, func(f function.Function) []function.Problem {
		if f.Index == 0 {
			return nil
		}
		return []function.Problem{
			{Taint: v1alpha1.TaintLinkDown, Message: "no link"},
			{Taint: v1alpha1.TaintReleasePending},
		}
	}, noneAhead)

	devices := got.Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices
	for _, d := range devices {
		if !slices.Equal(d.BindingConditions, []string{v1alpha1.ConditionProvisioned}) ||
			!slices.Equal(d.BindingFailureConditions, []string{v1alpha1.ConditionProvisionFailed}) {
			t.Errorf("%s has binding conditions %q and %q", d.Name, d.BindingConditions,
				d.BindingFailureConditions)
		}
	}

	want := []resourceapi.DeviceTaint{
		{Key: v1alpha1.TaintLinkDown, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		{Key: v1alpha1.TaintReleasePending, Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}
	if diff := gocmp.Diff(want, devices[1].Taints); diff != "" || len(devices[0].Taints) != 0 {
		t.Errorf("taints of the healthy device: %v; of the other one: -want +got\n%s",
			devices[0].Taints, diff)
	}

	p.Spec.Provision = v1alpha1.ProvisionOnPrepare
	d := published(p).Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices[0]
	if d.BindingConditions != nil || d.BindingFailureConditions != nil {
		t.Errorf("binding conditions %q and %q on a device that is provisioned on Prepare",
			d.BindingConditions, d.BindingFailureConditions)
	}
}

func attributes(r resourceslice.DriverResources) map[string]map[string]any {
	out := map[string]map[string]any{}
	for _, p := range r.Pools {
		for _, slice := range p.Slices {
			for _, d := range slice.Devices {
				out[d.Name] = map[string]any{}
				for name, value := range d.Attributes {
					switch {
					case value.StringValue != nil:
						out[d.Name][string(name)] = *value.StringValue
					case value.IntValue != nil:
						out[d.Name][string(name)] = *value.IntValue
					case value.BoolValue != nil:
						out[d.Name][string(name)] = *value.BoolValue
					case value.StringValues != nil:
						out[d.Name][string(name)] = value.StringValues
					case value.IntValues != nil:
						out[d.Name][string(name)] = value.IntValues
					}
				}
			}
		}
	}

	return out
}

// The scheduler takes the first suitable device of a slice, and waits for the device's binding
// conditions, if it has any.
func TestDevicesWithPortsMadeAheadComeFirst(t *testing.T) {
	p := pooltest.DRA("fast", pooltest.VFs(0x3b, 5)...)
	p.Spec.Provision, p.Spec.Network = v1alpha1.ProvisionAhead, "blue"
	ahead := func(f function.ID, network string) bool {
		return network == "blue" && (f == pooltest.VF(0x3b, 1).ID || f == pooltest.VF(0x3b, 3).ID)
	}
	devices := Resources("node1", []pool.Pool{p}, healthy,
		ahead).Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices
	var order []int64
	for i, d := range devices {
		order = append(order, *d.Attributes["index"].IntValue)
		if waits := d.BindingConditions != nil &&
			d.BindingFailureConditions != nil; waits != (i >= 2) {
			t.Errorf("device %s, at %d, has binding conditions %q and %q", d.Name,
				i, d.BindingConditions, d.BindingFailureConditions)
		}
	}

	if want := []int64{1, 3, 0, 2, 4}; !slices.Equal(order, want) {
		t.Errorf("VFs in the order %v, want %v", order, want)
	}
}
