// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/node"
)

const resource = "xpu.opiproject.org/fast"

// field is a node in guest igb whose agent offers all VFs, as the pool "fast".
type field struct {
	*node.Node
	pfs    []pci.Address
	vfs    [][]function.ID // by PF
	before node.State
}

// newField returns a field whose agent is in direct mode.
func newField(t *testing.T) *field {
	t.Helper()
	return newFieldWith(t, node.Options{
		Pools: []v1alpha1.DevicePool{
			node.Pool("fast", v1alpha1.FunctionSelector{Devices: []string{"10ca"}}),
		},
	})
}

func newFieldWith(t *testing.T, options node.Options) *field {
	t.Helper()
	card.InGuest(t, "igb")
	f := &field{pfs: card.PFs(t)}
	if len(f.pfs) < 2 {
		t.Fatalf("the guest has %d cards, want 2", len(f.pfs))
	}

	for _, pf := range f.pfs {
		f.vfs = append(f.vfs, node.VFs(t, pf))
	}

	// Without a carrier the card refuses rates.
	node.Carrier(t, f.pfs...)
	f.before = node.HostState(t)
	f.Node = node.New(t, options)

	return f
}

func (f *field) all() []function.ID {
	var all []function.ID
	for _, vfs := range f.vfs {
		all = append(all, vfs...)
	}
	return all
}

// pod returns a pod to which the kubelet gave the VF.
func (f *field) pod(name string, host byte, vf function.ID) *node.Pod {
	f.MustAllocate(resource, vf)
	return f.NewPod(name, host)
}

// TestExtendedResource takes VFs to pods by the device plugin and xpu-cni, and back.
func TestExtendedResource(t *testing.T) {
	f := newField(t)
	f.Start()
	f.WantHealthy(resource, f.all()...)
	f.Run("properties are what the pod asked for, and are restored", f.properties)
	f.Run("what the driver refuses is refused with nothing half set", f.refused)
	f.Run("pods of one VLAN reach each other, others do not", f.traffic)
	f.Run("VF without a driver", f.driverless)
	f.Run("PF renamed while a pod has its VF", f.renamed)
	f.Run("network namespace deleted under a VF", f.namespaceDeleted)
	f.Run("network namespace deleted while the agent is away", f.namespaceDeletedUnseen)
	f.Run("VF removed while a pod has it", f.removed)
	f.Run("VF removed and made again while a pod has it", f.removedAndMade)
	f.End()
	f.WantNothingLeft()
}

func (f *field) properties(t *testing.T) {
	pf, vf := f.pfs[0], f.vfs[0][1]
	pod := f.pod("properties", 1, vf)

	conf := node.NetConf{
		"vlan": 100, "vlanQoS": 3, "mac": "02:00:00:00:00:01", "spoofchk": "off", "trust": "on",
		"max_tx_rate": 100,
		"mtu":         1400,
	}

	pod.MustAdd(vf, conf)
	want := f.before.VF(t, pf, 1)
	want.MAC, want.VLAN, want.QoS, want.MaxRate = "02:00:00:00:00:01", 100, 3, 100
	want.SpoofCheck, want.Trust = false, true
	if diff := cmp.Diff(want, node.HostState(t).VF(t, pf, 1)); diff != "" {
		t.Errorf("VF 1 of %s (-want +got):\n%s", pf, diff)
	}
	if got := pod.Interface("net1"); got.HardwareAddr.String() != "02:00:00:00:00:01" ||
		got.MTU != 1400 {
		t.Errorf("net1 has MAC %s and MTU %d", got.HardwareAddr, got.MTU)
	}
	if err := pod.Check(vf, conf); err != nil {
		t.Errorf("CHECK: %v", err)
	}

	pod.MustDel(vf, conf)
	node.WantState(t, f.before)
}

