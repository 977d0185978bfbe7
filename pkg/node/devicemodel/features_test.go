// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

// offered returns the names of the devices of a pool after Reduce, and the number of slices. It
// fails the test if the slices use a missing feature.
func offered(
	t *testing.T, f Features, p pool.Pool, problems func(function.Function) []function.Problem,
) (devices []string, slices int) {
	t.Helper()
	full := Resources("node1", []pool.Pool{p}, problems, noneAhead)
	for _, drapool := range f.Reduce(full).Pools {
		slices += len(drapool.Slices)
		for _, slice := range drapool.Slices {
			if !f.Counters && len(slice.SharedCounters) > 0 {
				t.Error("there are counters")
			}
			for _, d := range slice.Devices {
				devices = append(devices, d.Name)
				if !f.Taints && len(d.Taints) > 0 || !f.EffectNone && hasNone(d) || !f.BindingConditions &&
					len(d.BindingConditions)+len(d.BindingFailureConditions) > 0 ||
					!f.Counters && len(d.ConsumesCounters) > 0 || !f.SharedCapacity &&
					d.AllowMultipleAllocations != nil {
					t.Errorf("device %+v has what the cluster drops", d)
				}
			}
		}
	}

	return devices, slices
}

func hasNone(d resourceapi.Device) bool {
	return slices.ContainsFunc(d.Taints, func(t resourceapi.DeviceTaint) bool {
		return t.Effect == resourceapi.DeviceTaintEffectNone
	})
}

