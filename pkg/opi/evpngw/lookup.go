// SPDX-License-Identifier: Apache-2.0

package evpngw

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// This file has what opi-evpn-bridge v0.2.0 needs, which OPI's release v0.1.0 has. Its Get of a
// port tells the MAC address alone, or that there is no such netdev, and its lists lack what was
// made before it was started. It refuses neither a MAC address that another port of the network
// has, nor the deletion of a network that has ports.

// lookup finds out what an agent has under an id: by its Get, and by its List where Get does not
// tell.
type lookup[S any] struct {
	noun   string
	get    func(ctx context.Context, id string) (S, error)
	list   func(ctx context.Context) ([]S, error)
	id     func(S) string
	status func(*S) *opi.Status
	agree  func(got, listed S) bool // in what Get tells
}

// find returns an error of kind [opi.ErrUnknown] if the agent has an object, or may have one, of
// which neither Get nor List tells enough.
func (l lookup[S]) find(ctx context.Context, id string) (none S, err error) {
	got, missing := l.get(ctx, id)
	switch {
	case missing == nil && l.status(&got).State != opi.StateUnknown:
		return got, nil
	case missing != nil && !lacksNetdev(missing):
		return none, missing
	}

	all, err := l.list(ctx)
	if status.Code(err) == codes.Unimplemented {
		return none, unknown("%s, and it has no list", l.untold(got, missing))
	}
	if err != nil {
		return none, err
	}

	all = slices.DeleteFunc(all, func(s S) bool { return l.id(s) != id })

	switch {
	case len(all) > 1:
		return none, unknown("%s, and it lists several of this id", l.untold(got, missing))
	case len(all) == 0 && missing == nil:
		if _, err := l.get(ctx, id); err != nil && !lacksNetdev(err) {
			return none, err // it went meanwhile, or the agent did
		}
		fallthrough
	case len(all) == 0:
		return none, unknown("%s, and it does not list it, as after a restart",
			l.untold(got, missing))
	case l.status(&all[0]).State == opi.StateUnknown:
		return none, unknown("%s, nor does its list", l.untold(got, missing))
	case missing == nil && !l.agree(got, all[0]):
		return none, unknown("%s, and its list contradicts what it tells", l.untold(got, missing))
	}

	found := all[0]
	if missing != nil {
		*l.status(&found) = opi.Status{State: opi.StateFailed, Detail: noNetdev(missing)}
	}

	return found, nil
}

// untold says what the agent's Get does not tell.
func (l lookup[S]) untold(got S, missing error) string {
	if missing != nil {
		return fmt.Sprintf("the agent may have the %s, but says: %s", l.noun, noNetdev(missing))
	}
	return fmt.Sprintf("the agent has the %s, but does not tell %s", l.noun, l.status(&got).Detail)
}

func unknown(format string, args ...any) error {
	return &opi.Error{Kind: opi.ErrUnknown, Detail: fmt.Sprintf(format, args...)}
}

// untold is the status of an object of which the agent does not tell this. One that is being
// deleted goes, whatever else it is.
func untold(s opi.Status, what string) opi.Status {
	if s.State == opi.StateDeleting {
		return s
	}
	return opi.Status{State: opi.StateUnknown, Detail: what}
}

// namesObject says whether an error names an object rather than a netdev, or nothing.
func namesObject(err error) bool { return strings.Contains(status.Convert(err).Message(), "/") }

// lacksNetdev says whether an error is that of an agent that has an object, but does not find its
// netdev.
func lacksNetdev(err error) bool {
	const form = "unable to find key "
	name, isForm := strings.CutPrefix(status.Convert(err).Message(), form)
	return status.Code(err) == codes.NotFound && isForm && name != "" && !namesObject(err)
}

// noNetdev says what is missing, for a person.
func noNetdev(err error) string {
	message := opi.Short(status.Convert(err).Message())
	if lacksNetdev(err) {
		return message + ", which is a netdev that is missing on the xPU"
	}
	return message
}

// checkMAC returns an [opi.ErrConflict] if another port of the network has the MAC address. An
// agent without lists is trusted to refuse that itself.
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

// checkUnused returns an [opi.ErrInUse] if a port is in the network. An agent that tells all of its
// ports, or has no lists, is trusted to refuse that itself.
func (a agent) checkUnused(ctx context.Context, network string) error {
	if a.tellsAll.Load() {
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

// mainVRF is the end of the name of the VRF that opi-evpn-bridge makes when it starts, but v0.2.0
// does not.
const mainVRF = "/GRD"

// vtep is the address of the VXLAN tunnel's end to send with a network that has a VNI: none, so
// that the agent takes its own, or 0.0.0.0 for v0.2.0, whose process ends without one. There the
// kernel chooses.
func (a agent) vtep(ctx context.Context) (*netcommon.IPPrefix, error) {
	page, err := a.vrfs.ListVrfs(ctx, &evpn.ListVrfsRequest{PageSize: pageSize})
	switch status.Code(err) {
	case codes.OK:
	case codes.Unimplemented, codes.NotFound:
		return nil, nil
	default:
		return nil, err
	}

	isMain := func(v *evpn.Vrf) bool { return strings.HasSuffix(v.GetName(), mainVRF) }
	if slices.ContainsFunc(page.GetVrfs(), isMain) {
		return nil, nil
	}

	address := &netcommon.IPAddress{
		Af: netcommon.IpAf_IP_AF_INET, V4OrV6: &netcommon.IPAddress_V4Addr{},
	}
	return &netcommon.IPPrefix{Addr: address}, nil
}
