// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
)

// VRF is a routing domain of an xPU: the gateways in it route between their networks. OPI calls it
// a Vrf.
type VRF struct {
	ID string // 4-63 characters of a-z, 0-9, '-'; see [Installation.VRFID]
	// Loopback is the VRF's own address, which OPI's API requires.
	Loopback netip.Addr
}

// VRFStatus is a VRF as reported by the agent.
type VRFStatus struct {
	VRF
	VNI uint32 // of routes between xPUs (EVPN type 5), which this package does not ask for; 0: none
	Status
}

// Gateway is the router of a network on the xPU. OPI calls it an Svi.
type Gateway struct {
	VRF string           // id of the VRF
	MAC net.HardwareAddr // 6 bytes, unicast, not zero
	// Prefixes are the addresses of the gateway with the lengths of their subnets.
	Prefixes []netip.Prefix
}

// GatewayStatus is a gateway as reported by the agent.
type GatewayStatus struct {
	ID      string // see [GatewayID]
	Network string // id
	Gateway
	Status
}

// MaxPrefixes is how many addresses a gateway has at most.
const MaxPrefixes = 16

// loopback is the address of each VRF: the IPv4 dummy address. It belongs to no machine, and nobody
// sends to it (RFC 7600, section 4.8; IANA IPv4 Special-Purpose Address Registry).
var loopback = netip.AddrFrom4([4]byte{192, 0, 0, 8})

// VRFID returns the id of a VRF of the installation.
func (i Installation) VRFID(name string) string {
	// No name of a network contains a slash, so no network has the same digest.
	return string(i) + "-" + digest("vrf/"+name)
}

// GatewayMAC returns the MAC address of all gateways of the installation. It is the same on each
// xPU, so that a frame to the gateway ends at the xPU of its sender. It is the same for all
// networks, because a bridge with VLANs receives the frames of all of them if its gateways have
// different addresses. It is a locally administered unicast address (IEEE 802c, AAI), and its first
// byte differs from addresses that are derived for Functions.
func (i Installation) GatewayMAC() net.HardwareAddr {
	sum := sha256.Sum256([]byte(string(i) + "/gateway"))
	return append(net.HardwareAddr{0x12}, sum[:5]...)
}

// GatewayID returns the id of the gateway of the network with this id.
func GatewayID(network string) string { return network + gatewaySuffix }

const gatewaySuffix = "-gw"

// Equal reports whether two gateways are the same. The order of the addresses does not matter.
func (g Gateway) Equal(h Gateway) bool {
	return g.VRF == h.VRF && bytes.Equal(g.MAC, h.MAC) &&
		slices.Equal(sortedPrefixes(g.Prefixes), sortedPrefixes(h.Prefixes))
}

