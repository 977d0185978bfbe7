// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// one scans and returns one Function.
func one(t *testing.T, s *scanner, id function.ID) function.Function {
	t.Helper()
	functions, err := s.scan()
	if err != nil {
		t.Fatal(err)
	}

	for c, err := range s.problems {
		t.Errorf("%s: %s: %v", c.entry, c.why, err)
	}

	i := slices.IndexFunc(functions, func(f function.Function) bool { return f.ID == id })
	if i < 0 {
		t.Fatalf("no Function %s in %+v", id, functions)
	}

	return functions[i]
}

// TestDetails adds properties to a healthy host that only some Functions have.
func TestDetails(t *testing.T) {
	vf := inTree + "0000:3b:01.0/"
	for name, tt := range map[string]struct {
		// id is VF 0 if it is empty.
		id     function.ID
		tree   sysfsTree
		remove []string
		want   func(*function.Function)
	}{
		"firmware number": {
			tree: sysfsTree{vf + "acpi_index": "101"}, want: func(f *function.Function) {
				f.ACPIIndex = "101"
			},
		},
		"IOMMU group": {
			tree: sysfsTree{vf + "iommu_group": "-> ../../../../kernel/iommu_groups/42",
				"kernel/iommu_groups/42/type": "DMA-FQ"},
			want: func(f *function.Function) { f.IOMMUGroup = "42" },
		},
		"vfio-pci without an IOMMU": {
			tree: sysfsTree{
				vf + "driver":                "-> ../../../../bus/pci/drivers/vfio-pci",
				vf + "iommu_group":           "-> ../../../../kernel/iommu_groups/3",
				"kernel/iommu_groups/3/name": "vfio-noiommu",
			},
			want: func(f *function.Function) { f.Driver, f.IOMMUGroup = "vfio-pci", "noiommu-3" },
		},
		"RDMA": {
			tree: sysfsTree{
				rdmaMode: "Y", vf + "infiniband/mlx5_3/": "", vf + "infiniband/mlx5_2/": "",
			},
			want: func(f *function.Function) {
				f.RDMA, f.RDMADevices, f.RDMAMode = true, []string{
					"mlx5_2", "mlx5_3",
				}, function.RDMAShared
			},
		},
		"RDMA device that was in a pod from the start": {
			tree: sysfsTree{rdmaMode: "N", vf + "infiniband/": ""},
			want: func(f *function.Function) { f.RDMA, f.RDMAMode = true, function.RDMAExclusive },
		},
		"InfiniBand": {
			tree: sysfsTree{
				rdmaMode: "Y", vf + "net/ens3f0v0/type": "32",
				vf + "infiniband/mlx5_2/ports/1/pkeys/0": "0x8050",
			},
			want: func(f *function.Function) {
				f.LinkType, f.RDMA, f.RDMADevices, f.PKey = "infiniband", true, []string{
					"mlx5_2",
				}, "0x8050"
				f.RDMAMode = function.RDMAShared
			},
		},
		"other link type": {
			tree: sysfsTree{vf + "net/ens3f0v0/type": "772"}, want: func(f *function.Function) {},
		},
		"vDPA through virtio": {
			tree: sysfsTree{
				"bus/vdpa/devices/vdpa0":           "-> ../../../" + vf + "vdpa0",
				vf + "vdpa0/driver":                "-> ../../../../../../bus/vdpa/drivers/virtio_vdpa",
				vf + "vdpa0/virtio4/net/eth9/type": "1",
			},
			want: func(f *function.Function) {
				f.VDPA, f.Netdev = function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}, "eth9"
			},
		},
		"vDPA through virtio, in a pod": {
			tree: sysfsTree{
				"bus/vdpa/devices/vdpa0":  "-> ../../../" + vf + "vdpa0",
				vf + "vdpa0/driver":       "-> ../../../../../../bus/vdpa/drivers/virtio_vdpa",
				vf + "vdpa0/virtio4/net/": "",
			},
			want: func(f *function.Function) {
				f.VDPA, f.Netdev = function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}, ""
			},
		},
		"variant of vfio-pci": {
			tree: sysfsTree{vf + "driver": "-> ../../../../bus/pci/drivers/vendors_own",
				vf + "vfio-dev/vfio0/": ""},
			remove: []string{vf + "net"},
			want: func(f *function.Function) {
				f.Driver, f.Passthrough, f.Netdev, f.NoNetdev = "vendors_own", function.VFIO, "", true
			},
		},
		"variant of vfio-pci, on an older kernel": {
			tree: sysfsTree{
				vf + "driver":                              "-> ../../../../bus/pci/drivers/vendors-own",
				"bus/pci/drivers/vendors-own/module":       "-> ../../../../module/vendors_own",
				"module/vfio_pci_core/holders/vendors_own": "-> ../../vendors_own",
			},
			remove: []string{vf + "net"},
			want: func(f *function.Function) {
				f.Driver, f.Passthrough, f.Netdev, f.NoNetdev = "vendors-own", function.VFIO, "", true
			},
		},
		"uio": {
			tree: sysfsTree{
				vf + "driver": "-> ../../../../bus/pci/drivers/dpdk", vf + "uio/uio0/": "",
			},
			remove: []string{vf + "net"},
			want: func(f *function.Function) {
				f.Driver, f.Passthrough, f.Netdev, f.NoNetdev = "dpdk", function.UIO, "", true
			},
		},
		"driver that has made no netdev": {
			remove: []string{vf + "net"},
			want:   func(f *function.Function) { f.Netdev, f.NoNetdev = "", true },
		},
		"vDPA through vhost, first of two": {
			tree: sysfsTree{
				"bus/vdpa/devices/blue": "-> ../../../" + vf +
					"blue", vf + "blue/driver": "-> ../../../../../../bus/vdpa/drivers/vhost_vdpa",
				vf + "blue/vhost-vdpa-7/": "",
				"bus/vdpa/devices/red":    "-> ../../../" + vf + "red", vf + "red/": "",
			},
			want: func(f *function.Function) {
				f.VDPA = function.VDPA{
					Name: "blue", Driver: "vhost_vdpa", CharDevice: "vhost-vdpa-7",
				}
			},
		},
		"accelerator": {
			id: function.ID{Address: "0000:3b:10.0"},
			tree: under("0000:3b:10.0", sysfsTree{
				"class": "0x120000", "vendor": "0x8086", "device": "0x0d90", "numa_node": "1",
				"driver": "-> ../../../../bus/pci/drivers/vfio-pci",
			}),
			want: func(f *function.Function) {
				*f = function.Function{
					ID: function.ID{Address: "0000:3b:10.0"}, Kind: function.PF,
					Class: function.Accelerator, PF: "0000:3b:10.0",
					PFDriver: "vfio-pci", Index: -1,
					Vendor: "8086", Device: "0d90", Driver: "vfio-pci", NUMANode: 1,
					PCIeRoot: "pci0000:3a", LinkUp: true,
					Passthrough: function.VFIO, NoNetdev: true,
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tree := host()
			maps.Copy(tree, tt.tree)
			tree.write(t, root)

			for _, name := range tt.remove {
				must.Succeed(t, os.RemoveAll(filepath.Join(root, name)))
			}

			want := wantVF(0, "ens3f0v0")
			tt.want(&want)
			s := testScanner(root)
			for range 2 { // the second scan knows much already
				if diff := gocmp.Diff(want, one(t, s, want.ID)); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			}
		})
	}
}

