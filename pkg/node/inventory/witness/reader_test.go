// SPDX-License-Identifier: Apache-2.0

package witness

import (
	"context"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	utilfs "github.com/k8snetworkplumbingwg/sriovnet/pkg/utils/filesystem"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// tree is a file system for sriovnet: the contents of files and the targets of links, by path.
// Directories follow from the paths.
type tree struct {
	utilfs.Filesystem // nil
	files, links      map[string]string
}

// entry describes a file, link or directory of a tree.
type entry struct {
	name string
	mode fs.FileMode
}

func (e entry) Name() string       { return e.name }
func (e entry) Size() int64        { return 0 }
func (e entry) Mode() fs.FileMode  { return e.mode }
func (e entry) ModTime() time.Time { return time.Time{} }
func (e entry) IsDir() bool        { return e.mode.IsDir() }
func (e entry) Sys() any           { return nil }

func (t tree) Stat(name string) (os.FileInfo, error) {
	if _, err := t.ReadFile(name); err == nil {
		return entry{name: path.Base(name)}, nil
	}
	if _, err := t.Readlink(name); err == nil {
		return entry{path.Base(name), fs.ModeSymlink}, nil
	}
	if _, err := t.ReadDir(name); err != nil {
		return nil, err
	}
	return entry{path.Base(name), fs.ModeDir}, nil
}

func (t tree) ReadFile(name string) ([]byte, error) {
	content, exists := t.files[name]
	if !exists {
		return nil, fs.ErrNotExist
	}
	return []byte(content), nil
}

func (t tree) Readlink(name string) (string, error) {
	target, exists := t.links[name]
	if !exists {
		return "", fs.ErrNotExist
	}
	return target, nil
}

func (t tree) ReadDir(dir string) ([]os.FileInfo, error) {
	modes := map[string]fs.FileMode{}
	for _, all := range []map[string]string{t.files, t.links} {
		for name := range all {
			below, isBelow := strings.CutPrefix(name, strings.TrimSuffix(dir, "/")+"/")
			child, _, isDir := strings.Cut(below, "/")
			if isBelow && isDir {
				modes[child] = fs.ModeDir
			} else if isBelow {
				modes[child] |= 0
			}
		}
	}

	var entries []os.FileInfo
	for name, mode := range modes {
		entries = append(entries, entry{name, mode})
	}
	if len(entries) == 0 {
		return nil, fs.ErrNotExist
	}
	slices.SortFunc(entries, func(a, b os.FileInfo) int {
		return strings.Compare(a.Name(), b.Name())
	})

	return entries, nil
}

// use makes sriovnet read the tree until the test ends.
func (t tree) use(test testing.TB) {
	before := utilfs.Fs
	utilfs.Fs = t
	test.Cleanup(func() { utilfs.Fs = before })
}

const (
	devices    = "/sys/bus/pci/devices/"
	auxDevices = "/sys/bus/auxiliary/devices/"
	netdevs    = "/sys/class/net/"
)

// sysfs returns the tree of the host, without what sriovnet reads from the real /sys: the links
// from a PF to its VFs.
func sysfs() tree {
	t := tree{
		files: map[string]string{
			devices + pf + "/net/ens1/ifindex":             "7",
			devices + pf + "/net/pf0vf0/ifindex":           "8",
			devices + pf + "/net/pf0vf1/ifindex":           "9",
			devices + pf + "/net/pf0sf88/ifindex":          "10",
			devices + pf + "/" + aux + "/sfnum":            "88",
			devices + vf + "/net/ens1v0/ifindex":           "11",
			auxDevices + aux + "/sfnum":                    "88\n",
			auxDevices + aux + "/net/ens1s88/ifindex":      "12",
			devices + pf + "/infiniband/m/ports/1/pkeys/0": "0x7fff\n",
			netdevs + "ens1/phys_switch_id":                "a1\n",
			netdevs + "ens1/phys_port_name":                "p0\n",
			netdevs + "pf0vf0/phys_port_name":              "pf0vf0\n",
			netdevs + "pf0vf1/phys_port_name":              "pf0vf1\n",
			netdevs + "pf0sf88/phys_port_name":             "pf0sf88\n",
		},
		links: map[string]string{
			devices + vf + "/physfn":        "../" + pf,
			devices + vf + "/driver":        "../../../bus/pci/drivers/mlx5_core",
			devices + "0000:3b:00.3/physfn": "../" + pf,
			devices + "0000:3b:00.3/driver": "../../../bus/pci/drivers/vfio-pci",
			devices + "0000:5e:00.0/driver": "../../../bus/pci/drivers/vfio-pci",
		},
	}

	return t
}

// onTree returns sriovnet's Reader for the tree and devlink's ports.
func onTree(all []*netlink.DevlinkPort, err error) func() Reader {
	return func() Reader {
		r := Sriovnet()
		usePorts(func() ([]*netlink.DevlinkPort, error) { return all, err })
		return r
	}
}

// TestSriovnet compares the host with sriovnet itself, with representors from devlink and, without
// devlink, by the names of their ports.
func TestSriovnet(t *testing.T) {
	sysfs().use(t)
	number := func(n uint16) *uint16 { return &n }
	sfnum := uint32(88)
	listed := []*netlink.DevlinkPort{
		{BusName: "pci", DeviceName: pf, PortFlavour: nl.DEVLINK_PORT_FLAVOUR_PHYSICAL,
			NetdeviceName: "ens1"},
		{BusName: "pci", DeviceName: pf, PortFlavour: nl.DEVLINK_PORT_FLAVOUR_PCI_VF,
			NetdeviceName: "pf0vf0", VfNumber: number(0)},
		{BusName: "pci", DeviceName: "0000:99:00.0",
			PortFlavour:   nl.DEVLINK_PORT_FLAVOUR_PCI_VF,
			NetdeviceName: "other", VfNumber: number(0)},
		{BusName: "pci", DeviceName: pf, PortFlavour: nl.DEVLINK_PORT_FLAVOUR_PCI_VF,
			NetdeviceName: "pf0vf1", VfNumber: number(1)},
		{BusName: "pci", DeviceName: pf, PortFlavour: nl.DEVLINK_PORT_FLAVOUR_PCI_SF,
			NetdeviceName: "pf0sf88", SfNumber: &sfnum},
	}

	for name, reader := range map[string]func() Reader{
		"devlink": onTree(listed, nil), "no devlink": onTree(nil, errAway),
	} {
		v := Verify(t.Context(), Source{
			Functions: func(context.Context) ([]function.Function, error) { return host(), nil },
			Ports:     ports, Reader: reader,
		})

		var unknown []string
		for _, u := range v.Unknowns {
			unknown = append(unknown, u.Property)
		}
		// the netdev of the VF in a pod has no directory in this tree
		if v.Different != 0 || v.Same != 15 ||
			strings.Join(unknown, " ") != "driver netdev vf-index vfs" {
			t.Errorf("%s: unknown are %q: %+v", name, unknown, v)
		}
	}
}

// TestPortsListedOnce checks that one list of devlink's ports serves all questions, and that it is
// read only when it is needed.
func TestPortsListedOnce(t *testing.T) {
	sysfs().use(t)
	lists := 0
	v := Verify(t.Context(), Source{
		Functions: func(context.Context) ([]function.Function, error) { return host(), nil },
		Ports:     ports,
		Reader: func() Reader {
			r := Sriovnet()
			usePorts(func() ([]*netlink.DevlinkPort, error) {
				lists++
				return nil, errAway
			})
			return r
		},
	})
	if lists != 1 || v.Same == 0 {
		t.Errorf("ports were listed %d times, want once: %+v", lists, v)
	}
}

// FuzzSriovnet checks that whatever sysfs and devlink have, a comparison ends, does not panic, and
// has a result that is bounded.
func FuzzSriovnet(f *testing.F) {
	f.Add("../"+pf, "virtfn0", "p0", "a1", "88", "ens1v0", "mlx5_core.sf.4", "0x7fff", uint16(4))
	f.Add("", "virtfn", "pf0vf0", "", "-1", " ", "x.sf.", "", uint16(7))
	f.Add("../..", "virtfn99999999999999999999", "c1pf0vf99999999999999999999", "\x00", "1e9",
		"a\nb", "..", "\xff", uint16(0))
	f.Add("/", "/", "pf99999999999999999999vf1", "0", "99999999999999999999", "/", "a/b.sf.1", "/",
		uint16(3))
	f.Fuzz(func(t *testing.T, physfn, link, portName, switchID, sfnum, netdev, device, pkey string,
		flavour uint16) {
		hostile := sysfs()
		hostile.links[devices+vf+"/physfn"] = physfn
		hostile.links[devices+pf+"/"+link] = physfn
		hostile.files[devices+pf+"/net/"+netdev+"/ifindex"] = sfnum
		hostile.files[devices+vf+"/net/"+netdev+"/ifindex"] = sfnum
		hostile.files[netdevs+"ens1/phys_port_name"] = portName
		hostile.files[netdevs+netdev+"/phys_port_name"] = portName
		hostile.files[netdevs+netdev+"/phys_switch_id"] = switchID
		hostile.files[devices+pf+"/"+device+"/sfnum"] = sfnum
		hostile.files[auxDevices+aux+"/sfnum"] = sfnum
		hostile.files[auxDevices+device+"/sfnum"] = sfnum
		hostile.files[devices+pf+"/infiniband/"+netdev+"/ports/1/pkeys/0"] = pkey
		hostile.use(t)

		functions := host()
		functions[1].AuxDevice = device
		functions[0].Netdev = netdev
		number := uint32(flavour)
		all := []*netlink.DevlinkPort{
			{BusName: "pci", DeviceName: pf, PortFlavour: flavour, NetdeviceName: netdev},
			{BusName: "pci", DeviceName: pf, PortFlavour: flavour, NetdeviceName: netdev,
				VfNumber: &flavour, PfNumber: &flavour, SfNumber: &number},
			{BusName: physfn, DeviceName: device, PortFlavour: 0, NetdeviceName: netdev},
		}

		c, err := Source{
			Functions: func(context.Context) ([]function.Function, error) {
				return functions, nil
			},
			Ports: ports, Reader: onTree(all, nil),
		}.compare(t.Context())
		must.Succeed(t, err)

		if sum := c.same + len(c.differences) + len(c.unknown); sum != 21 {
			t.Errorf("%d properties, want 21: %+v", sum, c)
		}
		for _, d := range c.differences {
			if len(d.Sriovnet) > maxText || len(d.Inventory) > maxText ||
				!utf8.ValidString(d.Sriovnet) || !utf8.ValidString(d.Inventory) {
				t.Errorf("%+v", d)
			}
		}
		for _, u := range c.unknown {
			if len(u.reason) > maxText || !utf8.ValidString(u.reason) || u.reason == "" ||
				strings.Contains(u.reason, "panicked") {
				t.Errorf("%s is unknown because of %q", u.property, u.reason)
			}
		}
	})
}
