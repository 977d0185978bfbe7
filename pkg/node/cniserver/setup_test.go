// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// withSetup is a node with one pool, which has one Function.
type withSetup struct {
	pool  pool.Pool
	known bool
}

func (o withSetup) Pools() ([]pool.Pool, bool) { return []pool.Pool{o.pool}, o.known }

func (o withSetup) Considered(function.ID) bool { return true }

func (o withSetup) PoolOf(id function.ID) (pool.Pool, bool) {
	return o.pool, id == o.pool.Functions[0].ID
}

func (o withSetup) Get(function.ID) (function.Function, bool) { return function.Function{}, false }

// TestReservationHasSetup: the reservation of an ADD has the setup of the Function, like the
// reservation of an Allocate.
func TestReservationHasSetup(t *testing.T) {
	t.Parallel()
	sf := function.PotentialSF(function.Function{ID: function.ID{Address: "0000:3b:00.0"}}, 5)
	making := v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, SFs: &v1alpha1.SFSpec{FirstNumber: 1, Count: 8},
	}
	binding := v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, Driver: v1alpha1.DriverVFIO,
	}
	allocated := &journal.Setup{SF: true, MAC: "02:00:00:00:00:bb"}
	bound := &journal.Setup{Driver: "vfio-pci", Own: "iavf"}
	for name, test := range map[string]struct {
		spec      v1alpha1.DevicePoolSpec
		function  function.Function
		mac       function.MAC // of the configuration
		have      journal.Attachment
		want      *journal.Setup
		userspace bool
	}{
		"SF": {spec: making, function: sf,
			want: &journal.Setup{SF: true, MAC: "02:00:00:00:00:aa"}},
		"SF whose MAC is asked for": {spec: making, function: sf, mac: "02:00:00:00:00:cc",
			want: &journal.Setup{SF: true, MAC: "02:00:00:00:00:cc"}},
		"SF that was allocated": {spec: making, function: sf, mac: "02:00:00:00:00:cc",
			have: journal.Attachment{Resource: "r", Setup: allocated}, want: allocated},
		"SF of a claim": {spec: making, function: sf,
			have: journal.Attachment{Claim: journal.Claim{UID: "u"}, Setup: allocated},
			want: allocated},
		"VF for a program": {spec: binding,
			function: function.Function{ID: vf, Kind: function.VF, Driver: "iavf", Netdev: "eth1"},
			want:     &journal.Setup{Driver: "vfio-pci"}, userspace: true},
		"VF for a program of a claim": {spec: v1alpha1.DevicePoolSpec{},
			function: function.Function{ID: vf, Kind: function.VF, Driver: "vfio-pci"},
			have:     journal.Attachment{Claim: journal.Claim{UID: "u"}, Setup: bound}, want: bound,
			userspace: true},
		"VF": {spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDevicePlugin},
			function: function.Function{ID: vf, Kind: function.VF, Driver: "iavf", Netdev: "eth1"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &Server{
				Pools: withSetup{
					pool.Pool{Name: "fast", Spec: test.spec,
						Functions: []function.Function{test.function}}, true,
				},
				PortID: func(function.ID) string { return "" },
				MAC:    func(function.ID) function.MAC { return "02:00:00:00:00:aa" },
			}

			a := cniRequest{device: test.function.ID, mac: test.mac, function: test.function}
			a.ContainerID, a.IfName = "c1", "net1"
			got, err := s.reservation(a, test.have)
			must.Succeed(t, err)
			if diff := cmp.Diff(test.want, got.Setup); diff != "" {
				t.Errorf("setup (-want +got):\n%s", diff)
			}
			if got.Interface.Userspace != test.userspace {
				t.Errorf("interface %+v, want userspace %t", got.Interface, test.userspace)
			}
		})
	}
}

// TestAddBeforePoolsAreKnown: the Function may be an SF that is still to be made, which only the
// pools can say.
func TestAddBeforePoolsAreKnown(t *testing.T) {
	t.Parallel()
	_, s := newCard(t)
	none := withSetup{pool.Pool{Functions: []function.Function{{}}}, false}
	s.Function, s.Pools = none.Get, none
	checkCode(t, s.handle(t.Context(), addVF("c1", nil), nil), types.ErrTryAgainLater)
	none.known = true
	s.Pools = none
	checkCode(t, s.handle(t.Context(), addVF("c1", nil), nil), CodeNoFunction)
}

// TestDriverOfTheLastOwner: the driver that was bound for the last owner does not matter to the
// next owner.
func TestDriverOfTheLastOwner(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	c.function.Driver = "vfio-pci"
	must.Succeed(t, c.Put(journal.Attachment{
		Function: vf, State: journal.Releasing, Claim: journal.Claim{UID: "u"},
		Setup: &journal.Setup{Driver: "vfio-pci", Own: "iavf"},
	}))

	c.options.Setup = hostile{undo: func() {
		c.function.Driver, c.function.Netdev = "iavf", "eth1"
	}}
	s.Lifecycle = c.lifecycle()
	checkCode(t, s.handle(t.Context(), addVF("c1", map[string]any{"mtu": 1400}), nil), 0)
	if want := (function.Interface{Name: "net1", MTU: 1400}); !cmp.Equal(c.attached, want) {
		t.Errorf("attached %+v, want %+v", c.attached, want)
	}
}

// hostile is a runner whose driver cannot be bound.
type hostile struct{ undo func() }

func (hostile) Plan(_ context.Context, want journal.Attachment) (*journal.Setup, error) {
	return want.Setup, nil
}

func (hostile) SetUp(context.Context, journal.Attachment) error {
	return errors.New("bind driver vfio-pci: no such device")
}

func (h hostile) TearDown(context.Context, journal.Attachment) error {
	h.undo()
	return nil
}

// TestSetupFails: a failed setup does not get the code of the journal.
func TestSetupFails(t *testing.T) {
	t.Parallel()
	c, s := newCard(t)
	c.options.Setup = hostile{}
	s.Lifecycle = c.lifecycle()
	s.Pools = withSetup{pool.Pool{Name: "fast", Functions: []function.Function{c.function},
		Spec: v1alpha1.DevicePoolSpec{
			Publish: v1alpha1.PublishDevicePlugin, Driver: v1alpha1.DriverVFIO,
		}}, true}

	reply := s.handle(t.Context(), addVF("c1", nil), nil)
	checkCode(t, reply, CodeAttach)

	if want := "Function 0000:3b:02.1: bind driver vfio-pci: no such device"; !strings.Contains(
		reply.Error.Msg, want,
	) {
		t.Errorf("message %q, want %q", reply.Error.Msg, want)
	}
}
