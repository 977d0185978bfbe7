// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func generated(t *testing.T, shape string, o Options) *Cluster {
	t.Helper()
	s, err := Find(shape)
	if err != nil {
		t.Fatal(err)
	}

	cluster, err := Generate(s, o)
	if err != nil {
		t.Fatal(err)
	}

	return cluster
}

// TestShapes checks the number of devices of each shape, and the limits of the API.
func TestShapes(t *testing.T) {
	want := map[string]int{
		"dgx-a100": 208, "sriov": 128, "sriov-counters": 130, "sriov-ports": 2,
		"foozer-1000-tiny": 2, "foozer-1000-small": 4, "foozer-1000-medium": 8,
		"foozer-1000-large": 16,
		"foozer-4000-tiny":  2, "foozer-4000-small": 4, "foozer-4000-medium": 8,
		"foozer-4000-large": 16,
	}
	for _, shape := range Shapes() {
		t.Run(shape.Name, func(t *testing.T) {
			cluster := generated(t, shape.Name, Options{Nodes: 2})
			stats, err := cluster.Stats()
			if err != nil {
				t.Fatal(err)
			}
			if stats.Nodes != 2 || stats.Devices != 2*want[shape.Name] {
				t.Errorf("%d nodes with %d devices, want 2 with %d", stats.Nodes, stats.Devices,
					2*want[shape.Name])
			}

			slices, devices := sets.New[string](), sets.New[string]()
			for _, slice := range cluster.Slices {
				if slices.Has(slice.Name) ||
					len(slice.Spec.Devices) > resourceapi.ResourceSliceMaxDevices ||
					len(slice.Spec.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets {
					t.Errorf("ResourceSlice %s is there twice or is too large", slice.Name)
				}

				slices.Insert(slice.Name)
				for _, d := range slice.Spec.Devices {
					if devices.Has(slice.Spec.Pool.Name + d.Name) {
						t.Errorf("device %s is in pool %s twice", d.Name, slice.Spec.Pool.Name)
					}
					devices.Insert(slice.Spec.Pool.Name + d.Name)
				}
			}
		})
	}
}

// TestSRIOVAddresses checks that Functions of a host have different PCI addresses in the kernel's
// format.
func TestSRIOVAddresses(t *testing.T) {
	for _, o := range []Options{
		{Nodes: 1}, {Nodes: 1, PFs: 16, VFs: 256}, {Nodes: 1, PFs: 3, VFs: 5},
	} {
		addresses := sets.New[string]()
		for _, slice := range generated(t, "sriov", o).Slices {
			for _, d := range slice.Spec.Devices {
				address := *d.Attributes["resource.kubernetes.io/pciBusID"].StringValue
				if _, err := pci.Parse(address); err != nil || addresses.Has(address) {
					t.Errorf("%+v: %s: %s is no address, or there twice: %v", o, d.Name,
						address, err)
				}
				addresses.Insert(address)
			}
		}
	}
}

func TestAllocated(t *testing.T) {
	for _, tt := range []struct {
		shape     string
		allocated float64
		want      int
	}{{"sriov", 0.4, 102}, {"sriov", 1, 256}, {"sriov", 0, 0}, {"dgx-a100", 0.5, 8},
		{"sriov-counters", 0.25, 64}, {"sriov-ports", 0.5, 128}} {
		cluster := generated(t, tt.shape, Options{Nodes: 2, Allocated: tt.allocated})
		if len(cluster.Claims) != tt.want {
			t.Errorf("%s, %g: %d claims, want %d", tt.shape, tt.allocated,
				len(cluster.Claims), tt.want)
		}

		taken := sets.New[string]()
		for _, c := range cluster.Claims {
			result := c.Status.Allocation.Devices.Results[0]
			device := result.Pool + "/" + result.Device
			if result.ShareID != nil {
				device += string(*result.ShareID)
			}
			taken.Insert(device)
		}

		if len(taken) != tt.want {
			t.Errorf("%s, %g: %d devices are taken, want %d", tt.shape, tt.allocated,
				len(taken), tt.want)
		}
	}
}

// TestSame checks that the same options give the same objects.
func TestSame(t *testing.T) {
	o := Options{Nodes: 3, PFs: 3, VFs: 9, Allocated: 0.3}
	var texts [2][]byte
	for i := range texts {
		var err error
		if texts[i], err = json.Marshal(generated(t, "sriov", o).Objects()); err != nil {
			t.Fatal(err)
		}
	}

	if !bytes.Equal(texts[0], texts[1]) {
		t.Error("the objects differ")
	}
}

func TestErrors(t *testing.T) {
	if _, err := Find("foozer"); err == nil ||
		!strings.Contains(err.Error(),
			`there is no shape "foozer"; there are dgx-a100, foozer-1000-large`) {
		t.Error(err)
	}
	for _, tt := range []struct {
		shape string
		o     Options
		want  string
	}{
		{"sriov", Options{}, "nodes: is 0"}, {"sriov", Options{Nodes: 1, PFs: 17}, "pfs: is 17"},
		{"sriov", Options{Nodes: 1, VFs: -1}, "vfs: is -1"},
		{"sriov", Options{Nodes: 1, Allocated: 1.5}, "allocated: is 150"},
		{"dgx-a100", Options{Nodes: 1, VFs: 1}, "pfs and vfs do not apply"},
	} {
		shape, err := Find(tt.shape)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Generate(shape, tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v: %v, want %q", tt.o, err, tt.want)
		}
	}
}
