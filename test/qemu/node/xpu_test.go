// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

// onXPU is a node in guest simnic: a card whose eswitch opi-bridge uses, and an agent that asks
// opi-bridge for Ports.
type onXPU struct {
	*node.Node
	bridge  *node.Bridge
	devlink *devlink.Conn
	pf      pci.Address
	before  node.State
	ports   []devlink.Port
}

// firstSF is the number of the first SF.
const firstSF = 88

func newOnXPU(t *testing.T) *onXPU {
	t.Helper()
	card.InGuest(t, "simnic")
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(func() { conn.Close() })

	x := &onXPU{devlink: conn, pf: card.PFs(t)[0]}
	had, err := conn.EswitchMode(devlink.OfPCI(x.pf))
	must.Succeed(t, err)
	must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(x.pf), devlink.Switchdev))
	t.Cleanup(func() { must.Succeed(t, conn.SetEswitchMode(devlink.OfPCI(x.pf), had)) })

	nameByPath(t, x.pf)
	x.before, x.ports = node.HostState(t), x.functionPorts(t)

	x.bridge = node.StartBridge(t)
	vfs := node.Pool("vfs", v1alpha1.FunctionSelector{RootDevices: []string{string(x.pf)}})
	vfs.Spec.DeviceType = v1alpha1.DeviceTypeNet
	sfs := node.Pool("sfs", v1alpha1.FunctionSelector{RootDevices: []string{string(x.pf)}})
	sfs.Spec.SFs = &v1alpha1.SFSpec{Count: 2, FirstNumber: firstSF}
	sfs.Spec.DeviceType = v1alpha1.DeviceTypeAuxNet
	x.Node = node.New(t, node.Options{
		Pools: []v1alpha1.DevicePool{vfs, sfs},
		Direct: fmt.Sprintf(`
xpus: [{name: card, endpoint: %q, insecure: true}]
networks: {blue: {vlan: 10, allowedNamespaces: {from: All}}, red: {vlan: 20, allowedNamespaces: {from: All}}}
pools: {vfs: blue, sfs: blue}
`, node.BridgeAddress),
	})

	x.Start()
	return x
}

// nameByPath names the netdevs of a PF's VFs as udev does, until the test ends. The kernel names
// netdevs by the lowest free numbers, which SFs would get that are made while the VFs are in pods.
func nameByPath(t *testing.T, pf pci.Address) {
	t.Helper()
	for i, vf := range node.VFs(t, pf) {
		old := card.Netdev(vf.Address)
		l, err := netlink.LinkByName(old)
		must.Succeed(t, err)
		must.Succeed(t, netlink.LinkSetName(l, fmt.Sprintf("enp1s0v%d", i)))
		t.Cleanup(func() { must.Succeed(t, netlink.LinkSetName(l, old)) })
	}
}

// functionPorts returns the eswitch's ports.
func (x *onXPU) functionPorts(t *testing.T) []devlink.Port {
	t.Helper()
	ports, err := x.devlink.PortsOf(devlink.OfPCI(x.pf))
	must.Succeed(t, err)
	return ports
}

// subfunctions returns the existing auxiliary devices of SFs.
func subfunctions(t *testing.T) []string {
	t.Helper()
	var numbers []string
	found, err := filepath.Glob("/sys/bus/auxiliary/devices/*/sfnum")
	must.Succeed(t, err)

	for _, file := range found {
		content, err := os.ReadFile(file)
		must.Succeed(t, err)
		numbers = append(numbers, strings.TrimSpace(string(content)))
	}

	slices.Sort(numbers)
	return numbers
}

// wantAsBefore checks that no netdev is in a bridge, and that the card and netdevs are as before.
func (x *onXPU) wantAsBefore(t *testing.T) {
	t.Helper()
	x.Eventually("no netdev is in a bridge", func() bool { return len(x.bridge.Members(t)) == 0 })
	if got := subfunctions(t); len(got) > 0 {
		t.Errorf("SFs %q are left behind", got)
	}
	if diff := cmp.Diff(x.ports, x.functionPorts(t)); diff != "" {
		t.Errorf("ports of %s (-before +now):\n%s", x.pf, diff)
	}
	node.WantState(t, x.before)
}