// TestNetdevOfVDPA: the netdev that is shown is also the one that is attached, before the first
// scan and after it.
func TestNetdevOfVDPA(t *testing.T) {
	root := t.TempDir()
	vf := inTree + "0000:3b:01.0/"
	host().add(sysfsTree{
		"bus/vdpa/devices/vdpa0":           "-> ../../../" + vf + "vdpa0",
		vf + "vdpa0/driver":                "-> ../../../../../../bus/vdpa/drivers/virtio_vdpa",
		vf + "vdpa0/virtio4/net/eth9/type": "1",
	}).write(t, root)

	i := New(Options{SysRoot: root, HostNetdevs: func() (hostuse.Netdevs, error) {
		return nil, nil
	}})
	for _, when := range []string{"before the first scan", "after it"} {
		name, err := i.Netdev(function.ID{Address: "0000:3b:01.0"})
		if name != "eth9" || err != nil {
			t.Errorf("%s: netdev %q, %v, want eth9", when, name, err)
		}
		must.Succeed(t, i.scan())
	}

	if name, err := i.Netdev(function.ID{Address: "0000:3b:00.0"}); name != "ens3f0" || err != nil {
		t.Errorf("netdev %q of the PF, %v, want ens3f0", name, err)
	}
}

// TestVDPAUnreadable checks that a vDPA device, and the netdev that it has, stay as they were last
// seen while they cannot be read.
func TestVDPAUnreadable(t *testing.T) {
	const vf = inTree + "0000:3b:01.0/"
	for _, unreadable := range []string{
		"bus/vdpa/devices", "bus/vdpa/devices/vdpa0", inTree + "0000:3b:01.0/vdpa0/driver",
	} {
		t.Run(filepath.Base(unreadable), func(t *testing.T) {
			root := t.TempDir()
			host().add(sysfsTree{
				"bus/vdpa/devices/vdpa0":           "-> ../../../" + vf + "vdpa0",
				vf + "vdpa0/driver":                "-> ../../../../../../bus/vdpa/drivers/virtio_vdpa",
				vf + "vdpa0/virtio4/net/eth9/type": "1",
			}).write(t, root)
			s := testScanner(root)
			want := wantVF(0, "eth9")
			want.VDPA = function.VDPA{Name: "vdpa0", Driver: "virtio_vdpa"}
			look := func(when string) {
				t.Helper()
				if diff := gocmp.Diff(want, scanned(t, s)["0000:3b:01.0"]); diff != "" {
					t.Errorf("%s (-want +got):\n%s", when, diff)
				}
			}
			look("at first")

			path, away := filepath.Join(root, unreadable), filepath.Join(root, "away")
			must.Succeed(t, os.Rename(path, away))
			must.Succeed(t, os.WriteFile(path, nil, 0o600))
			look("unreadable")
			look("still unreadable")
			if !s.unread() {
				t.Error("nobody tries again")
			}

			must.Succeed(t, os.Remove(path))
			want.VDPA, want.Netdev = function.VDPA{}, "ens3f0v0"
			if filepath.Base(unreadable) == "driver" {
				want.VDPA.Name = "vdpa0"
			}
			look("gone")
		})
	}
}

