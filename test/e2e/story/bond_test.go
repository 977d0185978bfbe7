// SPDX-License-Identifier: Apache-2.0

package story

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func TestBondOf(t *testing.T) {
	port := func(index int, name string, bond int) netlink.Link {
		return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index, Name: name, MasterIndex: bond}}
	}
	bond := func(mode netlink.BondMode, active int) netlink.Link {
		b := netlink.NewLinkBond(netlink.LinkAttrs{Index: 9, Name: "bond0"})
		b.Mode, b.ActiveSlave = mode, active
		return b
	}
	const mode = netlink.BOND_MODE_ACTIVE_BACKUP
	lo := port(1, "lo", 0)

	for _, test := range []struct {
		name  string
		links []netlink.Link
		want  string // the description, or a part of the error
	}{
		{"two ports", []netlink.Link{lo, port(3, "net1", 9), port(4, "net2", 9), bond(mode, 4)},
			"bond0, active-backup, of net1 and net2; net2 is active"},
		{"no bond", []netlink.Link{lo, port(3, "net1", 0)}, "no bond"},
		{"one port", []netlink.Link{lo, port(3, "net1", 9), bond(mode, 3)}, "of net1, active is number 3"},
		{"no active port", []netlink.Link{port(3, "net1", 9), port(4, "net2", 9), bond(mode, 0)},
			"active is number 0"},
		{"another mode",
			[]netlink.Link{port(3, "net1", 9), port(4, "net2", 9), bond(netlink.BOND_MODE_802_3AD, 3)},
			"802.3ad"},
	} {
		t.Run(test.name, func(t *testing.T) {
			text, active, err := bondOf(test.links)
			if err == nil && (text != test.want || active.Attrs().Name != "net2") {
				t.Errorf("%q, active %s; want %q", text, active.Attrs().Name, test.want)
			}
			if err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %q, want %q", err, test.want)
			}
		})
	}
}

// TestBondOfKernel checks that bondOf understands what the kernel says of a bond.
func TestBondOfKernel(t *testing.T) {
	netns.Need(t, netns.Bonds())
	pod, peer := netns.New(t), netns.New(t)
	bond := netlink.NewLinkBond(netlink.LinkAttrs{Name: "bond0"})
	bond.Mode, bond.Miimon = netlink.BOND_MODE_ACTIVE_BACKUP, 100
	must.Succeed(t, pod.Handle().LinkAdd(bond))
	for _, name := range []string{"net1", "net2"} {
		netns.Connect(t, pod, name, peer, name)
		port, err := pod.Handle().LinkByName(name)
		must.Succeed(t, err)
		must.Succeed(t, pod.Handle().LinkSetDown(port)) // a port must be down to join
		must.Succeed(t, pod.Handle().LinkSetMaster(port, bond))
	}
	must.Succeed(t, pod.Handle().LinkSetUp(bond))

	activePort := func() (netlink.Link, error) {
		links, err := pod.Handle().LinkList()
		must.Succeed(t, err)
		text, active, err := bondOf(links)
		t.Log(text)
		return active, err
	}
	var first netlink.Link
	must.EventuallySucceed(t, "a port is active", func() (err error) {
		first, err = activePort()
		return err
	})
	must.Succeed(t, pod.Handle().LinkSetDown(first))
	must.Eventually(t, "the other port is active", func() bool {
		second, err := activePort()
		return err == nil && second.Attrs().Index != first.Attrs().Index
	})
}

func TestBondAddress(t *testing.T) {
	device := func(name, ip string) resourceapi.AllocatedDeviceStatus {
		return resourceapi.AllocatedDeviceStatus{
			NetworkData: &resourceapi.NetworkDeviceData{InterfaceName: name, IPs: []string{ip}},
		}
	}
	one := device("bond0", "10.10.0.9/24")

	address, err := bondAddress([]resourceapi.AllocatedDeviceStatus{one, one})
	if err != nil || address != "10.10.0.9" {
		t.Errorf("%q, %v; want 10.10.0.9", address, err)
	}
	for name, devices := range map[string][]resourceapi.AllocatedDeviceStatus{
		"one device":      {one},
		"no data yet":     {one, {}},
		"another name":    {one, device("net1", "10.10.0.9/24")},
		"another address": {one, device("bond0", "10.10.0.8/24")},
	} {
		if address, err := bondAddress(devices); err == nil {
			t.Errorf("%s: %s, want an error", name, address)
		}
	}
}

// TestBondLeftOut checks that the story says why it shows no bond where the kernel has none, and that
// the probe leaves nothing behind.
func TestBondLeftOut(t *testing.T) {
	var said []string
	w := &World{dir: t.TempDir(), Source: "../../..", Detail: func(format string, args ...any) {
		said = append(said, fmt.Sprintf(format, args...))
	}}
	err := w.bondWherePossible(t.Context())

	if netns.Has(t, netns.Bonds()) {
		if err == nil || len(said) > 0 {
			t.Errorf("%v, said %q; want an attempt without a cluster", err, said)
		}
	} else {
		must.Succeed(t, err)
		if want := "the kernel has no bonds (CONFIG_BONDING, module bonding)"; len(said) != 1 ||
			!strings.HasSuffix(said[0], want) {
			t.Errorf("said %q, want one line with %q", said, want)
		}
	}
	if left, err := os.ReadDir(w.dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
