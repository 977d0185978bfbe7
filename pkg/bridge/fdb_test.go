// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// isForwarded reports whether frames for a MAC address go only to this port, whatever other ports
// send.
func (x *xpu) isForwarded(name string, mac net.HardwareAddr) bool {
	x.t.Helper()
	index := x.link(name).Attrs().Index
	entries, err := x.Handle().NeighList(0, unix.AF_BRIDGE)
	must.Succeed(x.t, err)
	here := false
	for _, e := range entries {
		if e.HardwareAddr.String() != mac.String() || e.MasterIndex == 0 {
			continue
		}
		if e.LinkIndex != index {
			return false
		}
		here = e.State == netlink.NUD_NOARP && e.Flags&netlink.NTF_STICKY != 0
	}

	return here
}

// entry returns a static entry as an administrator would make it.
func (x *xpu) entry(name string, mac net.HardwareAddr) *netlink.Neigh {
	x.t.Helper()
	e := &netlink.Neigh{
		LinkIndex: x.link(name).Attrs().Index, Family: unix.AF_BRIDGE, Flags: netlink.NTF_MASTER,
		State: netlink.NUD_NOARP, HardwareAddr: mac,
	}

	if x.cfg.Plane.Mode == plane.ModeVLANAware {
		e.Vlan = 10
	}
	return e
}

// testForwardingIsRestored checks that the agent restores forwarding entries that another program
// has changed.
func testForwardingIsRestored(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	one, two := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", one.mac)
	x.port(rep2, "net-blue", two.mac)
	if !x.isForwarded(rep1, one.mac) || !x.isForwarded(rep2, two.mac) {
		t.Fatal("no entries")
	}

	for name, disturb := range map[string]func() error{
		"removed":    func() error { return x.Handle().NeighDel(x.entry(rep1, one.mac)) },
		"moved":      func() error { return x.Handle().NeighSet(x.entry(rep2, one.mac)) },
		"not sticky": func() error { return x.Handle().NeighSet(x.entry(rep1, one.mac)) },
		"both removed": func() error {
			_ = x.Handle().NeighDel(x.entry(rep2, two.mac))
			return x.Handle().NeighDel(x.entry(rep1, one.mac))
		},
	} {
		must.Succeed(t, disturb())
		must.Eventually(t, name+": restored", func() bool {
			return x.isForwarded(rep1, one.mac) &&
				x.isForwarded(rep2, two.mac)
		})
	}
}

// testOldMAC checks that frames for a MAC address that a port no longer has do not go to the port,
// although the agent was killed before it removed the entry. An entry of an administrator stays.
func testOldMAC(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	pod := newPod(t, x, rep1, 1)
	x.port(rep1, "net-blue", pod.mac)
	x.stop()
	old, admins := net.HardwareAddr{2, 0, 0, 0, 0, 0x44}, net.HardwareAddr{2, 0, 0, 0, 0, 0x55}
	left := x.entry(rep1, old)
	left.Flags |= netlink.NTF_STICKY
	must.Succeed(t, x.Handle().NeighSet(left))
	must.Succeed(t, x.Handle().NeighSet(x.entry(rep1, admins)))
	x.start()
	if x.isForwarded(rep1, old) {
		t.Error("frames for the old MAC address still go to the port")
	}
	if !x.isForwarded(rep1, pod.mac) {
		t.Error("frames for the MAC address do not go to the port")
	}
	if got := x.forwarded(rep1, admins); len(got) != 1 {
		t.Errorf("the administrator's entry is in VLANs %v", got)
	}
}
