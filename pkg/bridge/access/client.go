// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"crypto/x509"
	"math"
	"path"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// Client is the client that makes a call, with its rule. The zero Client may do anything.
type Client struct {
	Subject    string // the subject of the client's certificate, "" without a certificate
	restricted bool   // the client may do only what its rule allows
	rule       Rule   // zero if the client has no rule
}

type clientKey struct{}

// NewContext returns a context of a call that the client makes.
func NewContext(ctx context.Context, c Client) context.Context {
	return context.WithValue(ctx, clientKey{}, c)
}

// FromContext returns the client that makes a call. Without authorization, it is a Client that may
// do anything.
func FromContext(ctx context.Context) Client {
	c, _ := ctx.Value(clientKey{}).(Client)
	return c
}

// Client returns the client that presented a chain of certificates, which begins with the client's
// own certificate. A nil Authorization restricts no client.
func (a *Authorization) Client(chain []*x509.Certificate) Client {
	c := Client{restricted: a != nil}
	if len(chain) > 0 {
		c.Subject = chain[0].Subject.String()
	}

	if c.restricted {
		i := slices.IndexFunc(a.Rules, func(r Rule) bool { return r.Subject == c.Subject })
		if i >= 0 {
			c.rule = a.Rules[i]
		}
	}

	return c
}

// CheckKnown returns a gRPC status if the client has no rule.
func (c Client) CheckKnown() error {
	if c.restricted && c.rule.Subject == "" {
		return refusal.New(codes.PermissionDenied, refusal.NoRule,
			"no rule of --authorization is for the client %q", c.Subject)
	}
	return nil
}

// ReadOnly reports whether the client may change nothing.
func (c Client) ReadOnly() bool { return c.rule.ReadOnly }

// CanSeeNetwork reports whether the client may know of the network.
func (c Client) CanSeeNetwork(id string) bool {
	return !c.restricted || matchesAny(c.rule.Networks, id)
}

// CanSeePort reports whether the client may know of a port that is in these networks.
func (c Client) CanSeePort(id string, networks []string) bool {
	return !c.restricted || matchesAny(c.rule.Ports, id) &&
		!slices.ContainsFunc(networks, func(id string) bool { return !c.CanSeeNetwork(id) })
}

// CanSeeVRF reports whether the client may know of the VRF.
func (c Client) CanSeeVRF(id string) bool { return !c.restricted || matchesAny(c.rule.VRFs, id) }

// CanSeeSVI reports whether the client may know of an SVI with this id, if it may also know of the
// SVI's network and VRF.
func (c Client) CanSeeSVI(id string) bool { return !c.restricted || matchesAny(c.rule.SVIs, id) }

// CanSeeAllVRFs reports whether the client may know of every VRF, whatever id it has.
func (c Client) CanSeeAllVRFs() bool { return !c.restricted || slices.Contains(c.rule.VRFs, "*") }

// CanSeeAllSVIs reports whether the client may know of every SVI, whatever ids the SVI and its
// network and VRF have.
func (c Client) CanSeeAllSVIs() bool {
	return !c.restricted || slices.Contains(c.rule.SVIs, "*") && c.CanSeeAllVRFs() &&
		slices.Contains(c.rule.Networks, "*")
}

// CanSeeAll reports whether the client may know of every network and port, whatever id it has.
func (c Client) CanSeeAll() bool {
	return !c.restricted || slices.Contains(c.rule.Networks, "*") &&
		slices.Contains(c.rule.Ports, "*")
}

func matchesAny(patterns []string, id string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		matched, err := path.Match(pattern, id)
		return err == nil && matched
	})
}

// MaxNetworks returns how many networks the client may have.
func (c Client) MaxNetworks() int { return c.limit(c.rule.MaxNetworks) }

// MaxPorts returns how many ports the client may have.
func (c Client) MaxPorts() int { return c.limit(c.rule.MaxPorts) }

// MaxVRFs returns how many VRFs the client may have.
func (c Client) MaxVRFs() int { return c.limit(c.rule.MaxVRFs) }

// MaxSVIs returns how many SVIs the client may have.
func (c Client) MaxSVIs() int { return c.limit(c.rule.MaxSVIs) }

func (c Client) limit(ofRule *int) int {
	if !c.restricted {
		return math.MaxInt
	}
	if ofRule == nil {
		return defaultMax
	}
	return *ofRule
}

// CheckSegments returns a gRPC status if the client may not give a network the VLAN id or the VNI
// of a new spec. The network may keep the segments that it has. The old spec is nil if the network
// is new.
func (c Client) CheckSegments(id string, old, new *evpn.LogicalBridgeSpec) error {
	if !c.restricted {
		return nil
	}

	refuse := func(field string, segment uint32, allowed []Segments) error {
		return refusal.New(codes.PermissionDenied, refusal.NotInRule,
			"logical bridge %s: %s %d: the rule of --authorization for the client %q has %s",
			id, field, segment, c.Subject, describe(allowed))
	}

	vlan, vni := new.GetVlanId(), new.GetVni()
	if (old == nil || vlan != old.GetVlanId()) && !contains(c.rule.VLANs, vlan, maxVLAN) {
		return refuse("vlan_id", vlan, c.rule.VLANs)
	}
	if new.Vni != nil && (old == nil || vni != old.GetVni()) &&
		!contains(c.rule.VNIs, vni, maxVNI) {
		return refuse("vni", vni, c.rule.VNIs)
	}

	return nil
}
