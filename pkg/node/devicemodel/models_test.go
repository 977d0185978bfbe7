// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

const pfAddress = "0000:3b:00.0"

// modelled returns a pool of the model with four VFs of a PF that has numVFs VFs.
func modelled(
	model v1alpha1.DeviceModel, numVFs, linkSpeed int, more ...function.Function,
) pool.Pool {
	p := pooltest.DRA("fast", append(pooltest.VFs(0x3b, 4), more...)...)
	p.Spec.Model = model
	pf := pooltest.VF(0x3b, 0)
	pf.ID, pf.Kind, pf.Index, pf.NumVFs, pf.LinkSpeed = function.ID{
		Address: pfAddress,
	}, function.PF, -1, numVFs, linkSpeed
	p.PFs = map[pci.Address]function.Function{pfAddress: pf}
	return p
}

func devicesOf(
	t *testing.T, p pool.Pool, problems func(function.Function) []function.Problem,
) (devices []resourceapi.Device) {
	t.Helper()
	for _, slice := range Resources("node1", []pool.Pool{p}, problems,
		noneAhead).Pools["node1/0000-3b-00-0/fast"].Slices {
		devices = append(devices, slice.Devices...)
	}
	return devices
}

// TestCounters checks that a PF is a device beside its VFs, and consumes as much as all of them, if
// the pool has all VFs of the PF.
func TestCounters(t *testing.T) {
	own := modelled(v1alpha1.ModelCounters, 4, 0)
	own.PFs[pfAddress] = func(f function.Function) function.Function {
		f.DefaultRoute = true
		return f
	}(own.PFs[pfAddress])

	gone := modelled(v1alpha1.ModelCounters, 4, 0)
	gone.PFs = nil
	fewer := modelled(v1alpha1.ModelCounters, 4, 0)
	fewer.Spec.MaxAllocated = ptr.To(int32(2))
	for name, test := range map[string]struct {
		pool pool.Pool
		pf   bool
		uses int64 // counters that the PF consumes
	}{
		"all VFs": {modelled(v1alpha1.ModelCounters, 4, 0), true, 4},
		"all VFs, and an SF": {
			modelled(v1alpha1.ModelCounters, 4, 0, pooltest.SF(0x3b, 1)), true, 5,
		},
		"some VFs":            {modelled(v1alpha1.ModelCounters, 8, 0), false, 0},
		"the node's own":      {own, false, 0},
		"PF is gone":          {gone, false, 0},
		"fewer at once":       {fewer, true, 2},
		"model is Functions":  {modelled(v1alpha1.ModelFunctions, 4, 0), false, 0},
		"model is not chosen": {modelled("", 4, 0), false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			devices := devicesOf(t, test.pool, healthy)
			last := devices[len(devices)-1]
			if isPF := last.Name == "0000-3b-00-0"; isPF != test.pf ||
				len(devices) != len(test.pool.Functions)+map[bool]int{true: 1}[test.pf] {
				t.Fatalf("%d devices, the last is %s; want the PF: %t", len(devices),
					last.Name, test.pf)
			}

			if !test.pf {
				return
			}

			uses := last.ConsumesCounters[0].Counters[counterFunctions].Value
			if kind := *last.Attributes["kind"].StringValue; uses.Value() != test.uses ||
				kind != "PF" {
				t.Errorf("device %s of kind %s consumes %s, want %d", last.Name, kind,
					uses.String(), test.uses)
			}

			if _, has := last.Attributes["index"]; has {
				t.Error("a PF has an index")
			}
		})
	}
}

// TestEitherPFOrVFs checks that the scheduler's allocator takes VFs for a claim without
// constraints, and then no PF. If VFs are not suitable, it takes the PF, and then no VF.
func TestEitherPFOrVFs(t *testing.T) {
	for taint, want := range map[function.Kind]int{"": 4, function.PF: 4, function.VF: 1} {
		problems := func(f function.Function) []function.Problem {
			if f.Kind == taint {
				return []function.Problem{{Taint: v1alpha1.TaintInUse, Message: "in use"}}
			}
			return nil
		}

		got := allocateUntilFull(t,
			Resources("node1", []pool.Pool{modelled(v1alpha1.ModelCounters, 4, 0)}, problems,
				noneAhead))
		if got["node1/0000-3b-00-0/fast"] != want {
			t.Errorf("allocated %v with taints on %q, want %d", got, taint, want)
		}
	}
}

