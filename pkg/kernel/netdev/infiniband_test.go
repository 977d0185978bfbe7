// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	hostsNode, hostsPort = "02:00:00:00:00:00:00:10", "02:00:00:00:00:00:00:11"
	podsNode, podsPort   = "02:00:00:00:00:00:00:20", "02:00:00:00:00:00:00:21"
	noGUID               = "00:00:00:00:00:00:00:00"
)

// newInfiniBandCard returns a world with an InfiniBand PF, whose VF has GUIDs and no MAC.
func newInfiniBandCard(t *testing.T) (*world, *netdev.Card) {
	t.Helper()
	w, c := newCard(t)
	c.InfiniBand = true
	c.VF.MAC, c.VF.NodeGUID, c.VF.PortGUID = "", hostsNode, hostsPort
	return w, c
}

// identified returns an interface of a program in the pod, which has no netdev, with both GUIDs.
func identified() function.Interface {
	return function.Interface{Name: "net1", Userspace: true, VF: &function.VFConfig{
		NodeGUID: podsNode, PortGUID: podsPort,
	}}
}

// TestGUIDs checks that the GUIDs of a VF are set at its PF, compared, and given back.
func TestGUIDs(t *testing.T) {
	w, c := newInfiniBandCard(t)
	before := c.Enforced()
	a, err := attachCard(t, w, identified())
	must.Succeed(t, err)
	want := []string{"node GUID " + podsNode, "port GUID " + podsPort}
	if diff := cmp.Diff(want, c.Orders()); diff != "" {
		t.Errorf("attached by (-want +got):\n%s", diff)
	}

	checked := func(want ...string) {
		t.Helper()
		got, err := a.check(t, w, netdev.Expected{})
		must.Succeed(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("check (-want +got):\n%s", diff)
		}
	}
	checked()
	c.VF.NodeGUID = hostsNode
	checked(`vf node_guid is ` + hostsNode + `, was ` + podsNode)
	c.VF.NodeGUID, c.VF.PortGUID = podsNode, hostsPort
	checked(`vf port_guid is ` + hostsPort + `, was ` + podsPort)
	c.VF.PortGUID = ""
	checked(`vf port_guid is not known, was ` + podsPort)
	c.VF.PortGUID = podsPort

	text, err := json.Marshal(a.before)
	must.Succeed(t, err)
	a.before = netdev.Snapshot{} // as the next agent reads it from the journal
	must.Succeed(t, json.Unmarshal(text, &a.before))
	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
	if diff := cmp.Diff(before, c.Enforced()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	c.Orders()
	restored, err = a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
	if again := c.Orders(); len(again) > 0 {
		t.Errorf("released again by %q", again)
	}
}

// TestGUIDsAreKept checks that a release leaves the GUIDs alone that its attachment did not set, as
// with the record of an agent that did not know of GUIDs.
func TestGUIDsAreKept(t *testing.T) {
	w, c := newInfiniBandCard(t)
	want := function.Interface{
		Name: "net1", Userspace: true, VF: &function.VFConfig{LinkState: "enable"},
	}
	a, err := attachCard(t, w, want)
	must.Succeed(t, err)

	for name, older := range map[string]func(*netdev.Snapshot){
		"this agent": func(*netdev.Snapshot) {},
		"an older one": func(s *netdev.Snapshot) {
			s.VF.NodeGUID, s.VF.PortGUID = "", ""
		},
		"a much older one": func(s *netdev.Snapshot) {
			s.VF.NodeGUID, s.VF.PortGUID, s.Sets = "", "", nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			older(&a.before)
			c.VF.NodeGUID, c.VF.PortGUID = podsNode, podsPort // by the administrator
			restored, err := a.restore(t, w)
			must.Succeed(t, err)
			notes(t, restored)
			if got := c.Enforced(); got.NodeGUID != podsNode || got.PortGUID != podsPort {
				t.Errorf("GUIDs %s and %s", got.NodeGUID, got.PortGUID)
			}
		})
	}
}

