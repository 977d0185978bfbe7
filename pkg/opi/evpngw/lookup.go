// SPDX-License-Identifier: Apache-2.0

package evpngw

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// This file works around opi-evpn-bridge v0.2.0, which is part of OPI's release v0.1.0. Its Get of
// a port returns only the MAC address, or an error for a missing netdev. Its lists lack objects
// from before its last start. It accepts a MAC address that another port of the network has, and
// the deletion of a network with ports.

// lookup finds an agent's object by Get, and by List if Get returns too little.
type lookup[S any] struct {
	noun       string
	get        func(ctx context.Context, id string) (S, error)
	list       func(ctx context.Context) ([]S, error)
	id         func(S) string
	status     func(*S) *opi.Status
	consistent func(got, listed S) bool // whether List agrees with what Get returned
}

// find returns the object with the id. The error is [opi.ErrUnknown] if the agent has the object,
// or may have it, and neither Get nor List returns enough.
func (l lookup[S]) find(ctx context.Context, id string) (none S, err error) {
	got, getErr := l.get(ctx, id)
	switch {
	case getErr == nil && l.status(&got).State != opi.StateUnknown:
		return got, nil
	case getErr != nil && !lacksNetdev(getErr):
		return none, getErr
	}

	all, err := l.list(ctx)
	if status.Code(err) == codes.Unimplemented {
		return none, unknown("%s, and it has no list", l.missingDetail(got, getErr))
	}
	if err != nil {
		return none, err
	}

	all = slices.DeleteFunc(all, func(s S) bool { return l.id(s) != id })

	switch {
	case len(all) > 1:
		return none, unknown("%s, and it lists several of this id", l.missingDetail(got, getErr))

	case len(all) == 0 && getErr == nil:
		if _, err := l.get(ctx, id); err != nil && !lacksNetdev(err) {
			return none, err // the object or the agent has gone meanwhile
		}
		fallthrough
	case len(all) == 0:
		return none, unknown("%s, and it does not list it, as after a restart",
			l.missingDetail(got, getErr))
	case l.status(&all[0]).State == opi.StateUnknown:
		return none, unknown("%s, nor does its list", l.missingDetail(got, getErr))
	case getErr == nil && !l.consistent(got, all[0]):
		return none, unknown("%s, and its list contradicts what it tells",
			l.missingDetail(got, getErr))
	}

	found := all[0]
	if getErr != nil {
		*l.status(&found) = opi.Status{State: opi.StateFailed, Detail: netdevMessage(getErr)}
	}

	return found, nil
}

// missingDetail describes what the agent's Get left out.
func (l lookup[S]) missingDetail(got S, getErr error) string {
	if getErr != nil {
		return fmt.Sprintf("the agent may have the %s, but says: %s", l.noun, netdevMessage(getErr))
	}
	return fmt.Sprintf("the agent has the %s, but does not tell %s", l.noun, l.status(&got).Detail)
}

func unknown(format string, args ...any) error {
	return &opi.Error{Kind: opi.ErrUnknown, Detail: fmt.Sprintf(format, args...)}
}

// incomplete returns the status of an object about which the agent left something out. An object
// that is being deleted stays so, because the missing part does not matter then.
func incomplete(s opi.Status, what string) opi.Status {
	if s.State == opi.StateDeleting {
		return s
	}
	return opi.Status{State: opi.StateUnknown, Detail: what}
}

// namesObject reports whether an error message contains the name of an object, as opposed to a
// netdev or nothing.
func namesObject(err error) bool { return strings.Contains(status.Convert(err).Message(), "/") }

// lacksNetdev reports whether an error means that the agent has the object but does not find its
// netdev.
func lacksNetdev(err error) bool {
	const form = "unable to find key "
	name, isForm := strings.CutPrefix(status.Convert(err).Message(), form)
	return status.Code(err) == codes.NotFound && isForm && name != "" && !namesObject(err)
}

