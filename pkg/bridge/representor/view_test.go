// SPDX-License-Identifier: Apache-2.0

package representor

import (
	"encoding/binary"
	"errors"
	"net"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor/representortest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

func TestPortName(t *testing.T) {
	for _, name := range []string{"pf0", "pf1vf3", "pf0sf88", "c1pf0", "c1pf0vf3", "c0pf0vf3",
		"c2pf65535sf4294967295", "c4294967295pf0"} {
		if got, ok := parsePortName(name); !ok || got.pf+got.function != name {
			t.Errorf("%q is read as %q, %v", name, got, ok)
		}
	}
	for _, name := range []string{
		"", "p0", "p0s1", "pf0hpf", "pf0vf", "pf65536", "c1", "pf0sf4294967296", "pf0vf3\n",
		"xpf0", "pf00", "pf0vf03", "c4294967296pf0",
	} {
		if s, ok := parsePortName(name); ok {
			t.Errorf("%q is read as %q", name, s)
		}
	}
}

func FuzzParsePortName(f *testing.F) {
	f.Add("c1pf0vf3")
	f.Fuzz(func(t *testing.T, name string) {
		got, ok := parsePortName(name)
		if !ok {
			return
		}
		if got.pf+got.function != name {
			t.Errorf("%q is read as %q", name, got)
		}
	})
}

func FuzzParsePhysPort(f *testing.F) {
	header := make([]byte, unix.SizeofIfInfomsg)
	f.Add(header)
	f.Add(append(header, 10, 0, unix.IFLA_PHYS_PORT_NAME, 0, 'p', 'f', '0', 'v', 'f', 0, 0, 0))
	f.Add(append(header, 6, 0, unix.IFLA_PHYS_SWITCH_ID, 0, 1, 2, 0, 0))

	f.Fuzz(func(t *testing.T, message []byte) {
		p, err := parsePhysPort(message)
		if err == nil && p.index != int(int32(binary.NativeEndian.Uint32(message[4:]))) {
			t.Errorf("netdev %d of %x", p.index, message)
		}
	})
}

// twoCards are two cards of this machine, each with a VF 3 and an uplink, and a DPU's VF.
var twoCards = []physPort{
	{index: 11, name: "eth0", parent: "0000:01:00.0", switchID: "A", portName: "p0"},
	{index: 12, name: "eth1", parent: "0000:01:00.0", switchID: "A", portName: "pf0vf3"},
	{index: 21, name: "eth2", parent: "0000:02:00.0", switchID: "B", portName: "p0"},
	{index: 22, name: "eth3", parent: "0000:02:00.0", switchID: "B", portName: "pf0vf3"},
	{index: 23, name: "eth4", switchID: "B", portName: "pf0sf88"}, // its driver names no device
	{index: 24, name: "eth5", switchID: "A", portName: "pf0sf89"},
	{index: 25, name: "eth6", parent: "0000:02:00.0", portName: "pf0vf5"}, // it is at no eswitch
	{index: 31, name: "eth7", parent: "0000:03:00.0", switchID: "C", portName: "c1pf0vf3"},
}

// slot returns the address of the PF on this bus, or "" for no bus.
func slot(bus string) pci.Address {
	if bus == "" {
		return ""
	}
	return pci.Address("0000:" + bus + ":00.0")
}

func TestFind(t *testing.T) {
	one, two, dpu0, dpu1, dpu2 := devlink.OfPCI(slot("01")), devlink.OfPCI(slot("02")),
		devlink.OfPCI(slot("03")), devlink.OfPCI("0000:03:00.1"), devlink.OfPCI("0000:04:00.1")
	ports := []devlink.Port{
		{Device: one, Index: 1, Flavour: devlink.Physical, NetdevIndex: 11},
		{Device: one, Index: 2, Flavour: devlink.PCIVF, VF: 3, NetdevIndex: 112},
		{Device: two, Index: 2, Flavour: devlink.PCIVF, PF: 1, VF: 3, NetdevIndex: 122},
		{Device: two, Index: 3, Flavour: devlink.PCISF, SF: 88},
		{Device: two, Index: 4, Flavour: devlink.PCISF, SF: 90},
		{Device: dpu0, Index: 5, Flavour: devlink.PCIVF, VF: 3, Controller: 1, External: true,
			NetdevIndex: 131},
		{Device: dpu1, Index: 5, Flavour: devlink.PCIPF, Controller: 1, External: true,
			NetdevIndex: 141},
		{Device: dpu2, Index: 5, Flavour: devlink.PCIPF, Controller: 1, External: true,
			NetdevIndex: 151},
	}

	own := func(pf, function string) eswitchPort {
		return eswitchPort{eswitch: slot(pf), name: portName{function: function}}
	}
	host := func(pf, function string) eswitchPort {
		return eswitchPort{eswitch: slot(pf), name: portName{"c1pf0", function}}
	}
	all := newView(ports, nil, twoCards)
	names := newView(nil, nil, twoCards)
	broken := newView(nil, errors.New("devlink is broken"), twoCards)
	tests := []struct {
		name  string
		view  view
		at    eswitchPort
		index int
		says  string
	}{
		{"VF by its port", all, own("01", "vf3"), 112, ""},
		{"VF by its port, whatever number the PF has", all, own("02", "vf3"), 122, ""},
		{"VF by name", names, own("01", "vf3"), 12, ""},
		{"VF by name, at the other card", names, own("02", "vf3"), 22, ""},
		{"VF by name while devlink is broken", broken, own("02", "vf3"), 22, ""},
		{"VF that is nowhere", all, own("02", "vf4"), 0, "vf4 of 0000:02:00.0 has no representor"},
		{"VF at no eswitch", names, own("02", "vf5"), 0, "eswitch mode switchdev"},
		{"SF by name and switch, its port telling no netdev", all, own("02", "sf88"), 23, ""},
		{"SF at another switch", names, own("02", "sf89"), 0, "no netdev is sf89 of 0000:02:00.0"},
		{"SF whose port has no netdev", all, own("02", "sf90"),
			0, "devlink port pci/0000:02:00.0/4 has no netdev"},
		{"host's VF by its port", all, host("", "vf3"), 131, ""},
		{"host's VF by name", names, host("03", "vf3"), 31, ""},
		{"host's VF is none of this machine's", all, own("03", "vf3"), 0,
			"there is c1pf0vf3 of 0000:03:00.0"},
		{"host's PF that could be two", all, host("", ""), 0, "eswitch= tells which"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			index, err := test.view.find(test.at)
			said := err == nil && test.says == "" || err != nil && test.says != "" &&
				strings.Contains(err.Error(), test.says)
			if index != test.index || !said {
				t.Errorf("%d, %v, want %d, %q", index, err, test.index, test.says)
			}
		})
	}

	if _, err := broken.find(own("02", "vf4")); err == nil || IsNotFound(err) {
		t.Errorf("%v: is taken for certain while devlink is broken", err)
	}
}