func sortedPrefixes(some []netip.Prefix) []netip.Prefix {
	return slices.SortedFunc(slices.Values(some), func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
}

// describe returns the gateway in words.
func (g Gateway) describe() string {
	return fmt.Sprintf("VRF %s, MAC address %s and addresses %v", g.VRF, g.MAC,
		sortedPrefixes(g.Prefixes))
}

// hasIPv6 reports whether one of the addresses is an IPv6 address.
func (g Gateway) hasIPv6() bool {
	return slices.ContainsFunc(g.Prefixes, func(p netip.Prefix) bool { return p.Addr().Is6() })
}

// check returns what is wrong with the gateway of a network.
func (g Gateway) check(op, network string, owner Installation) error {
	const field = "Gateway"
	switch {
	case checkID(op, GatewayID(network)) != nil:
		return invalid(op, network, "ID", "is too long for a network with a gateway")
	case checkID(op, g.VRF) != nil || !owner.Owns(g.VRF):
		return invalid(op, network, field, "VRF %q must be an id that begins with %s-, the mark "+
			"of the installation", g.VRF, owner)
	case len(g.MAC) != 6 || g.MAC[0]&1 != 0 || bytes.Equal(g.MAC, make([]byte, 6)):
		return invalid(op, network, field, "MAC address %q is no unicast address of 6 bytes", g.MAC)
	case len(g.Prefixes) < 1 || len(g.Prefixes) > MaxPrefixes:
		return invalid(op, network, field, "has %d addresses, want 1-%d", len(g.Prefixes),
			MaxPrefixes)
	}

	for _, p := range g.Prefixes {
		if !p.IsValid() || p.IsSingleIP() || p.Addr().Is4In6() {
			return invalid(op, network, field, "%s is no address with the length of a subnet", p)
		}
	}

	return nil
}

// Gateways are calls of agents with [Traits.Gateways]. An agent of such a dialect that has none
// returns an error that [Agent.Kind] classifies as [ErrUnsupported]. Otherwise the calls are like
// those for ports and networks. Gateways have the ids of [GatewayID].
type Gateways interface {
	VRF(ctx context.Context, id string) (VRFStatus, error)
	VRFs(ctx context.Context) ([]VRFStatus, error)
	CreateVRF(ctx context.Context, v VRF) error
	// DeleteVRF requests the deletion of a VRF. The error is [ErrInUse] if gateways use it.
	DeleteVRF(ctx context.Context, id string) error

	Gateway(ctx context.Context, id string) (GatewayStatus, error)
	// Gateways returns all gateways in the agent's order, including other clients'.
	Gateways(ctx context.Context) ([]GatewayStatus, error)
	// CreateGateway requests the gateway of a network. The error is [ErrNetworkMissing] if the
	// network or the VRF does not exist.
	CreateGateway(ctx context.Context, network string, g Gateway) error
	DeleteGateway(ctx context.Context, id string) error
}

// vrfUses protects VRFs from deletion while gateways are made in them. The zero value is ready for
// use. Safe for concurrent use.
type vrfUses struct {
	mu sync.Mutex
	// uses is the number of gateways that are being made, by VRF; -1 while the VRF is deleted.
	uses map[string]int
}

// begin reports whether a gateway may be made in the VRF. If so, end must be called.
func (u *vrfUses) begin(vrf string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.uses == nil {
		u.uses = map[string]int{}
	}
	if u.uses[vrf] < 0 {
		return false
	}
	u.uses[vrf]++
	return true
}

func (u *vrfUses) end(vrf string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.uses[vrf]--; u.uses[vrf] == 0 {
		delete(u.uses, vrf)
	}
}

// beginDeletion reports whether the VRF may be deleted. If so, endDeletion must be called.
func (u *vrfUses) beginDeletion(vrf string) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.uses == nil {
		u.uses = map[string]int{}
	}
	if u.uses[vrf] != 0 {
		return false
	}
	u.uses[vrf] = -1
	return true
}

func (u *vrfUses) endDeletion(vrf string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.uses, vrf)
}

// ensureRouted is [Client.EnsureNetwork] for a network with a gateway: it makes the VRF, the
// network and the gateway, in this order.
func (c *Client) ensureRouted(ctx context.Context, op string, n Network) error {
	if err := n.Gateway.check(op, n.ID, c.installation); err != nil {
		return err
	}
	if !c.traits.Gateways {
		return &Error{
			Kind: ErrUnsupported, Op: op, ID: n.ID, Detail: "agents of this dialect make no " +
				"gateways, which spec.routed of the network asks for",
		}
	}

	vrf := n.Gateway.VRF
	err := await(ctx, op, n.ID, func(context.Context) (bool, string, error) {
		return c.vrfUses.begin(vrf), "its VRF is being deleted", nil
	})
	if err != nil {
		return err
	}
	defer c.vrfUses.end(vrf)

	if err := c.ensureVRF(ctx, VRF{ID: vrf, Loopback: loopback}); err != nil {
		return err
	}
	if err := c.ensureBridge(ctx, op, n); err != nil {
		return err
	}

	return c.ensureGateway(ctx, n)
}

func (c *Client) ensureVRF(ctx context.Context, v VRF) error {
	return c.ensure(ctx, "ensure VRF", declared{
		objectKind: c.vrfs, id: v.ID,
		look: func(ctx context.Context) (Status, string, error) {
			got, err := c.agent.VRF(ctx, v.ID)
			switch {
			case err != nil:
				return Status{}, "", err
			case got.Loopback != v.Loopback:
				return got.Status, fmt.Sprintf("the agent has it with loopback %s, not %s",
					got.Loopback, v.Loopback), nil
			case got.VNI != 0:
				return got.Status, fmt.Sprintf("the agent has it with VNI %d, not without",
					got.VNI), nil
			}
			return got.Status, "", nil
		},
		create: func(ctx context.Context) error { return c.agent.CreateVRF(ctx, v) },
	})
}

// ensureGateway makes the gateway of a network that exists. A gateway that differs is deleted and
// created anew, because agents cannot change every field of a gateway that exists.
func (c *Client) ensureGateway(ctx context.Context, n Network) error {
	const op = "ensure gateway"
	id, want := GatewayID(n.ID), *n.Gateway
	if want.hasIPv6() && !c.hasOptions.Load() {
		return c.refuseIPv6(op, id)
	}

	return c.ensure(ctx, op, declared{
		objectKind: c.gateways, id: id, replace: true,
		look: func(ctx context.Context) (Status, string, error) {
			got, err := c.agent.Gateway(ctx, id)
			if err == nil && (got.Network != n.ID || !got.Gateway.Equal(want)) {
				return got.Status, fmt.Sprintf("the agent has it in network %s with %s, not in %s "+
					"with %s", got.Network, got.Gateway.describe(), n.ID, want.describe()), nil
			}
			return got.Status, "", err
		},
		create: func(ctx context.Context) error { return c.agent.CreateGateway(ctx, n.ID, want) },
	})
}