// netdevMessage returns the message of an error for people, which says if a netdev is missing.
func netdevMessage(err error) string {
	message := opi.Short(status.Convert(err).Message())
	if lacksNetdev(err) {
		return message + ", which is a netdev that is missing on the xPU"
	}
	return message
}

// checkMAC returns an [opi.ErrConflict] if another port of the network has the MAC address. An
// agent without lists is trusted to reject that itself.
func (a agent) checkMAC(ctx context.Context, p opi.Port) error {
	all, err := a.Ports(ctx)
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	if err != nil {
		return err
	}

	for _, other := range all {
		isOurs := func(network string) bool { return slices.Contains(p.Networks, network) }
		shared := slices.ContainsFunc(other.Networks, isOurs)
		if other.ID != p.ID && shared && bytes.Equal(other.MAC, p.MAC) {
			detail := fmt.Sprintf("port %s has the MAC address %s in the network already",
				other.ID, p.MAC)
			return &opi.Error{Kind: opi.ErrConflict, Detail: detail}
		}
	}

	return nil
}

// checkUnused returns an [opi.ErrInUse] if the network has a port. An agent whose Get returns all
// fields, or that has no lists, is trusted to reject that itself.
func (a agent) checkUnused(ctx context.Context, network string) error {
	if a.getIsComplete.Load() {
		return nil
	}

	all, err := a.Ports(ctx)
	if status.Code(err) == codes.Unimplemented {
		return nil
	}
	if err != nil {
		return err
	}

	for _, p := range all {
		if slices.Contains(p.Networks, network) {
			return &opi.Error{Kind: opi.ErrInUse, Detail: "port " + p.ID + " is in it"}
		}
	}

	return nil
}

// mainVRF ends the name of the VRF that opi-evpn-bridge creates when it starts. Version 0.2.0 does
// not create it.
const mainVRF = "/GRD"

func isMain(v *evpn.Vrf) bool { return strings.HasSuffix(v.GetName(), mainVRF) }

// vtepPrefix returns the VXLAN tunnel endpoint to send with a network that has a VNI: the address
// if there is one. Without an address it returns nil, so that the agent uses its own endpoint,
// except for v0.2.0, whose process ends without one. That gets 0.0.0.0, so that the kernel chooses
// the address.
func (a agent) vtepPrefix(ctx context.Context, address netip.Addr) (*netcommon.IPPrefix, error) {
	if address.IsValid() {
		return prefixOf(address), nil
	}

	// No version of opi-evpn-bridge serves grpc.health.v1. So an agent that answers is another one,
	// whatever VRFs it has.
	_, err := a.health.Check(ctx, &healthpb.HealthCheckRequest{})
	switch status.Code(err) {
	case codes.Unimplemented:
	case codes.OK, codes.NotFound:
		return nil, nil
	default:
		return nil, err
	}

	page, err := a.vrfs.ListVrfs(ctx, &evpn.ListVrfsRequest{PageSize: pageSize})
	switch status.Code(err) {
	case codes.OK:
	case codes.Unimplemented, codes.NotFound:
		return nil, nil
	default:
		return nil, err
	}

	if slices.ContainsFunc(page.GetVrfs(), isMain) {
		return nil, nil
	}

	any := &netcommon.IPAddress{
		Af: netcommon.IpAf_IP_AF_INET, V4OrV6: &netcommon.IPAddress_V4Addr{},
	}
	return &netcommon.IPPrefix{Addr: any}, nil
}

// prefixOf returns the prefix that has only the address.
func prefixOf(address netip.Addr) *netcommon.IPPrefix {
	p := &netcommon.IPPrefix{Len: int32(address.BitLen()), Addr: &netcommon.IPAddress{
		Af:     netcommon.IpAf_IP_AF_INET6,
		V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: address.AsSlice()},
	}}

	if address.Is4() {
		number := binary.BigEndian.Uint32(address.AsSlice())
		p.Addr.Af = netcommon.IpAf_IP_AF_INET
		p.Addr.V4OrV6 = &netcommon.IPAddress_V4Addr{V4Addr: number}
	}

	return p
}
