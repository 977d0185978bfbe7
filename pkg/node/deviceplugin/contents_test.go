// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// tree makes empty files below a new directory, and returns the directory.
func tree(t *testing.T, paths ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, path := range paths {
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}

	return root
}

// poolOf returns a pool for the device plugin that selects all of these Functions.
func poolOf(name string, functions ...function.Function) pool.Pool {
	return pool.Pool{Name: name, Functions: functions, Spec: v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, DevicePlugin: &v1alpha1.DevicePluginSpec{},
		Selectors: []v1alpha1.FunctionSelector{{}},
	}}
}

// with returns a changed copy of a Function.
func with(f function.Function, change func(*function.Function)) function.Function {
	change(&f)
	return f
}

func TestContents(t *testing.T) {
	sys := tree(t,
		"bus/pci/devices/0000:3b:00.3/infiniband_verbs/uverbs4/dev",
		"bus/pci/devices/0000:3b:00.3/infiniband_mad/umad4/dev",
		"bus/pci/devices/0000:3b:00.3/infiniband_mad/issm4/dev",
		"bus/auxiliary/devices/mlx5_core.sf.7/infiniband_verbs/uverbs9/dev",
		"bus/pci/devices/0000:3b:00.4/uio/uio3/dev",
		"bus/pci/devices/0000:3b:00.5/vfio-dev/vfio1/dev",
	)

	nodes := devnode.Finder{
		SysRoot: sys, DevRoot: tree(t, "vhost-net", "net/tun", "infiniband/rdma_cm",
			"iommu", "vfio/170", "vfio/devices/vfio1"),
	}
	rdma := func(s *v1alpha1.DevicePoolSpec) { s.Selectors[0].IsRdma = true }
	vhostVDPA := func(s *v1alpha1.DevicePoolSpec) { s.Selectors[0].VDPAType = "vhost" }

	spec := func(host, container, permissions string) *pluginapi.DeviceSpec {
		return &pluginapi.DeviceSpec{
			HostPath: host, ContainerPath: container, Permissions: permissions,
		}
	}

	sf := function.Function{
		ID: function.SubfunctionID("0000:3b:00.0", 88), Kind: function.SF,
		PF: "0000:3b:00.0", Index: 88,
		AuxDevice: "mlx5_core.sf.7", RDMA: true, RDMADevices: []string{"mlx5_9"},
	}

	for _, test := range []struct {
		name      string
		functions []function.Function
		pool      func(*v1alpha1.DevicePoolSpec)
		info      string
		devices   []*pluginapi.DeviceSpec
		// files has the device-info files.
		files string
	}{
		{"netdev", vfs("3b:0"), nil,
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"}}}`, nil,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"two, in the order of the request", vfs("5e:1 3b:0"), nil,
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"}},"0000:5e:00.3":{"generic":{"deviceID":"0000:5e:00.3"}}}`, nil,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:5e:00.3","pf-pci-address":"0000:5e:00.0"}}` +
				`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"a NIC without VFs",
			[]function.Function{
				{ID: function.ID{Address: "0000:01:00.0"}, Kind: function.PF, PF: "0000:01:00.0"},
			}, nil,
			`{"0000:01:00.0":{"generic":{"deviceID":"0000:01:00.0"}}}`, nil,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:01:00.0"}}`},
		{"vfio", []function.Function{with(vf("3b", 0), func(f *function.Function) {
			f.Driver, f.IOMMUGroup = "vfio-pci", "169"
		})}, nil,
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"},"vfio":{"dev-mount":"/dev/vfio/169","mount":"/dev/vfio/vfio"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/vfio/vfio", "/dev/vfio/vfio", "rw"),
				spec("/dev/vfio/169", "/dev/vfio/169", "rw"),
			},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"vfio without an IOMMU", []function.Function{with(vf("3b", 0), func(f *function.Function) {
			f.Driver, f.IOMMUGroup = "vfio-pci", "noiommu-2"
		})}, nil,
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"},"vfio":{"dev-mount":"/dev/vfio/2","mount":"/dev/vfio/vfio"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/vfio/vfio", "/dev/vfio/vfio", "rw"),
				spec("/dev/vfio/noiommu-2", "/dev/vfio/2", "rw"),
			},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"vfio with iommufd, without CDI", []function.Function{with(vf("3b", 3), func(f *function.Function) {
			f.Driver, f.IOMMUGroup = "vfio-pci", "170"
		})}, nil,
			`{"0000:3b:00.5":{"generic":{"deviceID":"0000:3b:00.5"},"vfio":{"dev-mount":"/dev/vfio/170","mount":"/dev/vfio/vfio"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/vfio/vfio", "/dev/vfio/vfio", "rw"),
				spec("/dev/vfio/170", "/dev/vfio/170", "rw"),
			},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.5","pf-pci-address":"0000:3b:00.0"}}`},
		{"uio", []function.Function{with(vf("3b", 2), func(f *function.Function) {
			f.Driver = "igb_uio"
		})}, nil,
			`{"0000:3b:00.4":{"generic":{"deviceID":"0000:3b:00.4"},"uio":{"mount":"/dev/uio3"}}}`,
			[]*pluginapi.DeviceSpec{spec("/dev/uio3", "/dev/uio3", "rwm")},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.4","pf-pci-address":"0000:3b:00.0"}}`},
		{"RDMA", []function.Function{with(vf("3b", 1), func(f *function.Function) {
			f.RDMA, f.RDMADevices = true, []string{"mlx5_4"}
		})}, rdma,
			`{"0000:3b:00.3":{"generic":{"deviceID":"0000:3b:00.3"},"rdma":{"issm":"/dev/infiniband/issm4","rdma_cm":"/dev/infiniband/rdma_cm",` +
				`"rdma_dev":"mlx5_4","umad":"/dev/infiniband/umad4","uverbs":"/dev/infiniband/uverbs4"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/infiniband/uverbs4", "/dev/infiniband/uverbs4", "rw"),
				spec("/dev/infiniband/issm4", "/dev/infiniband/issm4", "rw"),
				spec("/dev/infiniband/umad4", "/dev/infiniband/umad4", "rw"),
				spec("/dev/infiniband/rdma_cm", "/dev/infiniband/rdma_cm", "rw"),
			},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.3","rdma-device":"mlx5_4","pf-pci-address":"0000:3b:00.0"}}`},
		{"RDMA that the pool does not ask for",
			[]function.Function{with(vf("3b", 1), func(f *function.Function) {
				f.RDMA, f.RDMADevices = true, []string{"mlx5_4"}
			})}, nil,
			`{"0000:3b:00.3":{"generic":{"deviceID":"0000:3b:00.3"}}}`, nil,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.3","pf-pci-address":"0000:3b:00.0"}}`},
		{"SF", []function.Function{sf}, rdma,
			`{"0000:3b:00.0/sf88":{"generic":{"deviceID":"0000:3b:00.0/sf88"},"rdma":{"rdma_cm":"/dev/infiniband/rdma_cm","rdma_dev":"mlx5_9","uverbs":"/dev/infiniband/uverbs9"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/infiniband/uverbs9", "/dev/infiniband/uverbs9", "rw"),
				spec("/dev/infiniband/rdma_cm", "/dev/infiniband/rdma_cm", "rw"),
			},
			""},
		{"vDPA with vhost", []function.Function{with(vf("3b", 0), func(f *function.Function) {
			f.VDPA = function.VDPA{Name: "vdpa2", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-1"}
		})}, vhostVDPA,
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"},"vdpa":{"mount":"/dev/vhost-vdpa-1"}}}`,
			[]*pluginapi.DeviceSpec{spec("/dev/vhost-vdpa-1", "/dev/vhost-vdpa-1", "rwm")},
			`{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa2","driver":"vhost","path":"/dev/vhost-vdpa-1",` +
				`"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"vDPA with virtio", []function.Function{with(vf("3b", 0), func(f *function.Function) {
			f.VDPA = function.VDPA{Name: "vdpa2", Driver: "virtio_vdpa"}
		})}, func(s *v1alpha1.DevicePoolSpec) { s.Selectors[0].VDPAType = "virtio" },
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"},"vdpa":{}}}`, nil,
			`{"type":"vdpa","version":"1.1.0","vdpa":{"parent-device":"vdpa2","driver":"virtio","pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
		{"vhost-net, once for all Functions", vfs("3b:0-1"), func(s *v1alpha1.DevicePoolSpec) {
			s.DevicePlugin.NeedVhostNet = true
		},
			`{"0000:3b:00.2":{"generic":{"deviceID":"0000:3b:00.2"},"vhost":{"net-mount":"/dev/vhost-net","tun-mount":"/dev/net/tun"}},` +
				`"0000:3b:00.3":{"generic":{"deviceID":"0000:3b:00.3"},"vhost":{"net-mount":"/dev/vhost-net","tun-mount":"/dev/net/tun"}}}`,
			[]*pluginapi.DeviceSpec{
				spec("/dev/vhost-net", "/dev/vhost-net", "rw"),
				spec("/dev/net/tun", "/dev/net/tun", "rw"),
			},
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","vhost-net":"/dev/vhost-net","pf-pci-address":"0000:3b:00.0"}}` +
				`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.3","vhost-net":"/dev/vhost-net","pf-pci-address":"0000:3b:00.0"}}`},
		{"additional information, the Function's own before that of all", vfs("3b:0"),
			func(s *v1alpha1.DevicePoolSpec) {
				s.DevicePlugin.AdditionalInfo = map[string]map[string]string{
					"*": {"token": "a", "zone": "z"}, "0000:3b:00.2": {"token": "b"},
					"0000:3b:00.3": {"token": "c"},
				}
			},
			`{"0000:3b:00.2":{"extra":{"token":"b","zone":"z"},"generic":{"deviceID":"0000:3b:00.2"}}}`, nil,
			`{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:00.2","pf-pci-address":"0000:3b:00.0"}}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := poolOf("fast", test.functions...)
			if test.pool != nil {
				test.pool(&p.Spec)
			}

			var all []content
			dir := t.TempDir()
			var files strings.Builder
			for _, f := range test.functions {
				c, err := contentOf(&nodes, f, p, false)
				if err != nil {
					t.Fatal(err)
				}

				all = append(all, c)
				if err := NewDeviceInfo(dir, t.TempDir()).write("intel.com/fast", c); err != nil {
					t.Fatal(err)
				}

				text, err := os.ReadFile(filepath.Join(dir,
					"intel.com-fast-"+strings.ReplaceAll(f.ID.String(), "/", "-")+"-device.json"))
				if err != nil && test.files != "" {
					t.Error(err)
				}

				files.Write(text)
			}

			got := response("intel.com/fast", all, false)
			want := &pluginapi.ContainerAllocateResponse{Devices: test.devices,
				Envs: map[string]string{
					"PCIDEVICE_INTEL_COM_FAST":      strings.Join(deviceIDs(test.functions), ","),
					"PCIDEVICE_INTEL_COM_FAST_INFO": test.info,
				}}

			if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
				t.Errorf("response: -want +got\n%s", diff)
			}
			if diff := cmp.Diff(test.files, files.String()); diff != "" {
				t.Errorf("device-info files: -want +got\n%s", diff)
			}
		})
	}
}

// TestContentsThatContainersCouldNotUse: an Allocate fails if the container would get less than it
// needs.
func TestContentsThatContainersCouldNotUse(t *testing.T) {
	nodes := devnode.Finder{SysRoot: t.TempDir(), DevRoot: tree(t, "vhost-net")}
	for _, test := range []struct {
		name   string
		driver string
		pool   func(*v1alpha1.DevicePoolSpec)
		want   string
	}{
		{"vfio without a group", "vfio-pci", nil, "IOMMU"},
		{"no UIO device", "uio_pci_generic", nil, "UIO"},
		{"no RDMA device", "", func(s *v1alpha1.DevicePoolSpec) {
			s.Selectors[0].IsRdma = true
		}, "RDMA"},
		{"no tun", "", func(s *v1alpha1.DevicePoolSpec) {
			s.DevicePlugin.NeedVhostNet = true
		}, "/dev/net/tun"},
	} {
		t.Run(test.name, func(t *testing.T) {
			// RDMA is true without an RDMA device, as for a Function whose RDMA device is in a pod.
			f := with(vf("3b", 0), func(f *function.Function) {
				f.Driver, f.RDMA = test.driver, true
			})
			p := poolOf("fast", f)
			if test.pool != nil {
				test.pool(&p.Spec)
			}

			_, err := contentOf(&nodes, f, p, false)
			if err == nil || !strings.Contains(err.Error(), test.want) ||
				!strings.Contains(err.Error(), "0000:3b:00.2") {
				t.Errorf("error %v: want the Function and %q in it", err, test.want)
			}
		})
	}
}

func TestEnvironmentName(t *testing.T) {
	for resource, want := range map[string]string{
		"intel.com/sriov_dpdk":     "PCIDEVICE_INTEL_COM_SRIOV_DPDK",
		"xpu.opiproject.org/fast":  "PCIDEVICE_XPU_OPIPROJECT_ORG_FAST",
		"acme-corp.io/DPDK-nic.1x": "PCIDEVICE_ACME-CORP_IO_DPDK-NIC_1X",
	} {
		if got := environmentName(resource); got != want {
			t.Errorf("environmentName(%s) = %s, want %s", resource, got, want)
		}
	}
}