// TestGUIDsAreRefused covers what a PF cannot be asked for. Nothing is changed then.
func TestGUIDsAreRefused(t *testing.T) {
	netdevs := identified()
	netdevs.Userspace = false
	both := netdevs
	both.MAC = podsMAC

	for name, test := range map[string]struct {
		change func(*netdev.Card)
		want   function.Interface
		says   string
	}{
		"Ethernet": {
			func(c *netdev.Card) { c.InfiniBand = false }, identified(),
			"vf.nodeGUID, vf.portGUID: must be absent: PF ens1f0 (0000:3b:00.0) is no InfiniBand PF",
		},
		"Ethernet, netdev": {
			func(c *netdev.Card) { c.InfiniBand = false }, netdevs, "is no InfiniBand PF",
		},
		"not reported": {
			func(c *netdev.Card) { c.VF.NodeGUID, c.VF.PortGUID = "", "" }, identified(),
			"vf.nodeGUID, vf.portGUID: must be absent: PF ens1f0 (0000:3b:00.0) does not tell it for VF 0",
		},
		"never set": {
			func(c *netdev.Card) { c.VF.PortGUID = noGUID }, identified(),
			"vf.portGUID: PF ens1f0 tells node GUID " + hostsNode + " and port GUID " + noGUID,
		},
		"no operations": {
			func(c *netdev.Card) { c.NoOperations = true }, identified(),
			"vf.nodeGUID, vf.portGUID: Function without a netdev has no PF",
		},
		"MAC": {
			func(*netdev.Card) {},
			function.Interface{Name: "net1", Userspace: true, MAC: podsMAC},
			"mac: VF 0 of PF ens1f0 (0000:3b:00.0): must be absent: an InfiniBand interface has no MAC",
		},
		"MAC, netdev": {func(*netdev.Card) {}, both, "set vf.portGUID"},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := newInfiniBandCard(t)
			test.change(c)
			_, err := attachCard(t, w, test.want)
			mentions(t, err, test.says)
			if orders := c.Orders(); len(orders) > 0 {
				t.Errorf("ordered %q", orders)
			}
		})
	}
}

// TestGUIDStays checks that a Function is kept from the next owner whose GUID cannot be given back,
// or is not known.
func TestGUIDStays(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*netdev.Card)
		says   string
	}{
		"refused": {func(c *netdev.Card) {
			c.Refuse = func(order string) error {
				if order == "port GUID "+hostsPort {
					return unix.EINVAL
				}
				return nil
			}
		}, "vf port_guid is " + podsPort + ", was " + hostsPort},
		"dropped": {func(c *netdev.Card) {
			c.Drop = func(order string) bool { return order == "node GUID "+hostsNode }
		}, "vf node_guid is " + podsNode + ", was " + hostsNode},
		"not reported any more": {func(c *netdev.Card) {
			c.VF.NodeGUID, c.VF.PortGUID = "", ""
			c.Drop = func(string) bool { return true }
		}, "vf node_guid is not known, was " + hostsNode},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := newInfiniBandCard(t)
			a, err := attachCard(t, w, identified())
			must.Succeed(t, err)
			test.change(c)
			impatiently(w, c, func() {
				_, err = a.restore(t, w)
			})
			mentions(t, err, test.says)
		})
	}
}

// TestGUIDIsNotRead covers a driver that has a VF, and keeps the GUIDs with which it was bound. The
// attachment fails, and the PF gets the old ones back.
func TestGUIDIsNotRead(t *testing.T) {
	w, c := newInfiniBandCard(t)
	before := c.Enforced()
	want := identified()
	want.Userspace = false
	impatiently(w, c, func() {
		_, err := attachCard(t, w, want)
		mentions(t, err, "vf.portGUID: netdev "+hostName+" has none, and not "+podsPort+
			": its driver has not read it")
	})
	if diff := cmp.Diff(before, c.Enforced()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestNodeGUIDIsRead compares the GUID of RDMA devices with the wanted one.
func TestNodeGUIDIsRead(t *testing.T) {
	for content, says := range map[string]string{
		"":                      "",
		"0200:0000:0000:0020\n": "",
		"0200:0000:0000:0010\n": "RDMA device mlx5_2 has " + hostsNode + ", and not " + podsNode,
		"0200:0000\n":           `RDMA device mlx5_2: node_guid "0200:0000": must be 8 bytes`,
	} {
		b := newBus(t, "mlx5_core")
		if content != "" {
			dir := filepath.Join(b.device(), "infiniband", "mlx5_2")
			must.Succeed(t, os.MkdirAll(dir, 0o700))
			must.Succeed(t, os.WriteFile(filepath.Join(dir, "node_guid"), []byte(content), 0o600))
		}

		err := b.engine(nil).CheckNodeGUID(onBus, podsNode)
		if says == "" {
			must.Succeed(t, err)
			continue
		}
		mentions(t, err, says)
	}
}

// TestAddressFollowsNetdev checks that what a driver chose of an InfiniBand address is no difference.
func TestAddressFollowsNetdev(t *testing.T) {
	before := netdev.Snapshot{MAC: "80:00:10:28:fe:80:00:00:00:00:00:00:" + hostsPort}
	renewed := netdev.Snapshot{MAC: "80:00:10:99:fe:80:00:00:00:00:00:00:" + hostsPort}
	if got := netdev.Diff(before, renewed); len(got) > 0 {
		t.Errorf("another number of a queue pair: %q", got)
	}

	pods := netdev.Snapshot{MAC: "80:00:10:99:fe:80:00:00:00:00:00:00:" + podsPort}
	want := []string{"mac is " + string(pods.MAC) + ", was " + string(renewed.MAC)}
	if diff := cmp.Diff(want, netdev.Diff(before, pods)); diff != "" {
		t.Errorf("another GUID (-want +got):\n%s", diff)
	}
}
