// SPDX-License-Identifier: Apache-2.0

package devnode_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// tree makes directories below a new one.
func tree(t *testing.T, paths ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, path := range paths {
		if err := os.MkdirAll(filepath.Join(root, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

var vf = function.Function{ID: function.ID{Address: "0000:3b:00.2"}, Kind: function.VF,
	Driver: "mlx5_core", IOMMUGroup: "42"}

// with returns the VF with a change.
func with(change func(*function.Function)) function.Function {
	f := vf
	change(&f)
	return f
}

func TestOf(t *testing.T) {
	finder := devnode.Finder{
		SysRoot: tree(t, "bus/pci/devices/0000:3b:00.2/infiniband_verbs/uverbs2",
			"bus/auxiliary/devices/mlx5_core.sf.7/infiniband_mad/umad9"),
		DevRoot: tree(t, "vhost-net", "net/tun"),
	}

	rdma := with(func(f *function.Function) { f.RDMADevices = []string{"mlx5_2"} })
	sf := with(func(f *function.Function) {
		f.Kind, f.AuxDevice, f.RDMADevices = function.SF, "mlx5_core.sf.7", []string{"mlx5_9"}
	})
	for _, test := range []struct {
		name     string
		function function.Function
		wish     devnode.Wish
		want     string // host paths
		info     map[string]map[string]string
	}{
		{"a netdev is all", vf, devnode.Wish{}, "", map[string]map[string]string{}},
		{"vfio-pci will be bound", vf, devnode.Wish{Driver: "vfio-pci"},
			"/dev/vfio/vfio /dev/vfio/42",
			map[string]map[string]string{
				"vfio": {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"},
			}},
		{"vfio-pci without an IOMMU", with(func(f *function.Function) {
			f.Driver, f.IOMMUGroup = "vfio-pci", "noiommu-3"
		}),
			devnode.Wish{}, "/dev/vfio/vfio /dev/vfio/noiommu-3",
			map[string]map[string]string{
				"vfio": {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/3"},
			}},
		{"RDMA of a VF", rdma, devnode.Wish{Options: pool.Options{RDMA: true}},
			"/dev/infiniband/uverbs2",
			map[string]map[string]string{
				"rdma": {"rdma_dev": "mlx5_2", "uverbs": "/dev/infiniband/uverbs2"},
			}},
		{"RDMA of an SF", sf, devnode.Wish{Options: pool.Options{RDMA: true}},
			"/dev/infiniband/umad9",
			map[string]map[string]string{
				"rdma": {"rdma_dev": "mlx5_9", "umad": "/dev/infiniband/umad9"},
			}},
		{"what the own driver makes ends with it", rdma,
			devnode.Wish{Driver: "vfio-pci", Options: pool.Options{RDMA: true, VDPA: "vhost"}},
			"/dev/vfio/vfio /dev/vfio/42",
			map[string]map[string]string{
				"vfio": {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"},
			}},
		{"RDMA that nobody asks for", rdma, devnode.Wish{}, "", map[string]map[string]string{}},
		{"vhost-net", vf, devnode.Wish{VhostNet: true}, "/dev/vhost-net /dev/net/tun",
			map[string]map[string]string{
				"vhost": {"net-mount": "/dev/vhost-net", "tun-mount": "/dev/net/tun"},
			}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := finder.Of(test.function, test.wish)
			if err != nil {
				t.Fatal(err)
			}

			var paths []string
			for _, n := range got.Nodes {
				paths = append(paths, n.HostPath)
			}
			if text := strings.Join(paths, " "); text != test.want {
				t.Errorf("nodes %q, want %q", text, test.want)
			}
			if diff := cmp.Diff(test.info, got.Info); diff != "" {
				t.Errorf("info (-want +got):\n%s", diff)
			}
		})
	}
}

// TestIOMMUFD checks that a container gets the nodes of iommufd beside those of the group, and only
// those that the kernel has.
func TestIOMMUFD(t *testing.T) {
	const device = "bus/pci/devices/0000:3b:00.2/vfio-dev/vfio7"
	group := map[string]string{"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"}
	own := map[string]string{
		"iommufd-mount": "/dev/iommu", "iommufd-dev-mount": "/dev/vfio/devices/vfio7",
	}
	both := maps.Clone(group)
	maps.Copy(both, own)

	for name, test := range map[string]struct {
		sys, dev []string
		want     string // host paths
		info     map[string]string
	}{
		"kernel with both": {
			[]string{device}, []string{"iommu", "vfio/devices/vfio7", "vfio/42"},
			"/dev/vfio/vfio /dev/vfio/42 /dev/iommu /dev/vfio/devices/vfio7", both,
		},
		"kernel without groups": {
			[]string{device}, []string{"iommu", "vfio/devices/vfio7"},
			"/dev/iommu /dev/vfio/devices/vfio7", own,
		},
		"kernel before Linux 6.1": {nil, []string{"vfio/42"}, "/dev/vfio/vfio /dev/vfio/42", group},
		"kernel without nodes of devices": {
			[]string{device}, []string{"iommu", "vfio/42"}, "/dev/vfio/vfio /dev/vfio/42", group,
		},
		"kernel without iommufd": {
			[]string{device}, []string{"vfio/devices/vfio7", "vfio/42"},
			"/dev/vfio/vfio /dev/vfio/42", group,
		},
		"the node of another device": {
			[]string{device}, []string{"iommu", "vfio/devices/vfio8", "vfio/42"},
			"/dev/vfio/vfio /dev/vfio/42", group,
		},
	} {
		t.Run(name, func(t *testing.T) {
			finder := devnode.Finder{SysRoot: tree(t, test.sys...), DevRoot: tree(t, test.dev...)}
			got, err := finder.Of(vf, devnode.Wish{Driver: "vfio-pci"})
			must.Succeed(t, err)

			var paths []string
			for _, n := range got.Nodes {
				paths = append(paths, n.HostPath)
				if n.Path != n.HostPath || n.Permissions != "rw" {
					t.Errorf("node %+v", n)
				}
			}
			if text := strings.Join(paths, " "); text != test.want {
				t.Errorf("nodes %q, want %q", text, test.want)
			}
			if diff := cmp.Diff(map[string]map[string]string{"vfio": test.info}, got.Info); diff != "" {
				t.Errorf("info (-want +got):\n%s", diff)
			}
		})
	}
}

// TestRememberedPaths checks that a path which the kubelet remembers over a reboot is not one of a
// VFIO device, because it may be another Function's then.
func TestRememberedPaths(t *testing.T) {
	sys := tree(t, "bus/pci/devices/0000:3b:00.2/vfio-dev/vfio7")
	wish := devnode.Wish{Driver: "vfio-pci", Remembered: true}

	both := devnode.Finder{SysRoot: sys, DevRoot: tree(t, "iommu", "vfio/devices/vfio7", "vfio/42")}
	got, err := both.Of(vf, wish)
	must.Succeed(t, err)
	want := map[string]string{"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/42"}
	if diff := cmp.Diff(want, got.Info["vfio"]); diff != "" || len(got.Nodes) != len(want) {
		t.Errorf("%d nodes, info (-want +got):\n%s", len(got.Nodes), diff)
	}

	noGroups := devnode.Finder{SysRoot: sys, DevRoot: tree(t, "iommu", "vfio/devices/vfio7")}
	if got, err := noGroups.Of(vf, wish); err == nil || !strings.Contains(err.Error(), "--use-cdi") {
		t.Errorf("nodes %+v, error %v, want one with --use-cdi", got.Nodes, err)
	}
}

func TestOfWhatAContainerCouldNotUse(t *testing.T) {
	finder := devnode.Finder{SysRoot: t.TempDir(), DevRoot: t.TempDir()}
	noGroup := with(func(f *function.Function) { f.IOMMUGroup = "" })
	for _, test := range []struct {
		name     string
		function function.Function
		wish     devnode.Wish
		want     string
	}{
		{"vfio-pci", noGroup, devnode.Wish{Driver: "vfio-pci"}, "has no IOMMU group"},
		{"uio", with(func(f *function.Function) { f.Driver = "uio_pci_generic" }), devnode.Wish{},
			"has no UIO device"},
		{"RDMA", vf, devnode.Wish{Options: pool.Options{RDMA: true}}, "has no RDMA device"},
		{"vDPA", vf, devnode.Wish{Options: pool.Options{VDPA: "vhost"}}, "has no vDPA device"},
		{"vhost-net", vf, devnode.Wish{VhostNet: true}, "its pool needs /dev/vhost-net"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := finder.Of(test.function, test.wish); err == nil ||
				!strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
}