// TestFullSlice checks that a PF does not make a slice larger than the API allows.
func TestFullSlice(t *testing.T) {
	p := modelled(v1alpha1.ModelCounters, devicesPerSlice, 0)
	p.Functions = pooltest.VFs(0x3b, devicesPerSlice)
	made := published(p).Pools["node1/0000-3b-00-0/fast"].Slices
	if len(made) != 3 || len(made[1].Devices) != devicesPerSlice || len(made[2].Devices) != 1 {
		t.Errorf("%d slices, want counters, VFs, and the PF alone", len(made))
	}
}

// TestPorts checks that the PF is the only device. Its port capacity is the number of VFs that pods
// can have, and its bandwidth is the speed of the link.
func TestPorts(t *testing.T) {
	some := func(taint string, indexes ...int) func(function.Function) []function.Problem {
		return func(f function.Function) []function.Problem {
			for _, i := range indexes {
				if f.Index == i {
					return []function.Problem{{Taint: taint, Message: "broken"}}
				}
			}
			return nil
		}
	}

	each := func(f function.Function) []function.Problem {
		return []function.Problem{{Taint: fmt.Sprint("broken-", f.Index), Message: "broken"}}
	}
	few := modelled(v1alpha1.ModelPorts, 8, 0)
	few.Spec.MaxAllocated = ptr.To(int32(3))
	many := modelled(v1alpha1.ModelPorts, 8, 10)
	many.Spec.MaxAllocated = ptr.To(int32(300))
	for name, test := range map[string]struct {
		pool      pool.Pool
		problems  func(function.Function) []function.Problem
		ports     int64
		bandwidth string // "all, by default so much"
		taints    int
	}{
		"all is well": {
			modelled(v1alpha1.ModelPorts, 8, 100000), healthy, 4, "100G, 25G", 0,
		},
		"speed not known":     {modelled(v1alpha1.ModelPorts, 8, 0), healthy, 4, "", 0},
		"fewer at once":       {few, healthy, 3, "", 0},
		"more than there are": {many, healthy, 4, "10M, 2M", 0},
		"slower than VFs":     {modelled(v1alpha1.ModelPorts, 8, 3), healthy, 4, "3M, 1M", 0},
		"a VF is broken": {
			modelled(v1alpha1.ModelPorts, 8, 100000), some("fault", 2), 3, "100G, 25G", 0,
		},
		"the link is down": {
			modelled(v1alpha1.ModelPorts, 8, 100000), some("link-down", 0, 1, 2, 3),
			4, "100G, 25G", 1,
		},
		"each VF is broken": {modelled(v1alpha1.ModelPorts, 8, 0), each, 4, "", 1},
		"SFs are not for shares": {
			modelled(v1alpha1.ModelPorts, 8, 0, pooltest.SF(0x3b, 1)), healthy, 4, "", 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			devices := devicesOf(t, test.pool, test.problems)
			if len(devices) != 1 || devices[0].Name != "0000-3b-00-0" ||
				!ptr.Deref(devices[0].AllowMultipleAllocations, false) {
				t.Fatalf("devices %+v, want the PF alone, for several claims", devices)
			}

			ports := devices[0].Capacity[claim.CapacityPorts].Value
			bandwidth := ""
			if c, has := devices[0].Capacity[claim.CapacityBandwidth]; has {
				bandwidth = fmt.Sprintf("%s, %s", c.Value.String(),
					c.RequestPolicy.Default.String())
			}

			if ports.Value() != test.ports || bandwidth != test.bandwidth ||
				len(devices[0].Taints) != test.taints {
				t.Errorf("%d ports, bandwidth %q, taints %v; want %d, %q and %d",
					ports.Value(), bandwidth, devices[0].Taints, test.ports, test.bandwidth,
					test.taints)
			}

			if _, has := devices[0].Attributes["k8s.cni.cncf.io/deviceID"]; has {
				t.Error(
					"the PF has the attribute by which Multus would take it for the pod's device",
				)
			}
		})
	}

	if without := devicesOf(t, pool.Pool{Name: "fast", Spec: few.Spec, Functions: few.Functions},
		healthy); len(without) > 0 {
		t.Errorf("a PF that is gone is offered: %+v", without)
	}
}