// member is a pod with a Function in a network of the xPU.
type member struct {
	*node.Pod
	function function.ID
	conf     node.NetConf
}

// join takes a Function of a pool to a new pod.
func (x *onXPU) join(pool, name string, host byte, f function.ID, network string) member {
	x.MustAllocate(node.Resource(pool), f)
	m := member{x.NewPod(name, host), f, node.NetConf{"network": network}}
	m.MustAdd(f, m.conf)
	return m
}

// TestXPU takes VFs and SFs of a card in mode switchdev to pods. opi-bridge makes their Ports of
// the Functions' representors.
func TestXPU(t *testing.T) {
	x := newOnXPU(t)
	vfs := node.VFs(t, x.pf)
	sfs := []function.ID{
		function.SubfunctionID(x.pf, firstSF), function.SubfunctionID(x.pf, firstSF+1),
	}
	x.WantHealthy(node.Resource("vfs"), vfs...)
	x.WantHealthy(node.Resource("sfs"), sfs...)

	x.Run("VFs and SFs of one network reach each other, others do not", func(t *testing.T) {
		members := []member{
			x.join("vfs", "vf-blue", 1, vfs[0], "blue"), x.join("vfs", "vf-red", 2, vfs[1], "red"),
			x.join("sfs", "sf-blue", 3, sfs[0], "blue"), x.join("sfs", "sf-red", 4, sfs[1], "red"),
		}

		vfBlue, vfRed, sfBlue, sfRed := members[0], members[1], members[2], members[3]
		vfBlue.WantReach(t, sfBlue.Pod)
		vfRed.WantReach(t, sfRed.Pod)
		vfBlue.WantApart(t, sfRed.Pod)
		sfBlue.WantApart(t, vfRed.Pod)
		if got := x.bridge.Members(t); len(got) != len(members) {
			t.Errorf("netdevs %q are in bridges, want %d representors", got, len(members))
		}

		for _, m := range members {
			m.MustDel(m.function, m.conf)
		}

		x.WantHealthy(node.Resource("vfs"), vfs...)
		x.WantHealthy(node.Resource("sfs"), sfs...)
		x.wantAsBefore(t)
	})

	x.Run("agent and opi-bridge killed while pods have Functions", func(t *testing.T) {
		a, b := x.join("vfs", "killed-vf", 1, vfs[2], "blue"), x.join("sfs", "killed-sf", 2,
			sfs[0], "blue")
		x.Kill()
		x.bridge.Kill()
		a.WantReach(t, b.Pod) // the data plane needs neither agent nor opi-bridge
		x.bridge.Start()
		x.Node.Start()
		x.WantHealthy(node.Resource("vfs"), vfs...)
		x.WantHealthy(node.Resource("sfs"), sfs...)
		a.WantReach(t, b.Pod)

		for _, m := range []member{a, b} {
			m.MustDel(m.function, m.conf)
		}

		x.WantHealthy(node.Resource("sfs"), sfs...)
		x.wantAsBefore(t)
	})

	x.Run("network that the xPU does not have", func(t *testing.T) {
		x.MustAllocate(node.Resource("sfs"), sfs[1])
		pod := x.NewPod("refused", 1)
		conf := node.NetConf{"network": "green"}
		if _, err := pod.Add(sfs[1], conf); err == nil || !strings.Contains(err.Error(), "green") {
			t.Errorf("ADD: %v, want an error that names network green", err)
		}

		must.Succeed(t, pod.Del(sfs[1], conf)) // as runtimes do after a failed ADD
		x.WantHealthy(node.Resource("sfs"), sfs...)
		x.wantAsBefore(t)
	})

	x.End()
	x.WantNothingLeft()
}
