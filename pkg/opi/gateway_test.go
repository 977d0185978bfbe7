// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// routed returns the network net-blue with a gateway in a VRF.
func routed(vrf string, prefixes ...string) opi.Network {
	n := blue
	n.Gateway = &opi.Gateway{VRF: vrf, MAC: net.HardwareAddr{0x12, 0, 0, 0, 0, 1}}
	for _, p := range prefixes {
		n.Gateway.Prefixes = append(n.Gateway.Prefixes, netip.MustParsePrefix(p))
	}
	return n
}

// likeOPIBridge starts an agent like opi-bridge, and a client.
func likeOPIBridge(t *testing.T) (*opitest.Agent, *opi.Client) {
	t.Helper()
	a := opitest.Start(t)
	a.Set(func(b *opitest.Behaviour) { b.Options = true })
	return a, dial(t, a.Config())
}

// TestGatewayIDs checks that ids and MAC addresses depend only on installation and name, are valid,
// and differ from the ids and MAC addresses of other objects.
func TestGatewayIDs(t *testing.T) {
	one, two := opi.NewInstallation("one"), opi.NewInstallation("two")
	ids := map[string]string{}
	for _, id := range []string{
		one.NetworkID("blue"), one.VRFID("blue"), opi.GatewayID(one.NetworkID("blue")),
		one.NetworkID("red"), one.VRFID("red"), opi.GatewayID(one.NetworkID("red")),
		two.NetworkID("blue"), two.VRFID("blue"), opi.GatewayID(two.NetworkID("blue")),
	} {
		if other, is := ids[id]; is {
			t.Errorf("id %q twice: %q", id, other)
		}
		ids[id] = id
	}

	if !one.Owns(one.VRFID("blue")) || two.Owns(one.VRFID("blue")) {
		t.Error("the id of a VRF does not show its installation")
	}
	if one.VRFID("blue") != opi.NewInstallation("one").VRFID("blue") {
		t.Error("the id of a VRF changes")
	}

	mac, other := one.GatewayMAC(), two.GatewayMAC()
	if len(mac) != 6 || mac[0]&3 != 2 || mac.String() == other.String() ||
		mac.String() != one.GatewayMAC().String() {
		t.Errorf("MAC addresses %s and %s", mac, other)
	}
	derived := claim.DerivedMAC("uid", "node", function.ID{Address: "0000:03:00.2"})
	if derived.HardwareAddr()[0] == mac[0] {
		t.Errorf("MAC address %s of gateways may be derived for a Function too", mac)
	}
}

// TestGatewayArguments: what can never work is refused before anything is sent.
func TestGatewayArguments(t *testing.T) {
	a, c := likeOPIBridge(t)
	many := routed("net-vrf")
	for i := range byte(opi.MaxPrefixes + 1) {
		many.Gateway.Prefixes = append(many.Gateway.Prefixes,
			netip.PrefixFrom(netip.AddrFrom4([4]byte{10, i, 0, 1}), 24))
	}
	noMAC := routed("net-vrf", "10.1.0.1/24")
	noMAC.Gateway.MAC = nil

	for problem, n := range map[string]opi.Network{
		"the mark of the installation":  routed("other-vrf", "10.1.0.1/24"),
		`VRF ""`:                        routed("", "10.1.0.1/24"),
		"has 0 addresses":               routed("net-vrf"),
		"has 17 addresses":              many,
		"with the length of a subnet":   routed("net-vrf", "10.1.0.1/32"),
		"no unicast address of 6 bytes": noMAC,
	} {
		err := c.EnsureNetwork(within(t, time.Second), n)
		if !errors.Is(err, opi.ErrInvalid) || !strings.Contains(err.Error(), problem) {
			t.Errorf("error %v, want an invalid one that says %q", err, problem)
		}
	}

	if a.Calls("GetVrf")+a.Calls("GetLogicalBridge") > 0 {
		t.Error("the agent was asked")
	}
}