// TestWithMAC checks that a Function is found by its MAC only if it is for clients and the only one
// with this MAC.
func TestWithMAC(t *testing.T) {
	const dpu = "0000:03:00.0"
	one := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	port := func(mac string, external bool, vf uint16) devlink.Port {
		return devlink.Port{
			Device: devlink.Device{Bus: "pci", Name: dpu}, Flavour: devlink.PCIVF, VF: vf,
			Controller: 1, External: external, Function: devlink.Function{MAC: function.MAC(mac)},
		}
	}

	for name, test := range map[string]struct {
		ports []devlink.Port
		err   error
		want  string
	}{
		"the host's VF": {
			ports: []devlink.Port{port("02:00:00:00:00:02", true, 2), port(one.String(), true, 3)},
			want:  "c1pf0vf3",
		},
		"a VF of this machine": {ports: []devlink.Port{port(one.String(), false, 3)}},
		"two VFs": {
			ports: []devlink.Port{port(one.String(), true, 2), port(one.String(), true, 3)},
		},
		"no MAC":        {ports: []devlink.Port{port("", true, 3)}},
		"a broken card": {err: errors.New("devlink is broken")},
	} {
		t.Run(name, func(t *testing.T) {
			list := func() ([]devlink.Port, error) { return test.ports, test.err }
			finder := NewFinder(Config{}, nil, list)
			if got, err := finder.WithMAC(nil); err == nil {
				t.Errorf("no MAC is that of port %q", got)
			}

			got, err := finder.WithMAC(one)
			if got != test.want || (err == nil) != (test.want != "") {
				t.Errorf("port %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

// newFinder makes a Finder with this sysfs, and a devlink without ports.
func newFinder(root string, netdevs func() ([]physPort, error)) *Finder {
	config := Config{Sysfs: sysfs.Root(root), HostPFs: []HostPF{{Address: "0000:01:00.0"}}}
	f := NewFinder(config, nil, func() ([]devlink.Port, error) { return nil, nil })
	f.netdevs = netdevs
	return f
}

// TestRefreshKeepsFirstEvent checks that the first event of a netdev counts although a view has the
// netdev already, because the view was taken for another port.
func TestRefreshKeepsFirstEvent(t *testing.T) {
	f := newFinder("", func() ([]physPort, error) { return twoCards, nil })
	if err := f.refresh(); err != nil {
		t.Fatal(err)
	}
	if !f.Added(12) {
		t.Error("a netdev of which no event told yet is not new")
	}
}

// TestDumpAgainIfInterrupted checks that an interrupted dump is repeated, because it may lack
// netdevs.
func TestDumpAgainIfInterrupted(t *testing.T) {
	dumps, interrupted := 0, 2
	f := newFinder("", func() ([]physPort, error) {
		dumps++
		if dumps <= interrupted {
			return nil, nl.ErrDumpInterrupted
		}
		return twoCards, nil
	})

	if want := newView(nil, devlink.ErrNoDevlink, twoCards); f.refresh() != nil ||
		!reflect.DeepEqual(f.view.netdevs, want.netdevs) {
		t.Errorf("netdevs %+v, want %+v", f.view.netdevs, want.netdevs)
	}

	dumps, interrupted = 0, 1000
	if err := f.refresh(); err == nil || !f.stale.Load() {
		t.Errorf("%v, want an error, and another view next time", err)
	}
}

// TestDevlinkRecovers checks that devlink is asked again after it failed.
func TestDevlinkRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		representortest.MakePF(t, root, "0000:01:00.0", "8 16 1")
		broken := errors.New("devlink is broken")
		ports := func() ([]devlink.Port, error) {
			return []devlink.Port{
				{Device: devlink.OfPCI("0000:01:00.0"), Flavour: devlink.PCIVF, VF: 4,
					NetdevIndex: 13},
			}, broken
		}

		noNetdevs := func() ([]physPort, error) { return nil, nil }
		f := newFinder(root, noNetdevs)
		f.ports = ports
		if _, err := f.ifindex("vf-0000-01-02-4"); !errors.Is(err, broken) {
			t.Errorf("%v, want what devlink says", err)
		}

		broken = nil
		time.Sleep(time.Second)
		if index, err := f.ifindex("vf-0000-01-02-4"); index != 13 {
			t.Errorf("when devlink works again: %d, %v, want 13", index, err)
		}
	})
}

// TestRefreshOnlyWhenNeeded checks when a new view is taken. Listing ports can be slow, because the
// kernel asks the card's firmware for the function of each port.
func TestRefreshOnlyWhenNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		root := t.TempDir()
		representortest.MakePF(t, root, "0000:01:00.0", "8 16 1")
		dumps := 0
		netdevs := twoCards[:1]
		f := newFinder(root, func() ([]physPort, error) {
			dumps++
			return netdevs, nil
		})

		const vf3, vf4 = "vf-0000-01-02-3", "vf-0000-01-02-4"
		want := func(when, port string, index, times int) {
			t.Helper()
			got, err := f.ifindex(port)
			if got != index || IsNotFound(err) != (index == 0) || dumps != times {
				t.Errorf("%s: %d, %v after %d dumps, want %d after %d", when, got, err, dumps,
					index, times)
			}
		}

		want("at first", vf3, 0, 1)
		want("another that is missing", vf4, 0, 1)
		netdevs = twoCards[:2]
		if !f.Added(12) || f.Added(12) {
			t.Error("a netdev is new once")
		}

		want("after an event", vf3, 12, 2)
		if f.Added(12) {
			t.Error("what was told is new")
		}

		time.Sleep(time.Hour)
		want("what was found, later", vf3, 12, 2)
		want("what was not found, later", vf4, 0, 3)
		netdevs = twoCards[:1]
		f.Removed(12)
		want("after it went", vf3, 0, 4)
	})
}
