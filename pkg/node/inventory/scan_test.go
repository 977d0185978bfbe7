// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// sysfsTree describes a sysfs: files by their path. A content that begins with "-> " is a symbolic
// link, and a path that ends in "/" a directory.
type sysfsTree map[string]string

func (s sysfsTree) add(other sysfsTree) sysfsTree {
	all := maps.Clone(s)
	maps.Copy(all, other)
	return all
}

// under puts a device below a root port of pci0000:3a.
func under(address string, files sysfsTree) sysfsTree {
	dir := "devices/pci0000:3a/0000:3a:00.0/" + address
	out := sysfsTree{"bus/pci/devices/" + address: "-> ../../../" + dir}
	for name, content := range files {
		out[dir+"/"+name] = content
	}
	return out
}

func nic(address, device string, more sysfsTree) sysfsTree {
	return under(address, sysfsTree{
		"class": "0x020000", "vendor": "0x15b3", "device": "0x" + device, "numa_node": "1",
		"driver": "-> ../../../../bus/pci/drivers/mlx5_core",
	}.add(more))
}

func pf(address, netdev string, vfs ...string) sysfsTree {
	files := sysfsTree{"sriov_totalvfs": "16", "sriov_offset": "2", "sriov_stride": "1",
		"net/" + netdev + "/carrier": "1", "net/" + netdev + "/type": "1"}
	for i, vf := range vfs {
		files["virtfn"+strconv.Itoa(i)] = "-> ../" + vf
	}
	return nic(address, "a2dc", files)
}

func vf(address, pf, netdev string) sysfsTree {
	files := sysfsTree{"physfn": "-> ../" + pf, "net/": ""}
	if netdev != "" {
		files["net/"+netdev+"/carrier"], files["net/"+netdev+"/type"] = "0", "1"
	}
	return nic(address, "101e", files)
}

func (s sysfsTree) write(t testing.TB, root string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(s)) {
		content, full := s[name], filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(full); err != nil {
			t.Fatal(err)
		}

		var err error
		switch to, isLink := strings.CutPrefix(content, "-> "); {
		case isLink:
			err = os.Symlink(to, full)
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(full, 0o755)
		default:
			err = os.WriteFile(full, []byte(content+"\n"), 0o644)
		}

		if err != nil {
			t.Fatal(err)
		}
	}
}

func host() sysfsTree {
	return under("0000:3a:1f.0", sysfsTree{"class": "0x060400", "vendor": "0x8086", "device": "0x347a"}).
		add(pf("0000:3b:00.0", "ens3f0", "0000:3b:01.0", "0000:3b:01.1")).
		add(vf("0000:3b:01.0", "0000:3b:00.0", "ens3f0v0")).
		add(vf("0000:3b:01.1", "0000:3b:00.0", ""))
}

// testScanner returns a scanner for a host that uses no netdevs.
func testScanner(root string) *scanner {
	return newScanner(Options{SysRoot: root, HostNetdevs: func() (hostuse.Netdevs, error) {
		return nil, nil
	}})
}

func wantPF() function.Function {
	return function.Function{
		ID: function.ID{Address: "0000:3b:00.0"}, Kind: function.PF, Class: function.Network,
		PF: "0000:3b:00.0", PFName: "ens3f0", PFDriver: "mlx5_core", Index: -1,
		NumVFs: 2, VFOffset: 2, VFStride: 1, TotalVFs: 16, Vendor: "15b3", Device: "a2dc",
		Driver: "mlx5_core", NUMANode: 1, PCIeRoot: "pci0000:3a", Netdev: "ens3f0",
		LinkType: "ether", LinkUp: true,
	}
}

func wantVF(index int, netdev string) function.Function {
	f := wantPF()
	f.ID.Address = pci.Address("0000:3b:01." + strconv.Itoa(index))
	f.Kind, f.Index, f.Device, f.Netdev = function.VF, index, "101e", netdev
	f.NumVFs, f.VFOffset, f.VFStride, f.TotalVFs = 0, 0, 0, 0
	return f
}

