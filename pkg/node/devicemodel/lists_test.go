// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"fmt"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/pooltest"
)

const (
	pcieRoot = "resource.kubernetes.io/pcieRoot"
	numaNode = "resource.kubernetes.io/numaNode"
)

// TestLists checks which attributes are lists, in a cluster that takes lists and in one that does
// not. A list is published only where the pool asks for it and there are several values, because a
// selector that compares the attribute with a value is false for a list.
func TestLists(t *testing.T) {
	direct := func(f function.Function) function.Function {
		f.PCIeRoot, f.DataDirectRoots = "pci0000:00", []string{"pci0008:00"}
		f.NUMANode, f.NUMANodes = 1, []int{1, 0}
		return f
	}
	both, own := []string{"pci0000:00", "pci0008:00"}, "pci0000:00"
	pf := function.OfPF("0000:3b:00.0")
	pf.NumVFs = 1
	near, single := []int64{1, 0}, int64(1)
	withPF := func(model v1alpha1.DeviceModel, dataDirect bool) pool.Pool {
		p := pooltest.DRA("fast", direct(pooltest.VF(0x3b, 0)))
		p.Spec.Model, p.Spec.DataDirect = model, dataDirect
		p.PFs = map[pci.Address]function.Function{pf.PF: direct(pf)}
		return p
	}

	for name, tt := range map[string]struct {
		pool pool.Pool
		want map[string]any // pcieRoot by device
		numa any
	}{
		"VF":                  {withPF("", false), map[string]any{"0000-3b-00-2": own}, single},
		"VF with Data Direct": {withPF("", true), map[string]any{"0000-3b-00-2": both}, single},
		"VF and all NUMA nodes": {listing(withPF("", false)), map[string]any{"0000-3b-00-2": own},
			near},
		"shared, so VFs": {withPF("Ports", false), map[string]any{"0000-3b-00-0": own}, single},
		"shared and Data Direct": {withPF("Ports", true), map[string]any{"0000-3b-00-0": both},
			single},
		"shared and all NUMA nodes": {listing(withPF("Ports", false)),
			map[string]any{"0000-3b-00-0": own}, near},
		"PF and VF": {withPF("Counters", false),
			map[string]any{"0000-3b-00-0": own, "0000-3b-00-2": own}, single},
		"PF and VF with both": {listing(withPF("Counters", true)),
			map[string]any{"0000-3b-00-0": both, "0000-3b-00-2": both}, near},
		"no other root": {listing(pooltest.DRA("fast", pooltest.VF(0x3b, 0))),
			map[string]any{"0000-3b-00-2": "pci0000:3a"}, single},
	} {
		t.Run(name, func(t *testing.T) {
			full := published(tt.pool)
			got := attributes(full)
			for device, root := range tt.want {
				if diff := gocmp.Diff(root, got[device][pcieRoot]); diff != "" {
					t.Errorf("%s of %s: -want +got\n%s", pcieRoot, device, diff)
				}
				if diff := gocmp.Diff(tt.numa, got[device][numaNode]); diff != "" {
					t.Errorf("%s of %s: -want +got\n%s", numaNode, device, diff)
				}
			}

			f := AllFeatures()
			f.Lists = false
			for device, values := range attributes(f.Reduce(full)) {
				if root := values[pcieRoot]; root != own && root != "pci0000:3a" ||
					values[numaNode] != int64(1) {
					t.Errorf("without lists %s has root %v and NUMA node %v, want its own", device,
						root, values[numaNode])
				}
			}
			if diff := gocmp.Diff(got, attributes(full)); diff != "" {
				t.Errorf("Reduce changed what it was given: -before +after\n%s", diff)
			}
		})
	}
}

// listing returns the pool with lists of NUMA nodes.
func listing(p pool.Pool) pool.Pool {
	p.Spec.ListNUMANodes = true
	return p
}

// TestListsOfUnknown checks that a Function whose own root is unknown has the other one.
func TestListsOfUnknown(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	f.PCIeRoot, f.DataDirectRoots = "", []string{"pci0008:00"}
	p := pooltest.DRA("fast", f)
	p.Spec.DataDirect = true
	if got := attributes(published(p))["0000-3b-00-2"][pcieRoot]; got != "pci0008:00" {
		t.Errorf("root %v", got)
	}
}