// TestWhatPodsTake: a pod that takes the netdev and the RDMA device changes nothing else. A driver
// that is unbound takes its devices along. Another device at the address starts anew.
func TestWhatPodsTake(t *testing.T) {
	root := t.TempDir()
	const dir = inTree + "0000:3b:01.0/"
	vfio := sysfsTree{dir + "driver": "-> ../../../../bus/pci/drivers/vfio-pci"}
	group := sysfsTree{dir + "iommu_group": "-> ../../../../kernel/iommu_groups/42",
		"kernel/iommu_groups/42/type": "DMA-FQ"}
	host().add(group).add(sysfsTree{
		dir + "net/ens3f0v0/type": "32", dir + "infiniband/mlx5_2/ports/1/pkeys/0": "0x7fff",
		rdmaMode: "N",
	}).write(t, root)

	s := testScanner(root)
	want := wantVF(0, "ens3f0v0")
	want.LinkType, want.RDMA, want.RDMADevices, want.PKey, want.IOMMUGroup = "infiniband", true, []string{"mlx5_2"}, "0x7fff", "42"
	want.RDMAMode = function.RDMAExclusive
	look := func(what string) {
		t.Helper()
		if diff := gocmp.Diff(want, one(t, s, want.ID)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}

	// lookDespite is look for a scan that cannot read something.
	lookDespite := func(why reason) {
		t.Helper()
		if diff := gocmp.Diff(want, scanned(t, s)[want.ID.String()]); diff != "" {
			t.Errorf("without %s (-want +got):\n%s", why, diff)
		}
		if _, reported := s.problems[problem{onBus + "0000:3b:01.0", why}]; !reported {
			t.Errorf("no problem with %s in %v", why, s.problems)
		}
	}

	remove := func(names ...string) {
		t.Helper()
		for _, name := range names {
			if err := os.RemoveAll(filepath.Join(root, name)); err != nil {
				t.Fatal(err)
			}
		}
	}

	look("at first")
	remove(dir+"net/ens3f0v0", dir+"infiniband/mlx5_2")
	want.Netdev = ""
	look("in a pod")

	known := want
	remove(dir + "infiniband")
	sysfsTree{dir + "infiniband": "a file"}.write(t, root)
	want.RDMA, want.RDMADevices, want.PKey, want.RDMAMode = false, nil, "", ""
	want.RDMAUnknown = true
	lookDespite(reasonRDMA)
	remove(dir + "infiniband")
	sysfsTree{dir + "infiniband/": ""}.write(t, root)
	want = known
	look("RDMA devices can be read again")

	sysfsTree{dir + "net/ens3f0v0/type": "32",
		dir + "infiniband/mlx5_9/ports/1/pkeys/0": "0x8001"}.write(t, root)
	want.Netdev, want.RDMADevices, want.PKey = "ens3f0v0", []string{"mlx5_9"}, "0x8001"
	look("back, the RDMA device under another name")

	remove(dir+"net", dir+"infiniband")
	vfio.write(t, root)
	want.Driver, want.Netdev, want.RDMA, want.RDMADevices, want.PKey = "vfio-pci", "", false, nil, ""
	want.RDMAMode = ""
	want.Passthrough, want.NoNetdev = function.VFIO, true
	look("bound to vfio-pci")

	remove(dir+"iommu_group", dir+"driver")
	want.Driver, want.Passthrough, want.IOMMUGroup = "", "", ""
	look("without an IOMMU, bound to nothing")
	vfio.write(t, root)
	want.Driver, want.Passthrough = "vfio-pci", function.VFIO
	look("bound to vfio-pci, which is not ready yet")
	sysfsTree{dir + "iommu_group": "-> ../../../../kernel/iommu_groups/0",
		"kernel/iommu_groups/0/name/": ""}.write(t, root)
	lookDespite(reasonIOMMU)
	remove("kernel/iommu_groups/0/name")
	sysfsTree{"kernel/iommu_groups/0/name": "vfio-noiommu"}.write(t, root)
	want.IOMMUGroup = "noiommu-0"
	look("vfio-pci is ready")

	remove(onBus+"0000:3b:01.0", inTree+"0000:3b:01.0")
	vf("0000:3b:01.0", "0000:3b:00.0", "").write(t, root)
	want = wantVF(0, "")
	look("another device")
}

// rdmaMode is the parameter of ib_core that shows the mode.
const rdmaMode = "module/ib_core/parameters/netns_mode"

// TestRDMAMode: each scan reads the mode again. Only Functions with an RDMA device have it.
func TestRDMAMode(t *testing.T) {
	root := t.TempDir()
	host().add(sysfsTree{
		inTree + "0000:3b:00.0/infiniband/mlx5_0/":   "",
		inTree + "0000:3b:01.0/infiniband/":          "", // the device is in a pod
		inTree + "0000:3b:00.0/mlx5_core.sf.2/sfnum": "88",
		"bus/auxiliary/devices/mlx5_core.sf.2": "-> ../../../" + inTree +
			"0000:3b:00.0/mlx5_core.sf.2",
	}).write(t, root)

	s := testScanner(root)
	look := func(what string, want function.RDMAMode, reported bool) {
		t.Helper()
		functions, err := s.scan()
		must.Succeed(t, err)
		with := 0
		for _, f := range functions {
			switch {
			case f.RDMA && f.RDMAMode != want:
				t.Errorf("%s: Function %s has mode %q, want %q", what, f.ID, f.RDMAMode, want)
			case !f.RDMA && f.RDMAMode != "":
				t.Errorf("%s: Function %s without an RDMA device has mode %q", what,
					f.ID, f.RDMAMode)
			case f.RDMA:
				with++
			}
		}

		if with != 2 {
			t.Errorf("%s: %d Functions with RDMA, want 2", what, with)
		}
		if err := s.problems[problem{"", reasonRDMA}]; (err == nil) != reported {
			t.Errorf("%s: problem %v, in %v", what, err, s.problems)
		}
	}

	look("kernel that does not tell it", "", false)
	for _, test := range []struct {
		text     string
		want     function.RDMAMode
		reported bool
	}{
		{"Y", function.RDMAShared, true}, {"N", function.RDMAExclusive, true}, {"2", "", false},
		{"", "", false},
		{"Y", function.RDMAShared, true},
	} {
		sysfsTree{rdmaMode: test.text}.write(t, root)
		look("parameter "+test.text, test.want, test.reported)
	}
}

// TestSubfunctionRDMA: an SF has its own RDMA device and vDPA device, not its PF's.
func TestSubfunctionRDMA(t *testing.T) {
	root := t.TempDir()
	const sf = inTree + "0000:3b:00.0/mlx5_core.sf.2/"
	host().add(sysfsTree{
		"bus/auxiliary/devices/mlx5_core.sf.2": "-> ../../../" + inTree +
			"0000:3b:00.0/mlx5_core.sf.2",
		rdmaMode:                  "Y",
		sf + "sfnum":              "88",
		sf + "infiniband/mlx5_5/": "",
		inTree + "0000:3b:00.0/infiniband/mlx5_0/":    "",
		inTree + "0000:3b:00.0/iommu_group":           "-> ../../../../kernel/iommu_groups/7",
		"bus/vdpa/devices/vdpa0":                      "-> ../../../" + sf + "vdpa0",
		sf + "vdpa0/":                                 "",
		inTree + "0000:3b:00.0/acpi_index":            "3",
		inTree + "0000:3b:00.0/mlx5_core.eth.0/name/": "",
	}).write(t, root)

	got := one(t, testScanner(root), function.SubfunctionID("0000:3b:00.0", 88))
	want := wantPF()
	want.ID, want.Kind, want.Index, want.Driver, want.Netdev, want.NoNetdev = got.ID, function.SF, 88, "", "", true
	want.NumVFs, want.VFOffset, want.VFStride, want.TotalVFs = 0, 0, 0, 0
	want.RDMAMode = function.RDMAShared
	want.AuxDevice, want.RDMA, want.RDMADevices, want.VDPA = "mlx5_core.sf.2", true, []string{
		"mlx5_5",
	}, function.VDPA{Name: "vdpa0"}
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestNetdevUnreadable: driver and netdev stay as they were last seen while they cannot be read, and
// so does the host's use. A netdev that could never be read may be used by the host.
func TestNetdevUnreadable(t *testing.T) {
	const vf, pf = "0000:3b:01.0", "0000:3b:00.0"
	for name, test := range map[string]struct {
		of, file string
		why      reason
	}{
		"netdev":         {vf, "/net", reasonNetdev},
		"netdev of a PF": {pf, "/net", reasonNetdev},
		"driver":         {vf, "/driver", reasonDriver},
		"PF":             {pf, "", reasonNetdev},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			host().write(t, root)
			path := filepath.Join(root, inTree, test.of) + test.file
			uses := hostuse.Netdevs{
				"ens3f0":   {Use: "has address 192.0.2.1/24", Parent: pf, DefaultRoute: true},
				"ens3f0v0": {Use: "is a port of bridge br0", Parent: vf},
			}
			options := Options{
				SysRoot: root, HostNetdevs: func() (hostuse.Netdevs, error) { return uses, nil },
			}
			s := newScanner(options)
			want := scanned(t, s)
			must.Succeed(t, os.Rename(path, filepath.Join(root, "away")))
			must.Succeed(t, os.WriteFile(path, nil, 0o600))
			for range 2 {
				got := scanned(t, s)
				if diff := gocmp.Diff(want, got, cmpopts.IgnoreFields(function.Function{},
					"RDMAUnknown")); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if s.problems[problem{onBus + test.of, test.why}] == nil {
					t.Errorf("problems %v", s.problems)
				}
			}

			got := scanned(t, newScanner(options))
			f, listed := got[test.of]
			if isUsed := strings.Contains(f.HostUse, "may be used"); test.file == "/net" &&
				!(isUsed && f.DefaultRoute) {
				t.Errorf("at first: %+v, want it used by the host", f)
			}
			if test.file == "" && listed {
				t.Errorf("a PF that cannot be read is listed: %+v", f)
			}
		})
	}
}

