// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/nftables"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// gateways makes and deletes VRFs and SVIs. The methods of a nil *gateways do nothing.
type gateways struct {
	*soak
	vrfs evpn.VrfServiceClient
	svis evpn.SviServiceClient
}

func newGateways(s *soak, conn *grpc.ClientConn) *gateways {
	return &gateways{s, evpn.NewVrfServiceClient(conn), evpn.NewSviServiceClient(conn)}
}

func vrfID(n int) string { return fmt.Sprintf("vrf-%d", n) }
func sviID(n int) string { return fmt.Sprintf("svi-%d", n) }

// loopback returns the address of each VRF, 203.0.113.1.
func loopback() *netcommon.IPAddress_V4Addr {
	return &netcommon.IPAddress_V4Addr{V4Addr: 203<<24 | 113<<8 | 1}
}

// create makes the VRF and the SVI with a number once. Their status does not count.
func (g *gateways) create(ctx context.Context, n int, network string) error {
	address := &netcommon.IPAddress_V4Addr{V4Addr: 10<<24 | uint32(n)<<16 | 1}
	_, err := g.vrfs.CreateVrf(ctx, &evpn.CreateVrfRequest{
		VrfId: vrfID(n), Vrf: &evpn.Vrf{Spec: &evpn.VrfSpec{
			LoopbackIpPrefix: &netcommon.IPPrefix{
				Len: 32, Addr: &netcommon.IPAddress{V4OrV6: loopback()},
			},
		}},
	})
	if err != nil {
		return err
	}

	_, err = g.svis.CreateSvi(ctx, &evpn.CreateSviRequest{
		SviId: sviID(n), Svi: &evpn.Svi{Spec: &evpn.SviSpec{
			Vrf: "vrfs/" + vrfID(n), LogicalBridge: "logicalBridges/" + network,
			MacAddress: []byte{2, 0, 0, 0, 0xff, 1},
			GwIpPrefix: []*netcommon.IPPrefix{{
				Len: 24, Addr: &netcommon.IPAddress{V4OrV6: address},
			}},
		}},
	})

	return err
}

// ensure makes the VRF and the SVI with a number until the SVI is up.
func (g *gateways) ensure(n int, network string) error {
	if g == nil {
		return nil
	}
	return g.eventually("SVI "+sviID(n), func(ctx context.Context) error {
		if err := g.create(ctx, n, network); err != nil {
			return err
		}
		got, err := g.svis.GetSvi(ctx, &evpn.GetSviRequest{Name: "svis/" + sviID(n)})
		if err == nil && got.GetStatus().GetOperStatus() !=
			evpn.SVIOperStatus_SVI_OPER_STATUS_UP {
			err = fmt.Errorf("it is %v", got.GetStatus())
		}
		return err
	})
}

// remove deletes the SVI and the VRF with a number once.
func (g *gateways) remove(ctx context.Context, n int) error {
	_, err := g.svis.DeleteSvi(ctx,
		&evpn.DeleteSviRequest{Name: "svis/" + sviID(n), AllowMissing: true})
	if err != nil {
		return err
	}
	_, err = g.vrfs.DeleteVrf(ctx,
		&evpn.DeleteVrfRequest{Name: "vrfs/" + vrfID(n), AllowMissing: true})
	return err
}

// delete deletes the SVI and the VRF with a number.
func (g *gateways) delete(n int) error {
	if g == nil {
		return nil
	}
	return g.eventually("delete "+sviID(n), func(ctx context.Context) error {
		return g.remove(ctx, n)
	})
}

// checkNothingLeft checks that no route, filter or address of a gateway is left.
func (g *gateways) checkNothingLeft() {
	if g == nil {
		return
	}
	g.Helper()

	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := g.xpu.Handle().RouteListFiltered(family,
			&netlink.Route{Type: unix.RTN_UNREACHABLE},
			netlink.RT_FILTER_TYPE|netlink.RT_FILTER_TABLE)
		must.Succeed(g, err)
		if len(routes) > 0 {
			g.Errorf("routes are left: %v", routes)
		}
	}

	links, err := g.xpu.Handle().LinkList()
	must.Succeed(g, err)
	for _, link := range links {
		if link.Type() == "vrf" || link.Type() == "vlan" ||
			link.Attrs().HardwareAddr.String() == "02:00:00:00:ff:01" {
			g.Errorf("netdev %s is left, or its MAC address", link.Attrs().Name)
		}
		addresses, err := g.xpu.Handle().AddrList(link, netlink.FAMILY_V4)
		must.Succeed(g, err)
		if link.Type() == "bridge" && len(addresses) > 0 {
			g.Errorf("addresses are left: %v", addresses)
		}
	}

	must.Succeed(g, g.xpu.Do(func() error {
		nft, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := nft.ListTablesOfFamily(nftables.TableFamilyINet)
		if len(tables) > 0 {
			g.Errorf("table %s is left", tables[0].Name)
		}
		return err
	}))
}

// TestKilledGateways kills opi-bridge at many moments while it makes or deletes a gateway. The next
// opi-bridge must go on, and nothing may be left in the end.
func TestKilledGateways(t *testing.T) {
	netns.Need(t, netns.VRFs())

	s := newSoak(t)
	running, err := s.start()
	must.Succeed(t, err)
	network := opi.Network{ID: "net-blue", VLAN: 10}
	must.Succeed(t, s.ensureNetwork(network))

	// killAfter kills opi-bridge some time after a call begins, and starts it again. It reports
	// whether the call ended before.
	killAfter := func(wait time.Duration, call func(context.Context) error) (ended bool) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- call(ctx) }()
		loop.Sleep(ctx, wait)
		must.Succeed(t, running.Process.Kill())
		_ = running.Wait() // it was killed
		cancel()
		ended = <-done == nil

		running, err = s.start()
		must.Succeed(t, err)
		must.Succeed(t, s.eventually("alive", s.agent.Alive))

		return ended
	}

	const step = 3 * time.Millisecond
	for _, call := range []struct {
		what          string
		prepare, kill func(context.Context) error
	}{
		{"making", func(context.Context) error { return s.gateways.delete(1) },
			func(ctx context.Context) error { return s.gateways.create(ctx, 1, network.ID) }},
		{"deleting", func(context.Context) error { return s.gateways.ensure(1, network.ID) },
			func(ctx context.Context) error { return s.gateways.remove(ctx, 1) }},
	} {
		kills := 0
		for wait := time.Duration(0); wait < 100*step; wait += step {
			must.Succeed(t, call.prepare(t.Context()))
			kills++
			if killAfter(wait, call.kill) && wait > 10*step {
				break
			}

			must.Succeed(t, s.gateways.ensure(1, network.ID))
			must.Succeed(t, s.gateways.delete(1))
			s.gateways.checkNothingLeft()
			if t.Failed() {
				t.Fatalf("killed after %s of %s", wait, call.what)
			}
		}
		t.Logf("killed %d times while %s", kills, call.what)
	}

	must.Succeed(t, running.Process.Kill())
}