func (f *field) refused(t *testing.T) {
	vf := f.vfs[0][0]
	pod := f.pod("refused", 1, vf)
	for _, test := range []struct {
		name, words string
		conf        node.NetConf
	}{
		{"minimum rate", "min_tx_rate", node.NetConf{"min_tx_rate": 10, "max_tx_rate": 100}},
		{"802.1ad", "vlanProto", node.NetConf{"vlanProto": "802.1ad"}},
		{"link state", "link_state", node.NetConf{"link_state": "enable"}},
	} {
		f.Run(test.name, func(t *testing.T) {
			test.conf["vlan"], test.conf["trust"], test.conf["spoofchk"], test.conf["mtu"] = 100, "on", "off", 1400
			_, err := pod.Add(vf, test.conf)
			wantRefusal(t, err, test.words)
			pod.WantNo("net1")
			node.WantState(t, f.before)
			pod.MustDel(vf, test.conf) // as runtimes do after a failed ADD
		})
	}

	f.WantHealthy(resource, f.all()...)
}

func (f *field) traffic(t *testing.T) {
	blue, red := node.NetConf{"vlan": 100}, node.NetConf{"vlan": 200}
	type member struct {
		pod  *node.Pod
		vf   function.ID
		conf node.NetConf
	}

	var members []member
	withMAC := node.NetConf{"vlan": 100, "mac": "02:00:00:00:00:0a"}
	for i, m := range []member{
		{vf: f.vfs[0][0], conf: withMAC}, {vf: f.vfs[0][1], conf: blue},
		{vf: f.vfs[1][0], conf: blue},
		{vf: f.vfs[0][2], conf: red}, {vf: f.vfs[1][1], conf: nil},
	} {
		m.pod = f.pod("traffic"+string('a'+rune(i)), byte(i+1), m.vf)
		m.pod.MustAdd(m.vf, m.conf)
		members = append(members, m)
	}

	a, b, c, other, none := members[0].pod, members[1].pod, members[2].pod, members[3].pod, members[4].pod
	a.WantReach(t, b) // on one PF
	a.WantReach(t, c) // over the wire
	a.WantApart(t, other)
	c.WantApart(t, none)

	for _, m := range members {
		m.pod.MustDel(m.vf, m.conf)
	}

	node.WantState(t, f.before)
}

// driverless checks that the error for a VF without a driver says what is missing.
func (f *field) driverless(t *testing.T) {
	vf := f.vfs[1][2]
	pod := f.pod("driverless", 1, vf) // before the agent sees that the driver is gone
	card.SetAttribute(t, vf.Address, "driver/unbind", string(vf.Address))
	_, err := pod.Add(vf, nil)
	wantRefusal(t, err, "has no driver")
	pod.MustDel(vf, nil)
	setDriver(t, vf.Address, "igbvf")
	f.Eventually("the VF has a netdev", func() bool { return card.Netdev(vf.Address) != "" })
	f.before = node.HostState(t) // igbvf gives the VF another MAC
	pod.MustAdd(vf, nil)
	pod.MustDel(vf, nil)
	node.WantState(t, f.before)
}

// wantRefusal checks that ADD failed with these words, because the Function does not support the
// request.
func wantRefusal(t *testing.T, err error, words string) {
	t.Helper()
	said, ok := errors.AsType[*types.Error](err)
	if !ok || said.Code != cniserver.CodeAttach || !strings.Contains(said.Msg, words) {
		t.Errorf("ADD: %v, want code %d and %q", err, cniserver.CodeAttach, words)
	}
}

func (f *field) renamed(t *testing.T) {
	vf := f.vfs[1][1]
	pod := f.pod("renamed", 1, vf)
	conf := node.NetConf{"vlan": 100}
	pod.MustAdd(vf, conf)
	old := card.Netdev(f.pfs[1])
	uplink, err := netlink.LinkByName(old)
	must.Succeed(t, err)
	must.Succeed(t, netlink.LinkSetName(uplink, "uplink1"))
	pod.MustDel(vf, conf)
	want := f.before[string(f.pfs[1])]
	want.Name = "uplink1"
	if diff := cmp.Diff(want, node.HostState(t)[string(f.pfs[1])]); diff != "" {
		t.Errorf("renamed PF (-before +now):\n%s", diff)
	}

	must.Succeed(t, netlink.LinkSetName(uplink, old))
	node.WantState(t, f.before)
}

