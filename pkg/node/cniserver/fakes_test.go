// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// card stands for what a machine without VFs cannot have: the engine and the kernel of a node with
// one VF. The lifecycle and its journal are real.
type card struct {
	*journal.Journal
	function   function.Function
	alive      bool
	attachErr  error
	restoreErr error
	// attached is the interface that Attach was called with.
	attached function.Interface
	restored int
	options  lifecycle.Options
	// prepare, if set, is called after a request reserved the Function.
	prepare func()
}

func (c *card) Get(id function.ID) (journal.Attachment, bool) { return c.Journal.Get(id) }

func (c *card) Pools() ([]pool.Pool, bool) {
	return []pool.Pool{
		{Name: "fast", Spec: v1alpha1.DevicePoolSpec{
			Publish: v1alpha1.PublishDevicePlugin, Allow: v1alpha1.PrivilegedFields(),
		}, Functions: []function.Function{c.function}},
	}, true
}

func (c *card) Considered(function.ID) bool { _, known := c.Pools(); return known }

func (c *card) PoolOf(id function.ID) (pool.Pool, bool) {
	pools, _ := c.Pools()
	return poolOf(pools, id)
}

func (c *card) Netdev(function.ID) (string, error) { return "eth1", nil }

func (c *card) Plan(
	_ context.Context, device netdev.Device, netNS string, _ function.Interface,
) (netdev.Snapshot, netdev.Place, error) {
	return netdev.Snapshot{Name: device.Name}, netdev.Place{NetNS: netNS, Cookie: 7, Index: 3}, nil
}

func (c *card) Attach(
	_ context.Context, _ netdev.Device, _ netdev.Snapshot, _ netdev.Place, want function.Interface,
) (netdev.Observed, error) {
	c.attached = want
	return netdev.Observed{Name: want.Name, MAC: want.MAC, MTU: want.MTU}, c.attachErr
}

func (c *card) Add(
	context.Context, netdev.Attached, []netip.Prefix, []function.Route,
) (netdev.Observed, error) {
	return netdev.Observed{}, errors.New("not here")
}

func (c *card) Check(context.Context, netdev.Device, netdev.Attached) ([]string, error) {
	return nil, nil
}

func (c *card) Restore(
	context.Context, netdev.Device, netdev.Snapshot, netdev.Place,
) (netdev.Restored, error) {
	c.restored++
	return netdev.Restored{}, c.restoreErr
}

func (c *card) Alive(netdev.Place) (bool, error) { return c.alive, nil }

func (c *card) Holds(netdev.Place, netdev.Identity) (bool, error) { return c.alive, nil }

// preparing is a journal in which the claim of a Function may be prepared right after the Function
// was reserved.
type preparing struct {
	*journal.Journal
	card *card
}

func (j preparing) Put(a journal.Attachment) error {
	err := j.Journal.Put(a)
	if j.card.prepare != nil && a.State == journal.Reserved && a.CNI != nil {
		j.card.prepare()
	}
	return err
}

// lifecycle returns a lifecycle with the card's current options.
func (c *card) lifecycle() *lifecycle.Manager {
	c.options.BootID = "boot-1"
	return lifecycle.New(preparing{c.Journal, c}, c, c, c.options, logr.Discard())
}

// inventoryOf makes the card an inventory, because the card has another method Get.
type inventoryOf struct{ *card }

func (i inventoryOf) Get(id function.ID) (function.Function, bool) {
	return i.function, id == i.function.ID
}

var vf = function.ID{Address: "0000:3b:02.1"}

func newCard(t *testing.T) (*card, *Server) {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must.Succeed(t, err)
	t.Cleanup(func() { j.Close() })

	c := &card{Journal: j, function: function.Function{
		ID: vf, Kind: function.VF, PF: "0000:3b:00.0", PFName: "ens1f0", Index: 1, Driver: "iavf",
	}}
	return c, &Server{
		Function: inventoryOf{c}.Get, Pools: c, Journal: j, Lifecycle: c.lifecycle(),
		Provisioner: &xpuAgent{ports: map[function.ID]journal.Attachment{}},
		MAC:         func(function.ID) function.MAC { return "02:00:00:00:00:aa" },
		PortID:      func(function.ID) string { return "" },
		Report:      func(journal.Claim) {}, Metrics: NewMetrics(prometheus.NewRegistry()),
		Log: logr.Discard(),
	}
}