// TestGatewayRefused: agents without gateways, and agents that would not survive one, get nothing
// that they cannot do.
func TestGatewayRefused(t *testing.T) {
	long := opi.NewInstallation("x").VRFID("blue")
	for name, test := range map[string]struct {
		dialect  string
		set      opitest.Behaviour
		network  opi.Network
		kind     error
		says     string
		networks int // left at the agent
	}{
		"by the dialect": {
			dialect: "intel-e2000", network: routed("net-vrf", "10.1.0.1/24"),
			kind: opi.ErrUnsupported, says: "agents of this dialect make no gateways",
		},
		"by an agent without the calls": {
			set:     opitest.Behaviour{Unimplemented: opitest.GatewayRPCs()},
			network: routed("net-vrf", "10.1.0.1/24"),
			kind:    opi.ErrUnsupported, says: "method GetVrf not implemented",
		},
		"IPv6 for opi-evpn-bridge": {
			network: routed("net-vrf", "10.1.0.1/24", "fd00::1/64"),
			kind:    opi.ErrUnsupported, says: "not known to take a gateway with an IPv6 address",
			networks: 1,
		},
		"a long VRF id for opi-evpn-bridge": {
			network: routed("net-"+long, "10.1.0.1/24"), kind: opi.ErrTimeout, says: "the VRF is pending",
		},
		"a VRF that says why": {
			set: opitest.Behaviour{Options: true, RealiseGateway: func(string) error {
				return errors.New("the kernel has no VRFs")
			}},
			network: routed("net-vrf", "10.1.0.1/24"),
			kind:    opi.ErrFailed, says: "the kernel has no VRFs",
		},
		"a gateway that says why": {
			set: opitest.Behaviour{Options: true, RealiseGateway: func(id string) error {
				if strings.HasSuffix(id, "-gw") {
					return errors.New("set net.ipv6.conf.all.forwarding")
				}
				return nil
			}},
			network: routed("net-vrf", "10.1.0.1/24"), networks: 1,
			kind: opi.ErrFailed, says: "set net.ipv6.conf.all.forwarding",
		},
		"a gateway whose addresses the agent does not tell": {
			set:     opitest.Behaviour{Options: true, Untold: true},
			network: routed("net-vrf", "10.1.0.1/24"), networks: 1,
			kind: opi.ErrUnknown, says: "does not tell its addresses",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := opitest.Start(t)
			a.Set(func(b *opitest.Behaviour) { *b = test.set })
			cfg := a.Config()
			var err error
			cfg.Dialect, err = dialects.Named(test.dialect)
			must.Succeed(t, err)
			c := dial(t, cfg)

			err = c.EnsureNetwork(within(t, time.Second), test.network)
			if !errors.Is(err, test.kind) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v, want %v that says %q", err, test.kind, test.says)
			}
			if got := a.Networks(); len(got) != test.networks {
				t.Errorf("networks %q at the agent, want %d", got, test.networks)
			}
			a.Set(func(b *opitest.Behaviour) { b.Untold = false })
			must.Succeed(t, c.DeleteNetwork(within(t, 5*time.Second), blue.ID))
			if len(a.Networks())+len(a.Gateways())+len(a.VRFs()) > 0 {
				t.Errorf("left: networks %q, gateways %q, VRFs %q", a.Networks(), a.Gateways(),
					a.VRFs())
			}
		})
	}
}

// TestGatewayFaults: a gateway comes and goes although calls fail without an answer.
func TestGatewayFaults(t *testing.T) {
	a, c := likeOPIBridge(t)
	want := routed("net-vrf", "10.1.0.1/24", "fd00::1/64")
	for range 2 {
		for _, rpc := range []string{"CreateVrf", "CreateSvi", "CreateLogicalBridge"} {
			a.DropNext(rpc, 1)
		}
		must.Succeed(t, c.EnsureNetwork(within(t, 10*time.Second), want))
		if len(a.Gateways()) != 1 || len(a.VRFs()) != 1 {
			t.Fatalf("gateways %q, VRFs %q", a.Gateways(), a.VRFs())
		}

		for _, rpc := range []string{"DeleteSvi", "DeleteLogicalBridge", "DeleteVrf"} {
			a.DropNext(rpc, 1)
		}
		must.Succeed(t, c.DeleteNetwork(within(t, 10*time.Second), want.ID))
		if len(a.Gateways())+len(a.VRFs())+len(a.Networks()) > 0 {
			t.Fatalf("left: gateways %q, VRFs %q", a.Gateways(), a.VRFs())
		}
	}
	if a.Overlaps() > 0 {
		t.Errorf("%d calls for an object that had another one", a.Overlaps())
	}
}