// TestRDMAUnreadable: an attribute that cannot be read is reported, and the Function is still
// listed.
func TestRDMAUnreadable(t *testing.T) {
	vf := inTree + "0000:3b:01.0/"
	for name, tree := range map[string]sysfsTree{
		"devices": {vf + "infiniband": "a file"},
		"partition table": {
			vf + "infiniband/mlx5_2/ports/1/pkeys/0/": "", vf + "net/ib0/type": "32",
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			host().write(t, root)

			if name == "partition table" {
				if err := os.RemoveAll(filepath.Join(root, vf+"net")); err != nil {
					t.Fatal(err)
				}
			}

			tree.write(t, root)
			s := testScanner(root)
			functions, err := s.scan()
			if err != nil || len(functions) == 0 {
				t.Errorf("%d Functions, %v", len(functions), err)
			}
			if _, reported := s.problems[problem{onBus + "0000:3b:01.0", reasonRDMA}]; !reported {
				t.Errorf("no problem in %v", s.problems)
			}
		})
	}
}

// TestDDPProfile: the firmware is asked once, and again when the driver may have loaded another
// package, or after a failure.
func TestDDPProfile(t *testing.T) { synctest.Test(t, testDDPProfile) }

func testDDPProfile(t *testing.T) {
	root := t.TempDir()
	const pf = inTree + "0000:3b:00.0/"
	ice := "-> ../../../../bus/pci/drivers/ice"
	host().add(sysfsTree{pf + "driver": ice}).write(t, root)
	s := testScanner(root)
	var mutex sync.Mutex
	asked, answer, failure := 0, "ICE OS Default Package", error(nil)
	set := func(change func()) {
		mutex.Lock()
		defer mutex.Unlock()
		change()
	}
	s.options.DDPProfile = func(address pci.Address) (string, error) {
		mutex.Lock()
		defer mutex.Unlock()
		asked++
		if address != "0000:3b:00.0" {
			t.Errorf("%s was asked", address)
		}
		return answer, failure
	}

	look := func(what, want string, wantAsked int) {
		t.Helper()
		functions, err := s.scan()
		if err != nil {
			t.Fatal(err)
		}

		for _, f := range functions {
			if f.DDPProfile != want {
				t.Errorf("%s: %s has %q, want %q", what, f.ID, f.DDPProfile, want)
			}
		}

		set(func() {
			if asked != wantAsked {
				t.Errorf("%s: asked %d times, want %d", what, asked, wantAsked)
			}
		})
	}

	netdev := filepath.Join(root, pf+"net/ens3f0")
	look("at first", "ICE OS Default Package", 1)
	look("again", "ICE OS Default Package", 1)
	if err := os.RemoveAll(netdev); err != nil {
		t.Fatal(err)
	}

	look("netdev in a pod", "ICE OS Default Package", 1)
	sysfsTree{pf + "net/ens3f0/type": "1",
		pf + "driver": "-> ../../../../bus/pci/drivers/none"}.write(t, root)
	look("another driver", "", 1)
	set(func() {
		answer, failure = "ICE COMMS Package", errors.New("no buffer space available")
	})
	sysfsTree{pf + "driver": ice}.write(t, root)
	look("firmware busy", "", 2)
	if _, reported := s.problems[problem{onBus + "0000:3b:00.0", reasonDDP}]; !reported {
		t.Errorf("no problem in %v", s.problems)
	}

	set(func() { failure = nil })
	look("it is not asked again at once", "", 2)
	time.Sleep(2 * retry)
	look("another package", "ICE COMMS Package", 3)
}