func addVF(container string, config map[string]any) wire.Request {
	all := map[string]any{"deviceID": vf.String()}
	for key, value := range config {
		all[key] = value
	}
	r := request(wire.Add, 0, container, nil, all)
	r.NetNS = "/run/netns/x"
	return r
}

// checkCode fails the test unless a reply has the code, 0 for success.
func checkCode(t *testing.T, reply wire.Reply, code uint) {
	t.Helper()
	if reply.Error == nil && code != 0 || reply.Error != nil && reply.Error.Code != code {
		t.Errorf("error %+v, want code %d", reply.Error, code)
	}
}

func TestVF(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	add := addVF("c1",
		map[string]any{
			"vlan": 100, "trust": "on", "runtimeConfig": map[string]any{"CNIDeviceInfoFile": "/x"},
		})

	reply := s.handle(t.Context(), add, nil)
	checkCode(t, reply, 0)
	want := function.Interface{
		Name: "net1", VF: &function.VFConfig{VLAN: new(100), Trust: new(true)},
	}
	if diff := cmp.Diff(want, c.attached); diff != "" {
		t.Errorf("attached (-want +got):\n%s", diff)
	}
	if got := decodeResult(t, reply.Result); got.Interfaces[0].PciID != "0000:3b:02.1" {
		t.Errorf("result %s", reply.Result)
	}
	if want := `{"type":"pci","version":"1.1.0","pci":{"pci-address":"0000:3b:02.1","pf-pci-address":"0000:3b:00.0"}}`; string(reply.DeviceInfo) != want {
		t.Errorf("device info %s", reply.DeviceInfo)
	}
	if a, _ := c.Journal.Get(vf); a.VFIndex != 1 || a.PF != "0000:3b:00.0" ||
		a.PFName != "ens1f0" || !a.IsVF() {
		t.Errorf("record %+v", a)
	}

	c.alive = true
	checkCode(t, s.handle(t.Context(), addVF("c2", nil), nil), CodeTaken)
	c.alive = false
	checkCode(t, s.handle(t.Context(), addVF("c2", nil), nil), 0)
	if a, _ := c.Journal.Get(vf); a.Sandbox != "c2" || c.restored != 1 {
		t.Errorf("restored %d times, record %+v", c.restored, a)
	}
}

// A Function with a driver for userspace programs gets the settings that the PF can enforce. The
// result has the rest.
func TestUserspace(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	c.function.Driver = "vfio-pci"
	add := addVF("c1", map[string]any{"network": "blue", "vlan": 100, "mtu": 1400})
	add.IPAM = []byte(ipamResult)
	reply := s.handle(t.Context(), add, nil)
	checkCode(t, reply, 0)

	want := function.Interface{
		Name: "net1", MAC: "02:00:00:00:00:aa", VF: &function.VFConfig{VLAN: new(100)},
		Userspace: true,
	}
	if diff := cmp.Diff(want, c.attached); diff != "" {
		t.Errorf("attached (-want +got):\n%s", diff)
	}

	got := decodeResult(t, reply.Result)
	if len(got.IPs) != 1 || got.Interfaces[0].Sandbox == "" ||
		got.Interfaces[0].Mac != "02:00:00:00:00:aa" {
		t.Errorf("result %s", reply.Result)
	}

	c.alive = true
	checkCode(t, s.handle(t.Context(), add, nil), 0)
}