// TestLinkDown: a pool decides whether a link that is down keeps pods away. A cluster that takes the
// effect None gets to know the link in either case. Other problems keep pods away.
func TestLinkDown(t *testing.T) {
	both := func(function.Function) []function.Problem {
		return []function.Problem{{Taint: v1alpha1.TaintLinkDown}, {Taint: v1alpha1.TaintFault}}
	}
	for effect, want := range map[v1alpha1.LinkDownEffect]resourceapi.DeviceTaintEffect{
		"":                          resourceapi.DeviceTaintEffectNoSchedule,
		v1alpha1.LinkDownNoSchedule: resourceapi.DeviceTaintEffectNoSchedule,
		v1alpha1.LinkDownNone:       resourceapi.DeviceTaintEffectNone,
	} {
		p := pooltest.DRA("fast", pooltest.VF(0x3b, 0))
		p.Spec.LinkDown = effect
		found := AllFeatures().Reduce(Resources("node1", []pool.Pool{p}, both, noneAhead))
		taints := found.Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices[0].Taints
		if diff := gocmp.Diff([]resourceapi.DeviceTaint{
			{Key: v1alpha1.TaintLinkDown, Effect: want},
			{Key: v1alpha1.TaintFault, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		}, taints); diff != "" {
			t.Errorf("linkDown %q: -want +got\n%s", effect, diff)
		}
	}
}

// TestLinkDownShared: a PF that claims share without a link offers the VFs that have no other
// problem.
func TestLinkDownShared(t *testing.T) {
	vfs := pooltest.VFs(0x3b, 4)
	p := pooltest.DRA("fast", vfs...)
	p.Spec.Model, p.Spec.LinkDown = v1alpha1.ModelPorts, v1alpha1.LinkDownNone
	pf := function.Function{ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF,
		PF: "0000:3b:00.0", NumVFs: 4, Index: -1, NUMANode: -1}
	p.PFs = map[pci.Address]function.Function{pf.PF: pf}

	for sick, want := range map[int]string{1: "None", 4: "NoSchedule"} {
		problems := func(f function.Function) []function.Problem {
			found := []function.Problem{{Taint: v1alpha1.TaintLinkDown}}
			switch { // no two VFs have the same further problem
			case f.Index >= sick:
			case f.Index%2 == 0:
				found = append(found, function.Problem{Taint: v1alpha1.TaintQuarantined})
			default:
				found = append(found, function.Problem{Taint: v1alpha1.TaintFault})
			}
			return found
		}
		found := Resources("node1", []pool.Pool{p}, problems, noneAhead)
		d := found.Pools["node1/0000-3b-00-0/fast"].Slices[0].Devices[0]
		ports := d.Capacity["ports"].Value
		last := string(d.Taints[len(d.Taints)-1].Effect)
		if last != want || sick == 1 && ports.Value() != 3 {
			t.Errorf("%d sick VFs: taints %v, %s ports", sick, d.Taints, ports.String())
		}
	}
}

func TestReduce(t *testing.T) {
	vfs := pooltest.VFs(0x3b, 4)
	var names []string
	for _, f := range vfs {
		names = append(names, f.ID.DeviceName())
	}

	second := func(f function.Function) []function.Problem {
		if f.Index == 1 {
			return []function.Problem{{Taint: v1alpha1.TaintLinkDown}}
		}
		return nil
	}

	unlinked := pooltest.DRA("fast", vfs...)
	unlinked.Spec.LinkDown = v1alpha1.LinkDownNone
	careful := pooltest.DRA("fast", vfs...)
	careful.Spec.Provision = v1alpha1.ProvisionBeforeBind
	for name, test := range map[string]struct {
		without  func(*Features)
		pool     pool.Pool
		problems func(function.Function) []function.Problem
		want     []string
	}{
		"taints": {func(f *Features) {
			f.Taints = false
		}, pooltest.DRA("fast", vfs...), second, slices.Concat(names[:1], names[2:])},
		"nothing, with a problem": {
			func(*Features) {}, pooltest.DRA("fast", vfs...), second, names,
		},
		"taints, with a problem that only informs": {func(f *Features) {
			f.Taints = false
		}, unlinked, second, names},
		"the effect None": {func(f *Features) {
			f.EffectNone = false
		}, unlinked, second, names},
		"binding conditions": {func(f *Features) {
			f.BindingConditions = false
		}, careful, healthy, names},
		"counters, with a limit": {func(f *Features) {
			f.Counters = false
		}, limited(3, vfs...), healthy, names[:3]},
		"counters, with a limit and a problem": {func(f *Features) {
			f.Counters, f.Taints = false, false
		}, limited(3, vfs...), second,
			slices.Concat(names[:1], names[2:3])},
	} {
		t.Run(name, func(t *testing.T) {
			f := AllFeatures()
			test.without(&f)
			got, count := offered(t, f, test.pool, test.problems)
			if diff := gocmp.Diff(test.want, got); diff != "" || count == 0 {
				t.Errorf("%d slices, devices -want +got:\n%s", count, diff)
			}
		})
	}
}

// TestReduceModels checks that a PF is offered only if the scheduler knows that the PF is in use
// while its VFs are.
func TestReduceModels(t *testing.T) {
	vfs := pooltest.VFs(0x3b, 4)
	pf := function.Function{ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF,
		PF: "0000:3b:00.0", NumVFs: 4, Index: -1, LinkUp: true, LinkSpeed: 25000}
	model := func(m v1alpha1.DeviceModel) pool.Pool {
		p := pooltest.DRA("fast", vfs...)
		p.Spec.Model = m
		p.PFs = map[pci.Address]function.Function{pf.PF: pf}
		return p
	}

	f := AllFeatures()
	f.Counters = false
	if got, _ := offered(t, f, model(v1alpha1.ModelCounters), healthy); len(got) != 4 ||
		slices.Contains(got, pf.ID.DeviceName()) {
		t.Errorf("model Counters without counters offers %v, want the VFs", got)
	}
	if got, _ := offered(t, AllFeatures(), model(v1alpha1.ModelCounters), healthy); len(got) != 5 {
		t.Errorf("model Counters offers %v, want the VFs and the PF", got)
	}

	f = AllFeatures()
	f.SharedCapacity = false
	if got, count := offered(t, f, model(v1alpha1.ModelPorts), healthy); len(got) != 0 ||
		count != 1 {
		t.Errorf("model Ports without shared capacity offers %v in %d slices, want nothing in one",
			got, count)
	}
}

func TestMissing(t *testing.T) {
	if got := AllFeatures().Missing(); got != nil {
		t.Errorf("missing %v", got)
	}

	want := []string{"DRAConsumableCapacity", "DRADeviceBindingConditions", "DRADeviceTaints",
		"DRAPartitionableDevices"}
	if diff := gocmp.Diff(want, Features{}.Missing()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if got := AllFeatures().Reduce(resourceslice.DriverResources{}); got.Pools != nil {
		t.Errorf("reduced nothing to %v", got)
	}
}

// TestCountersHarm checks from which patch releases on devices with counters are published.
func TestCountersHarm(t *testing.T) {
	for version, want := range map[string]string{
		"v1.35.5": "1.35.6 or later", "v1.35.6": "", "v1.36.0-rc.1": "1.36.2 or later",
		"v1.36.1-eks-1234": "1.36.2 or later", "v1.36.2": "", "v1.36.10+k3s1": "", "v1.37.0": "",
		"v1.34.0": "", "v1.38.0-beta.0": "", "v2.36.0": "", "": "", "unknown": "",
	} {
		got := CountersHarm(version)
		if (got != "") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", version, got, want)
		}
	}

	limited := pooltest.DRA("fast", pooltest.VF(0x3b, 0))
	limited.Spec.MaxAllocated = new(int32(1))
	f := AllFeatures()
	f.Counters, f.CountersHarm = false, CountersHarm("v1.36.1")
	got := f.Fallbacks(limited)
	if len(got) != 1 || !got[0].GateOn ||
		!strings.Contains(got[0].Message, "not counted: the scheduler of Kubernetes v1.36.1") {
		t.Errorf("fallbacks %+v", got)
	}

	taints := pooltest.DRA("fast", pooltest.VF(0x3b, 0))
	taints.Spec.LinkDown = v1alpha1.LinkDownNone
	taints.Spec.EvictLostAfter = &metav1.Duration{Duration: time.Minute}
	if got := AllFeatures().Fallbacks(taints); got != nil {
		t.Errorf("fallbacks of a cluster with all features: %+v", got)
	}
	f = AllFeatures()
	f.EffectNone = false
	if got := f.Fallbacks(taints); len(got) != 1 ||
		got[0].Feature != v1alpha1.FeatureTaintEffectNone || !got[0].GateOn {
		t.Errorf("fallbacks without the effect None: %+v", got)
	}
	f.Taints = false
	if got := f.Fallbacks(taints); len(got) != 2 || got[0].Feature != v1alpha1.FeatureTaints ||
		got[1].Feature != v1alpha1.FeatureTaints || got[1].GateOn {
		t.Errorf("fallbacks without taints: %+v", got)
	}
}