// TestSlowDDPProfile checks that a PF whose firmware hangs delays one scan for a moment, and no
// others, and that its answer causes another scan.
func TestSlowDDPProfile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		host().add(sysfsTree{
			inTree + "0000:3b:00.0/driver": "-> ../../../../bus/pci/drivers/ice",
		}).write(t, root)
		s := testScanner(root)
		answers := make(chan string)
		s.options.DDPProfile = func(pci.Address) (string, error) { return <-answers, nil }

		look := func(what, want string, most time.Duration) {
			t.Helper()
			begin := time.Now()
			got := one(t, s, function.ID{Address: "0000:3b:00.0"}).DDPProfile
			if took := time.Since(begin); got != want || took > most {
				t.Errorf("%s: %q after %s, want %q", what, got, took, want)
			}
		}

		look("it hangs", "", 2*time.Second)
		look("it still hangs", "", 0)
		answers <- "ICE COMMS Package"
		synctest.Wait()
		look("it has answered", "ICE COMMS Package", 0)
	})
}

// TestDefaultRoute: Functions that the node needs for its default route are marked.
func TestDefaultRoute(t *testing.T) {
	root := t.TempDir()
	host().add(sysfsTree{
		"class/net/br0/lower_bond0":      "-> ../bond0",
		"class/net/bond0/lower_ens3f0":   "-> ../ens3f0",
		"class/net/bond0/lower_ens4f0":   "-> ../ens4f0",
		"class/net/bond0/upper_br0":      "-> ../br0",
		"class/net/ens3f0v0/upper_vlan5": "-> ../vlan5",
	}).write(t, root)

	s := testScanner(root)
	var netdevs []string
	failure := errors.New("no buffer space available")
	s.options.HostNetdevs = func() (hostuse.Netdevs, error) {
		found := hostuse.Netdevs{}
		for _, name := range netdevs {
			found[name] = hostuse.Netdev{DefaultRoute: true}
		}
		return found, failure
	}

	look := func(what string, want ...string) {
		t.Helper()
		functions, err := s.scan()
		if err != nil {
			t.Fatal(err)
		}

		var got []string
		for _, f := range functions {
			if f.DefaultRoute {
				got = append(got, f.Netdev)
			}
		}

		if !slices.Equal(got, want) {
			t.Errorf("%s: default route over %q, want %q", what, got, want)
		}
	}

	look("unknown: all that have a netdev", "ens3f0", "ens3f0v0")
	failure = nil
	look("none")
	netdevs = []string{"ens3f0v0"}
	look("over the VF", "ens3f0v0")
	netdevs = []string{"br0"}
	look("over a bridge on a bond", "ens3f0")
	netdevs, failure = nil, errors.New("interrupted")
	look("unknown again: as it was", "ens3f0")
}