func TestFailures(t *testing.T) {
	t.Parallel()
	refused := errors.New("refused")
	tests := map[string]struct {
		arrange func(t *testing.T, c *card)
		request wire.Request
		code    uint
		waits   bool // until the time of an ADD is over
	}{
		"attach": {func(_ *testing.T, c *card) {
			c.attachErr = refused
		}, addVF("c1", nil), CodeAttach, false},
		"release of the pod before": {func(t *testing.T, c *card) {
			must.Succeed(t,
				c.Put(journal.Attachment{
					Function: vf, State: journal.Releasing, BootID: "boot-1",
					Before: &netdev.Snapshot{},
				}))
			c.restoreErr = refused
		}, addVF("c1", nil), types.ErrTryAgainLater, true},
		"release of the container before": {func(t *testing.T, c *card) {
			must.Succeed(t, c.Put(journal.Attachment{
				Function: vf, State: journal.Attaching, Resource: "r", BootID: "boot-1",
				Before: &netdev.Snapshot{},
				CNI:    &journal.CNI{ContainerID: "c0", IfName: "net1"},
			}))
			c.restoreErr = refused
		}, addVF("c1", nil), types.ErrTryAgainLater, true},
		"DEL": {func(t *testing.T, c *card) {
			must.Succeed(t, c.Put(journal.Attachment{
				Function: vf, State: journal.Attaching, Resource: "r", BootID: "boot-1",
				Before: &netdev.Snapshot{},
				CNI:    &journal.CNI{ContainerID: "c1", IfName: "net1"},
			}))
			c.restoreErr = refused
		}, request(wire.Del, 0, "c1", nil, nil), CodeRelease, false},
		"journal": {func(_ *testing.T, c *card) {
			c.Journal.Close()
		}, addVF("c1", nil), CodeJournal, false},
		"claim is prepared again while it is attached": {func(t *testing.T, c *card) {
			claimed := journal.Attachment{
				Function: vf, State: journal.Reserved,
				Interface: function.Interface{Name: "claimed"},
				Claim:     journal.Claim{Name: "c", UID: "claim-1"},
				Pod:       journal.Pod{Namespace: "default", Name: "pod-c1", UID: "uid-c1"},
			}
			must.Succeed(t, c.Put(claimed))
			c.prepare = func() { must.Succeed(t, c.Put(claimed)) }
		}, addVF("c1", nil), types.ErrTryAgainLater, false},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c, s := newCard(t)
			if test.waits {
				s.AddTimeout = 50 * time.Millisecond
			}
			test.arrange(t, c)
			checkCode(t, s.handle(t.Context(), test.request, nil), test.code)
		})
	}
}

func TestOver(t *testing.T) {
	t.Parallel()
	base := &function.VFConfig{
		VLAN: new(1), QoS: new(2), Proto: "802.1ad", Trust: new(true), MaxTxRate: new(10),
	}

	more := &function.VFConfig{
		VLAN: new(5), Trust: new(false), SpoofCheck: new(true), MinTxRate: new(3),
		LinkState: "auto",
	}

	want := &function.VFConfig{
		VLAN: new(5), Trust: new(false), SpoofCheck: new(true), MinTxRate: new(3),
		MaxTxRate: new(10), LinkState: "auto",
	}
	if diff := cmp.Diff(want, mergeVF(base, more)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if mergeVF(base, nil) != base || mergeVF(nil, more) != more || mergeVF(nil, nil) != nil {
		t.Error("one of them alone")
	}
}

// A refusal uses the field names of the network configuration.
func TestRefusalIsAsWritten(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	c.attachErr = errors.New("vf.vlan, vf.qos, vf.vlanProtocol: PF ens1f0 refuses VLAN 100 qos 3 " +
		"proto 802.1ad for VF 1")
	reply := s.handle(t.Context(), addVF("c1", map[string]any{"vlan": 100}), nil)
	checkCode(t, reply, CodeAttach)
	if want := "vlan, vlanQoS, vlanProto: PF ens1f0 refuses VLAN 100 qos 3 proto " +
		"802.1ad"; !strings.Contains(reply.Error.Msg, want) {
		t.Errorf("message %q, want %q in it", reply.Error.Msg, want)
	}
}