// TestGatewayDeletionContinues: what a client that died in a deletion has left is deleted by the
// next one.
func TestGatewayDeletionContinues(t *testing.T) {
	for _, rpc := range []string{"DeleteSvi", "DeleteLogicalBridge", "DeleteVrf"} {
		t.Run(rpc, func(t *testing.T) {
			a, c := likeOPIBridge(t)
			want := routed("net-vrf", "10.1.0.1/24")
			must.Succeed(t, c.EnsureNetwork(t.Context(), want))
			a.FailNext(rpc, 1, codes.Internal, "disk full")
			if err := c.DeleteNetwork(t.Context(), want.ID); err == nil ||
				!strings.Contains(err.Error(), "disk full") {
				t.Fatalf("error %v, want the agent's", err)
			}

			next := dial(t, a.Config())
			must.Succeed(t, next.DeleteNetwork(t.Context(), want.ID))
			if len(a.Gateways())+len(a.VRFs())+len(a.Networks()) > 0 {
				t.Errorf("left: gateways %q, VRFs %q", a.Gateways(), a.VRFs())
			}
		})
	}
}

// TestGatewayIsPutRight: a gateway that another client changed or deleted is made as wanted, and so
// is everything after the agent lost it.
func TestGatewayIsPutRight(t *testing.T) {
	a, c := likeOPIBridge(t)
	want := routed("net-vrf", "10.1.0.1/24")
	id := opi.GatewayID(want.ID)
	for name, damage := range map[string]func(){
		"nothing": func() {},
		"deleted": func() { a.LoseGateway(id) },
		"another address": func() {
			a.ChangeGateway(id, func(spec *evpn.SviSpec) { spec.GwIpPrefix[0].Len = 25 })
		},
		"another MAC address": func() {
			a.ChangeGateway(id, func(spec *evpn.SviSpec) { spec.MacAddress[5]++ })
		},
		"restarted": func() { a.Kill(); must.Succeed(t, a.Run()) },
	} {
		damage()
		must.EventuallySucceed(t, name, func() error { return c.EnsureNetwork(t.Context(), want) })
		vrfs, gateways, err := c.ListGateways(t.Context())
		must.Succeed(t, err)
		if !opi.NewRouting(vrfs, gateways).Serves(want.ID, *want.Gateway) {
			t.Errorf("%s: VRFs %+v, gateways %+v", name, vrfs, gateways)
		}
	}
}

// TestGatewayOfAnotherVRF: a VRF of ours with other properties is left as it is.
func TestGatewayOfAnotherVRF(t *testing.T) {
	a, c := likeOPIBridge(t)
	a.ChangeVRF("net-vrf", func(spec *evpn.VrfSpec) { spec.Vni = new(uint32(7)) })
	err := c.EnsureNetwork(t.Context(), routed("net-vrf", "10.1.0.1/24"))
	if !errors.Is(err, opi.ErrConflict) || !strings.Contains(err.Error(), "with VNI 7") {
		t.Errorf("error %v, want a conflict", err)
	}
	if len(a.Networks()) > 0 {
		t.Error("the network was made although its VRF is wrong")
	}
}

// TestGatewayNotForThisClient: a client that may see no gateways deletes its networks as before.
func TestGatewayNotForThisClient(t *testing.T) {
	a, c := likeOPIBridge(t)
	must.Succeed(t, c.EnsureNetwork(t.Context(), blue))
	a.FailNext("GetSvi", 1, codes.PermissionDenied, "no rule")
	must.Succeed(t, c.DeleteNetwork(t.Context(), blue.ID))
}

