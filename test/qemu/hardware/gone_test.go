// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
)

// vlanOf returns the VLAN that a PF sets for a VF.
func vlanOf(t *testing.T, pf pci.Address, index int) int {
	t.Helper()
	routes, err := netlink.NewHandle(unix.NETLINK_ROUTE) // only a new handle asks for VFs
	must.Succeed(t, err)
	defer routes.Close()
	l, err := routes.LinkByName(card.Netdev(pf))
	must.Succeed(t, err)
	return l.Attrs().Vfs[index].Vlan
}

// TestVFGone checks that the settings that a PF enforces for a pod end with the pod, whatever
// happened to the netdevs meanwhile.
func TestVFGone(t *testing.T) {
	card.InGuest(t, "igb")
	const index, outside, inside = 1, 7, 100
	pf := card.PFs(t)[0]
	vf := card.VF(t, pf, index)
	must.Succeed(t, netlink.LinkSetVfVlan(linkOf(t, card.Netdev(pf)), index, outside))
	c := newClaims(t, t.TempDir(), v1alpha1.DevicePoolSpec{}, func(string) {})
	object := claimOf(pf, vf, `"network": "lab", "vf": {"vlan": 100}`)
	attach := func(t *testing.T) {
		t.Helper()
		_, err := c.prepare(object)
		must.Succeed(t, err)
		_, err = c.attach(object, vf, netns.New(t))
		must.Succeed(t, err)
		if vlan := vlanOf(t, pf, index); vlan != inside {
			t.Fatalf("attached: VLAN %d, want %d", vlan, inside)
		}
	}

	wantFree := func(t *testing.T) {
		t.Helper()
		if vlan := vlanOf(t, pf, index); vlan != outside || len(c.journal.All()) > 0 {
			t.Errorf("released: VLAN %d, want %d; the journal has %+v", vlan, outside,
				c.journal.All())
		}
	}

	t.Run("driver of the VF unbound while its pod lives", func(t *testing.T) {
		attach(t)
		card.Set(t, "/sys/bus/pci/drivers/igbvf/unbind", string(vf))
		must.Succeed(t, c.unprepare(t.Context(), object))
		wantFree(t)
		card.Set(t, "/sys/bus/pci/drivers/igbvf/bind", string(vf))
	})

	t.Run("PF in another network namespace", func(t *testing.T) {
		attach(t)
		own, err := unix.Open("/proc/1/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		must.Succeed(t, err)
		defer unix.Close(own)

		name, elsewhere := card.Netdev(pf), netns.New(t)
		must.Succeed(t, netlink.LinkSetNsFd(linkOf(t, name), elsewhere.Fd()))
		wantMessage(t, c.unprepare(t.Context(), object), "PF "+string(pf),
			"has no netdev on the host", "vf vlan")
		if card.Netdev(vf) == "" {
			t.Error("the netdev of the VF is not back")
		}

		l, err := elsewhere.Handle().LinkByName(name)
		must.Succeed(t, err)
		must.Succeed(t, elsewhere.Handle().LinkSetNsFd(l, own))
		must.Succeed(t, netlink.LinkSetUp(linkOf(t, name)))
		must.Succeed(t, c.unprepare(t.Context(), object))
		wantFree(t)
	})

	must.Succeed(t, netlink.LinkSetVfVlan(linkOf(t, card.Netdev(pf)), index, 0))
}