func changed(f function.Function, change func(*function.Function)) function.Function {
	change(&f)
	return f
}

const (
	onBus  = "bus/pci/devices/"
	inTree = "devices/pci0000:3a/0000:3a:00.0/"
)

// TestScan changes something of a healthy host. A problem with one entry must not affect the
// others.
func TestScan(t *testing.T) {
	healthy := []function.Function{wantPF(), wantVF(0, "ens3f0v0"), wantVF(1, "")}
	for name, tt := range map[string]struct {
		change   sysfsTree
		remove   []string
		want     []function.Function
		problems []problem
	}{
		"healthy": {want: healthy},
		"no such class": {
			change:   sysfsTree{inTree + "0000:3b:01.0/class": "ethernet"},
			want:     []function.Function{healthy[0], healthy[2]},
			problems: []problem{{onBus + "0000:3b:01.0", reasonClass}},
		},
		"class too long": {
			change: sysfsTree{inTree + "0000:3a:1f.0/class": "0x02000000"}, want: healthy,
			problems: []problem{{onBus + "0000:3a:1f.0", reasonClass}},
		},
		"garbage in class": {
			change: sysfsTree{inTree + "0000:3a:1f.0/class": "\xff\xfe\x00"}, want: healthy,
			problems: []problem{{onBus + "0000:3a:1f.0", reasonClass}},
		},
		"endless class": {
			change:   sysfsTree{inTree + "0000:3a:1f.0/class": "0x02" + strings.Repeat("0", 1<<20)},
			want:     healthy,
			problems: []problem{{onBus + "0000:3a:1f.0", reasonClass}},
		},
		"class is a directory": {
			change: sysfsTree{inTree + "0000:3a:1f.0/class/": ""},
			remove: []string{inTree + "0000:3a:1f.0/class"}, want: healthy,
			problems: []problem{{onBus + "0000:3a:1f.0", reasonClass}},
		},
		"no vendor": {
			remove: []string{inTree + "0000:3b:01.1/vendor"}, want: healthy[:2],
			problems: []problem{{onBus + "0000:3b:01.1", reasonID}},
		},
		"unreadable numa_node": {
			change: sysfsTree{inTree + "0000:3b:01.0/numa_node": "north"},
			want: []function.Function{
				healthy[0], changed(healthy[1], func(f *function.Function) {
					f.NUMANode = -1
				}), healthy[2],
			},
			problems: []problem{{onBus + "0000:3b:01.0", reasonNUMANode}},
		},
		"kernel without NUMA": {
			remove: []string{inTree + "0000:3b:01.0/numa_node"},
			want: []function.Function{healthy[0], changed(healthy[1], func(f *function.Function) {
				f.NUMANode = -1
			}), healthy[2]},
		},
		"no NUMA affinity": {
			change: sysfsTree{inTree + "0000:3b:01.0/numa_node": "-1"},
			want: []function.Function{healthy[0], changed(healthy[1], func(f *function.Function) {
				f.NUMANode = -1
			}), healthy[2]},
		},
		"unreadable sriov_offset": {
			change: sysfsTree{inTree + "0000:3b:00.0/sriov_offset": "far"},
			want: []function.Function{changed(healthy[0], func(f *function.Function) {
				f.VFOffset = 0
			}), healthy[1], healthy[2]},
			problems: []problem{{onBus + "0000:3b:00.0", reasonVFs}},
		},
		"old kernel": {
			remove: []string{
				inTree + "0000:3b:00.0/sriov_offset", inTree + "0000:3b:00.0/sriov_stride",
			},
			want: []function.Function{
				changed(healthy[0], func(f *function.Function) { f.VFOffset, f.VFStride = 0, 0 }),
				healthy[1], healthy[2],
			},
		},
		"physfn of a PF that is not there": {
			change:   sysfsTree{inTree + "0000:3b:01.0/physfn": "-> ../0000:3c:00.0"},
			want:     []function.Function{healthy[0], healthy[2]},
			problems: []problem{{onBus + "0000:3b:01.0", reasonPhysfn}},
		},
		"physfn to garbage": {
			change:   sysfsTree{inTree + "0000:3b:01.0/physfn": "-> ../\xff"},
			want:     []function.Function{healthy[0], healthy[2]},
			problems: []problem{{onBus + "0000:3b:01.0", reasonPhysfn}},
		},
		"physfn is a file": {
			change:   sysfsTree{inTree + "0000:3b:01.0/physfn": "0000:3b:00.0"},
			want:     []function.Function{healthy[0], healthy[2]},
			problems: []problem{{onBus + "0000:3b:01.0", reasonPhysfn}},
		},
		"the PF does not know the VF": {
			remove: []string{inTree + "0000:3b:00.0/virtfn0"},
			want: []function.Function{
				changed(healthy[0], func(f *function.Function) { f.NumVFs = 1 }), healthy[2],
			},
			problems: []problem{{onBus + "0000:3b:01.0", reasonVirtfn}},
		},
		"the VF does not know its PF yet": {
			remove: []string{inTree + "0000:3b:01.0/physfn"}, want: healthy,
		},
		"virtfn to garbage": {
			change: sysfsTree{inTree + "0000:3b:00.0/virtfn7": "-> ../nothing"}, want: healthy,
			problems: []problem{{onBus + "0000:3b:00.0/virtfn7", reasonVirtfn}},
		},
		"virtfn is a file": {
			change: sysfsTree{inTree + "0000:3b:00.0/virtfn7": "0000:3b:01.0"}, want: healthy,
			problems: []problem{{onBus + "0000:3b:00.0/virtfn7", reasonVirtfn}},
		},
		"names that only look like virtfn": {
			change: sysfsTree{
				inTree + "0000:3b:00.0/virtfn":   "-> ../0000:3b:01.0",
				inTree + "0000:3b:00.0/virtfn01": "-> ../0000:3b:01.0",
				inTree + "0000:3b:00.0/virtfn-1": "-> ../0000:3b:01.0",
			},
			want: healthy,
		},
		"entry of the bus that is no address": {
			change: sysfsTree{onBus + "3b:02.1": "-> nowhere"}, want: healthy,
			problems: []problem{{onBus + "3b:02.1", reasonAddress}},
		},
		"entry of the bus that leads nowhere": {
			change: sysfsTree{onBus + "0000:3d:00.0": "-> nowhere"}, want: healthy,
			problems: []problem{{onBus + "0000:3d:00.0", reasonClass}},
		},
		"PF without cable": {
			change: sysfsTree{inTree + "0000:3b:00.0/net/ens3f0/carrier": "0"},
			want:   each(healthy, func(f *function.Function) { f.LinkUp = false }),
		},
		"PF down": {
			change: sysfsTree{inTree + "0000:3b:00.0/net/ens3f0/operstate": "down"},
			remove: []string{inTree + "0000:3b:00.0/net/ens3f0/carrier"},
			want: each(healthy, func(f *function.Function) {
				f.LinkUp, f.AdminDown = false, true
			}),
		},
		"PF whose netdev is away": {
			remove: []string{inTree + "0000:3b:00.0/net/ens3f0"},
			want: append([]function.Function{changed(healthy[0], func(f *function.Function) {
				f.PFName, f.Netdev, f.LinkType, f.NoNetdev = "", "", "", true
			})},
				changed(healthy[1], func(f *function.Function) { f.PFName = "" }),
				changed(healthy[2], func(f *function.Function) { f.PFName, f.LinkType = "", "" })),
		},
		"VF without driver": {
			remove: []string{inTree + "0000:3b:01.1/driver"},
			want: []function.Function{
				healthy[0], healthy[1], changed(healthy[2], func(f *function.Function) {
					f.Driver = ""
				}),
			},
		},
		"PF in switchdev mode": {
			change: sysfsTree{
				inTree + "0000:3b:00.0/net/aaa/phys_port_name": "pf0vf0",
				inTree + "0000:3b:00.0/net/aab/phys_port_name": "c1pf0vf1",
				// a representor that is just being made has no port name yet
				inTree + "0000:3b:00.0/net/aac/carrier":           "1",
				inTree + "0000:3b:00.0/net/ens3f0/phys_port_name": "p0",
			},
			want: healthy,
		},
		"two netdevs that only their order tells apart": {
			change: sysfsTree{
				inTree + "0000:3b:00.0/net/aaa/ifindex":    "12",
				inTree + "0000:3b:00.0/net/ens3f0/ifindex": "5",
			},
			want: healthy,
		},
		"two ports of one function": {
			change: sysfsTree{
				inTree + "0000:3b:00.0/net/aaa/dev_port":    "1",
				inTree + "0000:3b:00.0/net/ens3f0/dev_port": "0",
			},
			want: healthy,
		},
		"virtio": {
			change: sysfsTree{
				inTree + "0000:3b:01.1/driver":                              "-> ../../../../bus/pci/drivers/virtio-pci",
				inTree + "0000:3b:01.1/virtio3/net/ens3f0v1/phys_port_name": "",
			},
			remove: []string{inTree + "0000:3b:01.1/net"},
			want: []function.Function{
				healthy[0], healthy[1], changed(wantVF(1, "ens3f0v1"), func(f *function.Function) {
					f.Driver = "virtio-pci"
				}),
			},
		},
		"PF that is a virtio device": {
			change: sysfsTree{
				inTree + "0000:3b:00.0/driver":                     "-> ../../../../bus/pci/drivers/virtio-pci",
				inTree + "0000:3b:00.0/virtio2/net/ens3f0/carrier": "0",
				inTree + "0000:3b:00.0/virtio2/net/ens3f0/type":    "1",
				"class/net/ens3f0": "-> ../../" + inTree +
					"0000:3b:00.0/virtio2/net/ens3f0",
			},
			remove: []string{inTree + "0000:3b:00.0/net"},
			want: each(healthy, func(f *function.Function) {
				f.LinkUp, f.PFDriver = false, "virtio-pci"
				if f.Kind == function.PF {
					f.Driver = "virtio-pci"
				}
			}),
		},
		"NIC without SR-IOV": {
			change: nic("0000:3b:1f.0", "1015",
				sysfsTree{"net/eth7/carrier": "1", "net/eth7/type": "1"}),
			want: append(slices.Clone(healthy), changed(wantPF(), func(f *function.Function) {
				f.ID.Address, f.PF, f.Device, f.PFName, f.Netdev, f.NumVFs = "0000:3b:1f.0", "0000:3b:1f.0", "1015", "eth7", "eth7", 0
				f.VFOffset, f.VFStride, f.TotalVFs = 0, 0, 0
			})),
		},
		"SF": {
			change: sysfsTree{
				"bus/auxiliary/devices/mlx5_core.sf.2": "-> ../../../" + inTree +
					"0000:3b:00.0/mlx5_core.sf.2",
				inTree + "0000:3b:00.0/mlx5_core.sf.2/sfnum":              "88",
				inTree + "0000:3b:00.0/mlx5_core.sf.2/driver":             "-> ../../../../../bus/auxiliary/drivers/mlx5_core.sf",
				inTree + "0000:3b:00.0/mlx5_core.sf.2/net/ens3f0s88/type": "1",
				"bus/auxiliary/devices/mlx5_core.eth.0": "-> ../../../" + inTree +
					"0000:3b:00.0/mlx5_core.eth.0",
			},
			want: []function.Function{healthy[0], changed(wantPF(), func(f *function.Function) {
				f.ID, f.Kind, f.Index, f.NumVFs = function.SubfunctionID("0000:3b:00.0",
					88), function.SF, 88, 0
				f.VFOffset, f.VFStride, f.TotalVFs = 0, 0, 0
				f.Driver, f.Netdev, f.AuxDevice = "mlx5_core.sf", "ens3f0s88", "mlx5_core.sf.2"
			}), healthy[1], healthy[2]},
		},
		"SFs that cannot be": {
			change: sysfsTree{
				"bus/auxiliary/devices/mlx5_core.sf.3": "-> ../../../" + inTree +
					"0000:3b:00.0/mlx5_core.sf.3",
				inTree + "0000:3b:00.0/mlx5_core.sf.3/sfnum":           "4294967296",
				"bus/auxiliary/devices/mlx5_core.sf.4":                 "-> ../../../devices/platform/mlx5_core.sf.4",
				"devices/platform/mlx5_core.sf.4/sfnum":                "1",
				"bus/auxiliary/devices/mlx5_core.sf.5":                 "-> ../../../devices/pci0000:3a/0000:3d:00.0/mlx5_core.sf.5",
				"devices/pci0000:3a/0000:3d:00.0/mlx5_core.sf.5/sfnum": "1",
				"bus/auxiliary/devices/mlx5_core.sf.6":                 "no link",
			},
			want: healthy,
			problems: []problem{
				{"bus/auxiliary/devices/mlx5_core.sf.3", reasonSFNum},
				{"bus/auxiliary/devices/mlx5_core.sf.4", reasonParent},
				{"bus/auxiliary/devices/mlx5_core.sf.5", reasonParent},
				{"bus/auxiliary/devices/mlx5_core.sf.6", reasonParent},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tree := host()
			for _, gone := range tt.remove {
				maps.DeleteFunc(tree, func(name, _ string) bool {
					return name == gone ||
						strings.HasPrefix(name, gone+"/")
				})
			}

			tree.add(tt.change).write(t, root)
			s := testScanner(root)
			for range 2 { // the second scan knows much already
				got, err := s.scan()
				if err != nil {
					t.Fatal(err)
				}
				if diff := gocmp.Diff(tt.want, got); diff != "" {
					t.Errorf("Functions (-want +got):\n%s", diff)
				}

				problems := slices.SortedFunc(maps.Keys(s.problems), func(a, b problem) int {
					return cmp.Compare(a.entry, b.entry)
				})
				if diff := gocmp.Diff(tt.problems, problems,
					gocmp.AllowUnexported(problem{})); diff != "" {
					t.Errorf("problems (-want +got):\n%s\n%v", diff, s.problems)
				}
			}
		})
	}
}