// TestSwitchID: a PF and its VFs have the identifier of the eswitch, and keep it while the netdev
// is in a pod.
func TestSwitchID(t *testing.T) {
	root := t.TempDir()
	const netdev = inTree + "0000:3b:00.0/net/ens3f0/"
	host().write(t, root)
	s := testScanner(root)
	for _, step := range []struct {
		change sysfsTree
		want   string
	}{
		{nil, ""},
		{sysfsTree{netdev + "phys_switch_id": "e8ebd30300a9b0f8"}, "e8ebd30300a9b0f8"},
		{sysfsTree{netdev + "phys_switch_id": "01"}, "01"},
	} {
		step.change.write(t, root)
		for _, id := range []function.ID{{Address: "0000:3b:00.0"}, {Address: "0000:3b:01.0"}} {
			if got := one(t, s, id).SwitchID; got != step.want {
				t.Errorf("after %v: %s has %q, want %q", step.change, id, got, step.want)
			}
		}
	}

	must.Succeed(t, os.RemoveAll(filepath.Join(root, netdev)))
	if got := one(t, s, function.ID{Address: "0000:3b:01.0"}).SwitchID; got != "01" {
		t.Errorf("%q while the netdev is away, want 01", got)
	}

	sysfsTree{netdev + "phys_switch_id": "what?", netdev + "type": "1"}.write(t, root)
	functions, err := s.scan()
	must.Succeed(t, err)
	if got := functions[0].SwitchID; got != "01" || len(s.problems) == 0 {
		t.Errorf("%q with problems %v, want 01 and why it may be old", got, s.problems)
	}
}

// TestLinkSpeed: the speed stays the last reported one, so that a lost link does not look like a
// slower one.
func TestLinkSpeed(t *testing.T) {
	root := t.TempDir()
	const netdev = inTree + "0000:3b:00.0/net/ens3f0/"
	host().write(t, root)
	s := testScanner(root)
	pf := function.ID{Address: "0000:3b:00.0"}
	for _, step := range []struct {
		change sysfsTree
		want   int
	}{
		{nil, 0},
		{sysfsTree{netdev + "speed": "25000"}, 25000},
		{sysfsTree{netdev + "carrier": "0", netdev + "speed": "-1"}, 25000},
		{sysfsTree{netdev + "carrier": "1", netdev + "speed": "fast"}, 25000},
		{sysfsTree{netdev + "speed": "10000"}, 10000},
	} {
		step.change.write(t, root)
		for _, id := range []function.ID{pf, {Address: "0000:3b:01.0"}} {
			if got := one(t, s, id).LinkSpeed; got != step.want {
				t.Errorf("after %v: %s has %d Mbit/s, want %d", step.change, id, got, step.want)
			}
		}
	}
}