func (f *field) namespaceDeleted(t *testing.T) {
	vf := f.vfs[0][2]
	pod := f.pod("deleted", 1, vf)
	conf := node.NetConf{"vlan": 100, "trust": "on", "max_tx_rate": 100, "mtu": 1400}
	pod.MustAdd(vf, conf)
	must.Succeed(t, pod.Close())
	f.Eventually("the VF is back", func() bool { return card.Netdev(vf.Address) != "" })
	must.Succeed(t, pod.Del(vf, conf))
	node.WantState(t, f.before)
	f.WantHealthy(resource, f.all()...)
}

// namespaceDeletedUnseen checks that an agent that starts brings back lost Functions without a
// call.
func (f *field) namespaceDeletedUnseen(t *testing.T) {
	vf := f.vfs[0][2]
	pod := f.pod("unseen", 1, vf)
	conf := node.NetConf{
		"vlan": 100, "trust": "on", "max_tx_rate": 100, "mtu": 1400, "mac": "02:00:00:00:00:01",
	}
	pod.MustAdd(vf, conf)
	f.Kill()
	must.Succeed(t, pod.Close())
	f.Start()
	node.WantState(t, f.before)
	f.WantHealthy(resource, f.all()...)
	must.Succeed(t, pod.Del(vf, conf))
	node.WantState(t, f.before)
}

func (f *field) removed(t *testing.T) {
	vf, other := f.vfs[1][0], f.vfs[0][0]
	pod, undisturbed := f.pod("removed", 1, vf), f.pod("undisturbed", 2, other)
	pod.MustAdd(vf, node.NetConf{"vlan": 100})
	undisturbed.MustAdd(other, node.NetConf{"vlan": 200})
	had := undisturbed.Interface("net1")

	card.SetAttribute(t, f.pfs[1], "sriov_numvfs", "0")
	pod.WantNo("net1")
	f.WantHealthy(resource, f.vfs[0]...)
	begin := time.Now()
	pod.MustDel(vf, node.NetConf{"vlan": 100})
	t.Logf("DEL of a VF that is gone took %s", time.Since(begin))
	if got := undisturbed.Interface("net1"); got.Index != had.Index {
		t.Errorf("the other pod's net1 has index %d, had %d", got.Index, had.Index)
	}

	undisturbed.MustDel(other, node.NetConf{"vlan": 200})
	if n := strings.Count(f.Log(), "not back"); n > 1 {
		t.Errorf("the agent says %d times that something is not back", n)
	}

	card.SetAttribute(t, f.pfs[1], "sriov_numvfs", strconv.Itoa(len(f.vfs[1])))
	f.WantHealthy(resource, f.all()...)
	node.Carrier(t, f.pfs[1])
	f.before = node.HostState(t) // the VFs are new ones
	again := f.pod("again", 1, vf)
	again.MustAdd(vf, nil)
	again.MustDel(vf, nil)
	node.WantState(t, f.before)
}

// removedAndMade checks that a new VF at the address of a pod's former VF becomes the pod's, and
// that DEL gives it the former properties of the old one.
func (f *field) removedAndMade(t *testing.T) {
	vf := f.vfs[1][0]
	conf := node.NetConf{"vlan": 100, "trust": "on", "mac": "02:00:00:00:00:01"}
	pod := f.pod("made", 1, vf)
	pod.MustAdd(vf, conf)
	card.SetAttribute(t, f.pfs[1], "sriov_numvfs", "0")
	card.SetAttribute(t, f.pfs[1], "sriov_numvfs", strconv.Itoa(len(f.vfs[1])))
	f.Eventually("the pod has its interface again", pod.Ready)

	if a, pf := pod.Interface("net1"), node.HostState(t).VF(t, f.pfs[1],
		0); a.HardwareAddr.String() != "02:00:00:00:00:01" ||
		pf.VLAN != 100 || !pf.Trust {
		t.Errorf("net1 has MAC %s, and the PF enforces %+v", a.HardwareAddr, pf)
	}

	pod.MustDel(vf, conf)
	f.WantHealthy(resource, f.all()...)
	node.Carrier(t, f.pfs[1])
	f.before = node.HostState(t)
	again := f.pod("again", 1, vf)
	again.MustAdd(vf, conf)
	again.MustDel(vf, conf)
	node.WantState(t, f.before)
}