// refuseIPv6 is the error for a gateway with an IPv6 address at an agent that is not known to take
// one. Such a gateway ends the process of opi-evpn-bridge. Only agents with [Options] are known to
// be another one.
func (c *Client) refuseIPv6(op, id string) error {
	if !c.noOptions.Load() { // the connection has changed since the network was ensured
		return &Error{
			Kind: ErrUnavailable, Op: op, ID: id,
			Detail: "it is not known yet whether the agent takes a gateway with an IPv6 address",
		}
	}
	return &Error{
		Kind: ErrUnsupported, Op: op, ID: id, Detail: "the agent is not known to take a gateway " +
			"with an IPv6 address: it does not have the service opi_bridge.v1alpha1." +
			"OptionsService, and opi-evpn-bridge ends at such a gateway; use IPv4 subnets only",
	}
}

// declared is an object that the agent has exactly as wanted, or not at all: a VRF or a gateway.
type declared struct {
	objectKind
	id string
	// look returns the object's status and how it differs from the wanted one, "" if not at all.
	look   func(ctx context.Context) (s Status, difference string, err error)
	create func(ctx context.Context) error
	// replace makes ensure delete an object that differs and create it anew. Without replace,
	// ensure returns an [ErrConflict].
	replace bool
}

// ensure returns nil once the agent reports that the object is up and as wanted.
func (c *Client) ensure(ctx context.Context, op string, d declared) error {
	o := d.object(d.id)
	var failedSince time.Time // since when the object has been failed
	creations := 0

	return await(ctx, op, d.id, func(ctx context.Context) (done bool, progress string, err error) {
		if progress, err := c.waitForChange(ctx, op, o); err != nil {
			return false, progress, err
		}

		got, difference, err := d.look(ctx)
		err = c.failure(ctx, op, d.id, err)
		missing := errors.Is(err, ErrNotFound)
		if err != nil && !missing {
			return false, "", err
		}

		c.changes.observe(o, !missing && got.State != StateDeleting)
		progress = got.describe(d.noun)
		switch {
		case missing && creations == maxCreations:
			return false, "", &Error{
				Kind: ErrConflict, Op: op, ID: d.id,
				Detail: fmt.Sprintf("somebody else deletes it: it was made %d times", creations),
			}
		case missing:
			creations++
			err := c.change(ctx, o, creation, d.create)
			return false, "created, not up yet", c.verifyCreated(ctx, d.objectKind, op, d.id, err)
		case got.State == StateDeleting:
			return false, progress, nil
		case difference != "" && d.replace:
			return false, progress, c.delete(ctx, d.objectKind, op, d.id)
		case difference != "":
			return false, progress, &Error{Kind: ErrConflict, Op: op, ID: d.id, Detail: difference}
		case got.State == StateFailed:
			failedSince = cmp.Or(failedSince, time.Now())
			return false, progress, c.failedFor(failedSince, op, d.id, got)
		}

		failedSince = time.Time{}
		if doubt := c.changes.doubt(o, deletion); doubt != "" {
			return false, doubt, nil
		}

		return got.State == StateUp, progress, nil
	})
}

// deleteGatewayOf deletes the gateway of a network, if it has one. A network with ports keeps its
// gateway, and the error is [ErrInUse].
func (c *Client) deleteGatewayOf(ctx context.Context, op, network string) error {
	if !c.traits.Gateways {
		return nil
	}

	id := GatewayID(network)
	if checkID(op, id) != nil {
		return nil // no network with such a long id has a gateway
	}

	_, err := c.agent.Gateway(ctx, id)
	denied := isForbidden(err)
	switch err := c.failure(ctx, op, network, err); {
	// The agent makes no gateways, or makes none for this client. A gateway of somebody else keeps
	// the network.
	case errors.Is(err, ErrUnsupported), denied:
		return nil
	case errors.Is(err, ErrNotFound):
		// A lost call may still create it.
		return c.delete(ctx, c.gateways, op, id)
	case err != nil:
		return err
	}

	ports, err := c.agent.Ports(ctx)
	if err := c.failure(ctx, op, network, err); err != nil && !errors.Is(err, ErrUnsupported) {
		return err
	}
	for _, p := range ports {
		if slices.Contains(p.Networks, network) {
			return &Error{Kind: ErrInUse, Op: op, ID: network, Detail: "port " + p.ID + " is in it"}
		}
	}

	return c.delete(ctx, c.gateways, op, id)
}