func each(functions []function.Function, change func(*function.Function)) []function.Function {
	functions = slices.Clone(functions)
	for i := range functions {
		change(&functions[i])
	}
	return functions
}

// TestScanAgain: some properties must be remembered between scans, and others must not.
func TestScanAgain(t *testing.T) {
	healthy := []function.Function{wantPF(), wantVF(0, "ens3f0v0"), wantVF(1, "")}
	root := t.TempDir()
	host().write(t, root)
	s := testScanner(root)
	scan := func(what string, want []function.Function) {
		t.Helper()
		got, err := s.scan()
		if err != nil {
			t.Fatal(err)
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
	}

	remove := func(name string) {
		t.Helper()
		if err := os.RemoveAll(filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}

	scan("at first", healthy)

	remove(inTree + "0000:3b:00.0/net/ens3f0")
	scan("the PF's netdev is in a pod",
		append([]function.Function{changed(healthy[0], func(f *function.Function) {
			f.Netdev = ""
		})}, healthy[1:]...))

	sysfsTree{inTree + "0000:3b:00.0/net/uplink/carrier": "0",
		inTree + "0000:3b:00.0/net/uplink/type": "1"}.write(t, root)

	scan("it is back under another name and without link", append(
		[]function.Function{changed(healthy[0], func(f *function.Function) {
			f.Netdev, f.PFName, f.LinkUp = "uplink", "uplink", false
		})},
		each(healthy[1:], func(f *function.Function) { f.PFName, f.LinkUp = "uplink", false })...))

	remove(inTree + "0000:3b:00.0/net/uplink")
	pf("0000:3b:00.0", "ens3f0", "0000:3b:01.0", "0000:3b:01.1").write(t, root)
	remove(inTree + "0000:3b:01.0/net/ens3f0v0")
	sysfsTree{inTree + "0000:3b:01.1/net/late/": ""}.write(t, root)
	scan("netdevs of VFs move", []function.Function{healthy[0], wantVF(0, ""), wantVF(1, "late")})

	remove(onBus + "0000:3b:01.1")
	remove(inTree + "0000:3b:01.1")
	vf("0000:3b:01.1", "0000:3b:00.0",
		"").add(sysfsTree{inTree + "0000:3b:01.1/device": "0xa2dd"}).write(t, root)

	scan("another VF at the address",
		[]function.Function{
			healthy[0], wantVF(0, ""), changed(wantVF(1, ""), func(f *function.Function) {
				f.Device = "a2dd"
			}),
		})

	for _, gone := range []string{"virtfn0", "virtfn1"} {
		remove(inTree + "0000:3b:00.0/" + gone)
	}

	for _, gone := range []string{"0000:3b:01.0", "0000:3b:01.1"} {
		remove(onBus + gone)
		remove(inTree + gone)
	}

	alone := changed(healthy[0], func(f *function.Function) { f.NumVFs = 0 })
	scan("no VFs", []function.Function{alone})

	remove(onBus + "0000:3b:00.0")
	remove(inTree + "0000:3b:00.0")
	scan("no card", []function.Function{})

	pf("0000:3b:00.0", "ens9f0").write(t, root)
	scan("another card",
		[]function.Function{changed(alone, func(f *function.Function) {
			f.PFName, f.Netdev = "ens9f0", "ens9f0"
		})})
}

// TestUnreadablePF: the VFs of a PF stay as they were last seen while the PF or its links to them
// cannot be read. A VF that the bus does not list any more is gone all the same.
func TestUnreadablePF(t *testing.T) {
	healthy := []function.Function{wantPF(), wantVF(0, "ens3f0v0"), wantVF(1, "")}
	const pfDir = inTree + "0000:3b:00.0"
	for name, tt := range map[string]struct {
		change func(t *testing.T, root string)
		want   []function.Function
		why    problem
	}{
		"directory": {func(t *testing.T, root string) { // not a directory for now
			must.Succeed(t, os.Rename(filepath.Join(root, pfDir), filepath.Join(root, "away")))
			must.Succeed(t, os.WriteFile(filepath.Join(root, pfDir), nil, 0o600))
		}, healthy, problem{onBus + "0000:3b:00.0", reasonDevice}},
		"a link": {func(t *testing.T, root string) {
			sysfsTree{pfDir + "/virtfn0": "no link"}.write(t, root)
		}, healthy, problem{onBus + "0000:3b:00.0/virtfn0", reasonVirtfn}},
		"the number of VFs": {func(t *testing.T, root string) {
			sysfsTree{pfDir + "/sriov_totalvfs": "many"}.write(t, root)
		}, healthy, problem{onBus + "0000:3b:00.0", reasonVFs}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			host().write(t, root)
			s := testScanner(root)
			scanned(t, s)
			tt.change(t, root)
			for range 2 {
				got := scanned(t, s)
				for _, want := range tt.want {
					f := got[want.ID.String()]
					if f.Kind != want.Kind || f.PF != want.PF || f.Index != want.Index ||
						f.NumVFs != want.NumVFs || f.TotalVFs != want.TotalVFs {
						t.Errorf("%+v, want it as it was: %+v", f, want)
					}
				}
				if s.problems[tt.why] == nil || !s.unread() {
					t.Errorf("problems %v, want %v", s.problems, tt.why)
				}
			}

			must.Succeed(t, os.Remove(filepath.Join(root, onBus, "0000:3b:01.1")))
			if got := scanned(t, s); len(got) != 2 {
				t.Errorf("Functions %v, want them without the VF that is gone", got)
			}
		})
	}
}

// TestUnreadablePFAtFirst: a PF whose VFs have never been read is not offered, because it may have
// some, and neither are they. Both are once they can be read.
func TestUnreadablePFAtFirst(t *testing.T) {
	root := t.TempDir()
	host().write(t, root)
	s := testScanner(root)
	device := filepath.Join(root, inTree, "0000:3b:00.0")
	s.readHardware([]string{"0000:3b:00.0", "0000:3b:01.0", "0000:3b:01.1"})
	must.Succeed(t, os.Rename(device, device+".away"))
	must.Succeed(t, os.WriteFile(device, nil, 0o600))
	if got := scanned(t, s); len(got) != 0 || len(s.problems) == 0 || !s.unread() {
		t.Errorf("Functions %v with problems %v, want none", got, s.problems)
	}

	must.Succeed(t, os.Remove(device))
	must.Succeed(t, os.Rename(device+".away", device))
	if got := scanned(t, s); len(got) != 3 || len(s.problems) > 0 {
		t.Errorf("Functions %v with problems %v, want all", got, s.problems)
	}
}

// TestUnreadableSF: an SF stays as it was last seen while its number cannot be read. Another device of
// its name does not get its number.
func TestUnreadableSF(t *testing.T) {
	const aux, dir = "bus/auxiliary/devices/mlx5_core.sf.2", inTree + "0000:3b:00.0/mlx5_core.sf.2"
	root := t.TempDir()
	host().add(sysfsTree{aux: "-> ../../../" + dir, dir + "/sfnum": "88"}).write(t, root)
	s := testScanner(root)
	id := function.SubfunctionID("0000:3b:00.0", 88).String()
	want := scanned(t, s)
	sysfsTree{dir + "/sfnum": "?"}.write(t, root)
	for range 2 {
		if diff := gocmp.Diff(want, scanned(t, s)); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if s.problems[problem{aux, reasonSFNum}] == nil {
			t.Errorf("problems %v", s.problems)
		}
	}

	must.Succeed(t, os.Rename(filepath.Join(root, aux), filepath.Join(root, aux+".old")))
	sysfsTree{aux: "-> ../../../" + dir}.write(t, root)
	must.Succeed(t, os.Remove(filepath.Join(root, aux+".old")))
	if got, listed := scanned(t, s)[id]; listed {
		t.Errorf("another device is taken for the SF: %+v", got)
	}
}

// TestEmptyBus: a bus that had devices and shows none is an error, because a sysfs that is not
// mounted looks like that. What was known stays for the next scan.
func TestEmptyBus(t *testing.T) {
	root := t.TempDir()
	bus := filepath.Join(root, "bus/pci/devices")
	must.Succeed(t, os.MkdirAll(bus, 0o755))
	s := testScanner(root)
	if got := scanned(t, s); len(got) != 0 {
		t.Errorf("Functions %v before there are any", got)
	}

	host().write(t, root)
	want := scanned(t, s)
	must.Succeed(t, os.Rename(bus, bus+".away"))
	for _, step := range []func() error{
		func() error { return nil }, // unmounted
		func() error { return os.Mkdir(bus, 0o755) },
	} {
		must.Succeed(t, step())
		if got, err := s.scan(); err == nil || !strings.Contains(err.Error(), "shows none any more") {
			t.Errorf("Functions %v, error %v, want one that says that there are none", got, err)
		}
	}

	must.Succeed(t, os.Remove(bus))
	must.Succeed(t, os.Rename(bus+".away", bus))
	if diff := gocmp.Diff(want, scanned(t, s)); diff != "" {
		t.Errorf("with the bus again (-want +got):\n%s", diff)
	}
}

func TestPCIeRootAsKubernetesSeesIt(t *testing.T) {
	root := t.TempDir()
	host().write(t, root)
	functions, err := testScanner(root).scan()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range functions {
		want, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(string(f.ID.Address),
			deviceattribute.WithFSFromRoot(root))
		if err != nil {
			t.Fatal(err)
		}
		if f.PCIeRoot != *want.Value.StringValue {
			t.Errorf("%s: PCIe root %q, want %q", f.ID, f.PCIeRoot, *want.Value.StringValue)
		}
	}
}

// FuzzScan writes arbitrary bytes where the kernel writes attributes.
func FuzzScan(f *testing.F) {
	f.Add("0x020000", "0x15b3", "0x101e", "0", "../0000:3b:00.0", "88", "1")
	f.Add("0x02", "15b3", "\xff", "-2", "/", "-1", "")
	f.Add("", "", "", "", ".", "", "\x00")

	f.Fuzz(func(t *testing.T, class, vendor, device, numaNode, link, sfnum, carrier string) {
		root := t.TempDir()
		host().add(under("0000:3b:01.2",
			sysfsTree{"class": class, "vendor": vendor, "device": device, "numa_node": numaNode})).
			add(sysfsTree{
				"bus/auxiliary/devices/mlx5_core.sf.2": "-> ../../../" + inTree +
					"0000:3b:00.0/mlx5_core.sf.2",
				inTree + "0000:3b:00.0/mlx5_core.sf.2/sfnum":      sfnum,
				inTree + "0000:3b:00.0/net/ens3f0/carrier":        carrier,
				inTree + "0000:3b:00.0/net/ens3f0/phys_port_name": carrier,
			}).write(t, root)

		if link != "" && !strings.ContainsRune(link, 0) {
			for _, name := range []string{
				"0000:3b:01.2/physfn", "0000:3b:00.0/virtfn2", "0000:3b:01.2/driver",
			} {
				_ = os.Symlink(link, filepath.Join(root, inTree, name)) // names may be too long
			}
		}

		functions, err := testScanner(root).scan()
		if err != nil {
			t.Fatal(err)
		}

		seen := map[function.ID]bool{}
		for _, f := range functions {
			if seen[f.ID] || len(f.Vendor) != 4 || len(f.Device) != 4 || f.NUMANode < -1 ||
				f.Kind == function.PF != (f.Index == -1) {
				t.Errorf("impossible Function %+v", f)
			}
			seen[f.ID] = true
		}

		for _, id := range []function.ID{
			{Address: "0000:3b:00.0"}, {Address: "0000:3b:01.0"}, {Address: "0000:3b:01.1"},
		} {
			if !seen[id] {
				t.Errorf("%s is missing", id)
			}
		}
	})
}

// FuzzAttributes reads arbitrary attributes, links and names.
func FuzzAttributes(f *testing.F) {
	for _, s := range []string{
		"0x020000", "0x15b3", "-1", "88", "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0",
		"virtfn7", "virtfn07", "0x2ffffff",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if class, err := parseClass(s); class != "" && (err != nil || !strings.HasPrefix(s, "0x")) {
			t.Errorf("class %q is %s, %v", s, class, err)
		}
		if id, err := parseID(s); err == nil && "0x"+id != s {
			t.Errorf("id %q reads as %q", s, id)
		}
		if n, err := parseNUMANode(s); n < -1 || n > maxNUMANode || err != nil && n != -1 {
			t.Errorf("NUMA node %q reads as %d, %v", s, n, err)
		}
		if n, err := parseSFNum(s); err != nil && n != 0 {
			t.Errorf("sfnum %q reads as %d, %v", s, n, err)
		}
		if root := parseRoot(s); root != "" && !strings.Contains(s, "devices/"+root) {
			t.Errorf("%q has PCIe root %q", s, root)
		}
	})
}