// TestVRFsNotForThisClient: an agent that refuses to list or to delete VRFs does not keep a network
// for ever. The VRF that may be left is named in the log. An agent that does not answer is asked
// again.
func TestVRFsNotForThisClient(t *testing.T) {
	for _, test := range []struct {
		rpc  string
		code codes.Code
		says string // in the log; "" for an error
	}{
		{"ListVrfs", codes.PermissionDenied, "VRFs of this cluster may be left"},
		{"ListSvis", codes.PermissionDenied, "VRFs of this cluster may be left"},
		{"DeleteVrf", codes.PermissionDenied, "net-vrf"},
		{"DeleteVrf", codes.Unimplemented, "net-vrf"},
		{"ListVrfs", codes.Unavailable, ""},
		{"ListVrfs", codes.DeadlineExceeded, ""},
		{"ListVrfs", codes.Unauthenticated, ""},
		{"DeleteVrf", codes.Internal, ""},
	} {
		t.Run(test.rpc+" "+test.code.String(), func(t *testing.T) {
			t.Parallel()
			a, c := likeOPIBridge(t)
			must.Succeed(t, c.EnsureNetwork(t.Context(), routed("net-vrf", "10.1.0.1/24")))
			a.FailNext(test.rpc, 1, test.code, "no")
			var log strings.Builder
			ctx := logr.NewContext(t.Context(), funcr.New(func(_, args string) {
				log.WriteString(args)
			}, funcr.Options{}))

			err := c.DeleteNetwork(ctx, blue.ID)
			if (err == nil) != (test.says != "") || !strings.Contains(log.String(), test.says) {
				t.Errorf("error %v and log %q, want %q", err, log.String(), test.says)
			}
			if err != nil && log.Len() > 0 {
				t.Errorf("log %q beside error %v", log.String(), err)
			}
			if len(a.Networks())+len(a.Gateways()) > 0 || len(a.VRFs()) != 1 {
				t.Errorf("left: networks %q, gateways %q, VRFs %q", a.Networks(), a.Gateways(),
					a.VRFs())
			}

			must.Succeed(t, c.DeleteNetwork(t.Context(), blue.ID))
			if len(a.VRFs()) > 0 {
				t.Errorf("VRFs %q are left after an agent answered", a.VRFs())
			}
		})
	}
}

// TestSessionGateways: a network whose gateway is not as wanted any more is ensured again.
func TestSessionGateways(t *testing.T) {
	a, _ := likeOPIBridge(t)
	s, r := open(t, a.Config(), time.Minute)
	r.waitFor(t, s, "answering", answers)
	want := routed("net-vrf", "10.1.0.1/24")
	must.Succeed(t, s.EnsureNetwork(t.Context(), want))
	must.Succeed(t, s.EnsureNetwork(t.Context(), want))
	if n := a.Calls("CreateSvi"); n != 1 {
		t.Errorf("%d calls of CreateSvi", n)
	}

	other := routed("net-vrf", "10.1.0.254/24")
	must.Succeed(t, s.EnsureNetwork(t.Context(), other))
	if got := a.GatewaySpec(opi.GatewayID(want.ID)).GetGwIpPrefix()[0].GetAddr().GetV4Addr(); got !=
		10<<24|1<<16|254 {
		t.Errorf("address %x after a change", got)
	}

	a.LoseGateway(opi.GatewayID(want.ID))
	_, _, err := s.ListGateways(t.Context())
	must.Succeed(t, err)
	must.Succeed(t, s.EnsureNetwork(t.Context(), other))
	if len(a.Gateways()) != 1 {
		t.Error("the gateway was not made again")
	}

	must.Succeed(t, s.DeleteGateway(t.Context(), opi.GatewayID(want.ID)))
	must.Succeed(t, s.DeleteVRF(t.Context(), "net-vrf"))
	must.Succeed(t, s.EnsureNetwork(t.Context(), other))
	if len(a.Gateways()) != 1 || len(a.VRFs()) != 1 {
		t.Error("the gateway was not made again after its deletion")
	}
}