// deleteUnusedVRFs deletes the VRFs of the installation without gateways. A VRF in which a gateway
// is being made stays. An agent that refuses to tell or to delete them keeps them, which the log of
// the context says: it would never do more for this client.
func (c *Client) deleteUnusedVRFs(ctx context.Context) error {
	if !c.traits.Gateways {
		return nil
	}

	vrfs, gateways, err := c.listGateways(ctx)
	if isForbidden(err) {
		logr.FromContextOrDiscard(ctx).Info("VRFs of this cluster may be left at the OPI agent, "+
			"because it does not list VRFs and gateways for this client; delete at the agent those "+
			"that begin with the mark of the installation", "mark", string(c.installation)+"-",
			"error", err.Error())
		return nil
	}
	if err != nil || !slices.ContainsFunc(vrfs, func(v VRFStatus) bool {
		return c.installation.Owns(v.ID)
	}) {
		return err
	}

	used := map[string]bool{}
	for _, g := range gateways {
		if g.State == StateUnknown {
			return nil // it may be in any of them
		}
		used[g.VRF] = true
	}

	for _, v := range vrfs {
		if !c.installation.Owns(v.ID) || used[v.ID] {
			continue
		}
		switch err := c.DeleteVRF(ctx, v.ID); {
		case isForbidden(err), errors.Is(err, ErrUnsupported):
			logr.FromContextOrDiscard(ctx).Info("a VRF of this cluster is left at the OPI agent, "+
				"because it does not delete VRFs for this client; delete it at the agent", "vrf", v.ID,
				"error", err.Error())
		case err != nil && !errors.Is(err, ErrInUse):
			return err
		}
	}

	return nil
}

// DeleteVRF returns nil once the agent reports that the VRF does not exist. The error is [ErrInUse]
// while gateways use it.
func (c *Client) DeleteVRF(ctx context.Context, id string) error {
	const op = "delete VRF"
	if !c.vrfUses.beginDeletion(id) {
		return &Error{Kind: ErrInUse, Op: op, ID: id, Detail: "a gateway is being made in it"}
	}
	defer c.vrfUses.endDeletion(id)
	return c.delete(ctx, c.vrfs, op, id)
}

// DeleteGateway returns nil once the agent reports that the gateway does not exist. The network
// stays.
func (c *Client) DeleteGateway(ctx context.Context, id string) error {
	return c.delete(ctx, c.gateways, "delete gateway", id)
}

// ListGateways returns all VRFs and gateways of the agent, including other clients'. An agent that
// makes none has none. One about which the list reports too little has [StateUnknown].
func (c *Client) ListGateways(
	ctx context.Context,
) (vrfs []VRFStatus, gateways []GatewayStatus, err error) {
	if !c.traits.Gateways {
		return nil, nil, nil
	}
	return c.listGateways(ctx)
}

func (c *Client) listGateways(
	ctx context.Context,
) (vrfs []VRFStatus, gateways []GatewayStatus, err error) {
	// VRFs are listed first, so that the gateway of a listed VRF is in the second list.
	if vrfs, err = c.agent.VRFs(ctx); err == nil {
		gateways, err = c.agent.Gateways(ctx)
	}
	err = c.failure(ctx, "list gateways", "", err)
	if e, ok := errors.AsType[*Error](err); ok && errors.Is(err, ErrUnsupported) && e.Err != nil {
		return nil, nil, nil // the agent makes no gateways
	}
	return vrfs, gateways, err
}

// Routing finds gateways in what an agent lists.
type Routing struct {
	up       map[string]bool // whether a VRF is up, by id
	gateways map[string]GatewayStatus
}

// NewRouting returns the Routing of these VRFs and gateways.
func NewRouting(vrfs []VRFStatus, gateways []GatewayStatus) Routing {
	r := Routing{up: map[string]bool{}, gateways: map[string]GatewayStatus{}}
	for _, v := range vrfs {
		r.up[v.ID] = v.State == StateUp
	}
	for _, g := range gateways {
		r.gateways[g.ID] = g
	}
	return r
}

// Serves reports whether the network's gateway is up as wanted, and its VRF.
func (r Routing) Serves(network string, want Gateway) bool {
	g, listed := r.gateways[GatewayID(network)]
	return listed && g.State == StateUp && g.Network == network && g.Gateway.Equal(want) &&
		r.up[want.VRF]
}