// TestMostValues checks that a device never has more values of attributes than the API allows.
func TestMostValues(t *testing.T) {
	p := modelled(v1alpha1.ModelPorts, 4, 100_000)
	pf := p.PFs[pfAddress]
	pf.RDMA, pf.RDMADevices, pf.SwitchID = true, []string{"mlx5_0"}, "e8ebd30300a9b0f8"
	for i := range 8 {
		pf.NUMANodes = append(pf.NUMANodes, i)
		pf.DataDirectRoots = append(pf.DataDirectRoots, fmt.Sprintf("pci%04x:00", i))
	}
	p.PFs[pfAddress] = pf
	p.Spec.DataDirect, p.Spec.ListNUMANodes = true, true
	for i := range v1alpha1.MaxPoolAttributes {
		p.Spec.Attributes = append(p.Spec.Attributes,
			v1alpha1.PoolAttribute{Name: fmt.Sprint("a", i), Bool: new(true)})
	}

	values := 0
	for _, a := range devicesOf(t, p, healthy)[0].Attributes {
		values += max(1, len(a.IntValues)+len(a.StringValues))
	}
	if values > resourceapi.ResourceSliceMaxAttributeValuesPerDevice {
		t.Errorf("a device has %d values of attributes", values)
	}
}

// TestListsHarm checks from which release on lists are published. An unknown version may be an old
// one.
func TestListsHarm(t *testing.T) {
	for version, want := range map[string]string{
		"v1.36.0": "1.37", "v1.36.6-gke.1": "1.37", "v1.37.0-rc.1": "", "v1.37.1": "",
		"v1.38.0-beta.0": "", "v1.38.0": "", "v2.0.0": "", "v0.99.0": "1.37",
		"": "1.37 or later", "unknown": "1.37 or later",
	} {
		got := ListsHarm(version)
		if (got != "") != (want != "") || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", version, got, want)
		}
	}
}

// TestListsFallbacks checks that a pool that asks for lists says why it has none, on nodes where it
// would have some.
func TestListsFallbacks(t *testing.T) {
	f := pooltest.VF(0x3b, 0)
	f.DataDirectRoots, f.NUMANodes = []string{"pci0008:00"}, []int{1, 0}
	all, plain := pooltest.DRA("fast", f), pooltest.DRA("fast", pooltest.VF(0x3b, 0))
	for _, p := range []*pool.Pool{&all, &plain} {
		p.Spec.DataDirect, p.Spec.ListNUMANodes = true, true
	}

	features := AllFeatures()
	if got := features.Fallbacks(all); got != nil {
		t.Errorf("fallbacks %+v of a cluster with lists", got)
	}
	features.Lists = false
	if got := features.Fallbacks(plain); got != nil {
		t.Errorf("fallbacks %+v of a node where no Function has several values", got)
	}
	got := features.Fallbacks(all)
	if len(got) != 2 || got[0].Feature != v1alpha1.FeatureLists || got[0].GateOn ||
		!strings.Contains(got[0].Message, "pcieRoot") ||
		!strings.Contains(got[1].Message, "numaNode") {
		t.Errorf("fallbacks %+v", got)
	}

	features.ListsHarm = ListsHarm("v1.36.1")
	if got := features.Fallbacks(all); !got[0].GateOn ||
		!strings.Contains(got[0].Message, "the scheduler of Kubernetes") {
		t.Errorf("fallbacks %+v", got)
	}
	if got := features.Missing(); got != nil {
		t.Errorf("missing %v: the feature gate is off in most clusters", got)
	}

	all.Spec.DataDirect, all.Spec.ListNUMANodes = false, false
	if got := features.Fallbacks(all); got != nil {
		t.Errorf("fallbacks %+v of a pool that asks for no lists", got)
	}
}

// TestSelectorsOfLists checks what selectors make of an attribute that may be a list.
func TestSelectorsOfLists(t *testing.T) {
	node := func(a resourceapi.DeviceAttribute) cel.Device {
		return cel.Device{Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			numaNode: a,
		}}
	}
	one := node(resourceapi.DeviceAttribute{IntValue: new(int64(0))})
	several := node(resourceapi.DeviceAttribute{IntValues: []int64{1, 0}})
	const numa = `device.attributes["resource.kubernetes.io"].numaNode`

	for _, tt := range []struct {
		expression string
		lists      bool // the scheduler's feature gate
		device     cel.Device
		want       bool
	}{
		{numa + " == 0", true, one, true},
		{numa + " == 0", true, several, false},
		{numa + " == 0", false, several, false},
		{numa + ".includes(0)", true, one, true},
		{numa + ".includes(0)", true, several, true},
		{numa + ".includes(2)", true, several, false},
	} {
		compiled := cel.NewCache(1, cel.Features{EnableListTypeAttributes: tt.lists}).
			GetOrCompile(tt.expression)
		if compiled.Error != nil {
			t.Errorf("%s: %v", tt.expression, compiled.Error)
			continue
		}
		got, _, err := compiled.DeviceMatches(t.Context(), tt.device)
		if got != tt.want || err != nil {
			t.Errorf("%s, lists %t, of %v: %t, %v; want %t", tt.expression, tt.lists,
				tt.device.Attributes, got, err, tt.want)
		}
	}
}
