// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
	"github.com/opiproject/xpu-device-plugin/test/qemu/stage"
)

// TestPersonalities runs a Function's whole life, with the agent and the CNI plugin, on the drivers
// of other cards. A pod that asks for everything that the card supports starts. It ends by the
// first DEL, whatever it does to its interface. Then the Function is as before and offered again,
// or is not offered.
func TestPersonalities(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	vf := node.VFs(t, pf)[0]
	s := stage.New(t, pf)
	n := node.New(t, node.Options{Pools: []v1alpha1.DevicePool{
		node.Pool("fast", v1alpha1.FunctionSelector{RootDevices: []string{string(pf)}}),
	}})

	for i, p := range stage.Personalities(t) {
		n.Run(p.Name, func(t *testing.T) {
			s.Play(t, p)
			before := s.Settled(t, 0)
			n.Start()
			defer n.End()

			offered(t, n, vf, true)
			n.MustAllocate(resource, vf)
			pod := n.NewPod("plays-"+p.Name, byte(i+1))
			conf := everything(p)

			begin := time.Now()
			pod.MustAdd(vf, conf)
			t.Logf("ADD took %s", time.Since(begin).Round(time.Millisecond))
			harm(t, pod)
			begin = time.Now()
			pod.MustDel(vf, conf)
			t.Logf("DEL took %s", time.Since(begin).Round(time.Millisecond))
			ended(t, n, s, vf, before)
		})
	}
}

// everything returns all settings of a network configuration that the card supports.
func everything(p personality.Personality) node.NetConf {
	conf := node.NetConf{"mtu": 1400, "mac": "02:00:00:00:00:31"}
	for knob, field := range map[string]struct {
		name  string
		value any
	}{
		"vlan": {"vlan", 100}, "qos": {"vlanQoS", 3}, "max": {"max_tx_rate", 500},
		"spoofchk": {"spoofchk", "on"}, "trust": {"trust", "on"},
		"link.enable": {"link_state", "enable"},
	} {
		if stage.Grants(p, knob) {
			conf[field.name] = field.value
		}
	}

	return conf
}

// harm does to the interface what a tenant with CAP_NET_ADMIN can do. The driver may refuse
// another MAC.
func harm(t *testing.T, pod *node.Pod) {
	t.Helper()
	link, err := pod.Handle().LinkByName("net1")
	must.Succeed(t, err)

	must.Succeed(t, pod.Handle().LinkAdd(&netlink.Macvlan{
		LinkAttrs: netlink.LinkAttrs{Name: "evil", ParentIndex: link.Attrs().Index},
		Mode:      netlink.MACVLAN_MODE_PRIVATE,
	}))

	must.Succeed(t, pod.Handle().LinkSetAlias(link, "evil"))
	must.Succeed(t, pod.Handle().LinkSetDown(link))
	_ = pod.Handle().LinkSetHardwareAddr(link, []byte{0x02, 0, 0, 0, 0, 0x66})
	must.Succeed(t, pod.Handle().LinkSetName(link, "evil0"))
}

// ended waits until the Function is as before and offered, or is not offered.
func ended(t *testing.T, n *node.Node, s *stage.Stage, vf function.ID, before stage.VF) {
	t.Helper()
	offered(t, n, vf, false)
	if !slices.Contains(n.Kubelet.Healthy(resource), vf.String()) {
		t.Logf("%s is kept from other pods", vf)
		return
	}

	after := s.Settled(t, 0)
	// other values of these isolate the next owner as well
	after.MAC, after.Own, after.Proto = before.MAC, before.Own, before.Proto
	if after.Max >= 10_000 {
		after.Max = before.Max // a limit of the link's speed limits nothing
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("offered again, but (-before +now):\n%s", diff)
	}
}

// offered waits some time until the kubelet may give the Function to pods. If wanted, it fails the
// test if the kubelet may not.
func offered(t *testing.T, n *node.Node, vf function.ID, wanted bool) {
	t.Helper()
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); {
		if slices.Contains(n.Kubelet.Healthy(resource), vf.String()) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}

	if wanted {
		t.Fatalf("%s is not offered: %v", vf, n.Kubelet.Devices(resource))
	}
}
