// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
)

// Limits of what a pod may ask for. The kernel has no limits for them.
const (
	MaxRules     = 64
	MaxNeighbors = 256
)

// Priorities that a rule may have. The kernel's own rules have 0 (local), 32766 (main) and 32767
// (default).
const (
	LowestPriority  = 1
	HighestPriority = 32765
)

// Route is a route through the interface.
type Route struct {
	// without host bits: "10.2.0.0/16"; "0.0.0.0/0" for the default route
	To netip.Prefix `json:"to"`
	// gateway of the same family; the zero value means none
	Via netip.Addr `json:"via,omitzero"`
	// lower is preferred; 0 means the kernel's default: 0 for IPv4, 1024 for IPv6
	Metric int `json:"metric,omitempty"`
	Table  int `json:"table,omitempty"` // routing table; 0 means the main table
	// Source is the address that packets on this route have by default. It must be an address of
	// the pod. The zero value leaves the choice to the kernel.
	Source netip.Addr `json:"source,omitzero"`
	// OnLink accepts a gateway that is in no subnet of the interface (RTNH_F_ONLINK).
	OnLink bool `json:"onLink,omitempty"`
	// RT_SCOPE_* of linux/rtnetlink.h; nil means link without Via, and universe with it
	Scope *int `json:"scope,omitempty"`
	// MTU and AdvMSS of the route, in bytes; 0 means the interface's
	MTU    int `json:"mtu,omitempty"`
	AdvMSS int `json:"advMSS,omitempty"`
	// accept another route of the pod to the same destination, which is otherwise an error
	Yield bool `json:"yield,omitempty"`
}

// In returns the route of an interface in a VRF: a route without a table is in the table of the
// VRF. vrf may be nil.
func (r Route) In(vrf *VRF) Route {
	if r.Table == 0 && vrf != nil {
		r.Table = vrf.Table
	}
	return r
}

// Rule is a rule of the pod's policy routing: packets that match all given fields look for a route
// in a table (FRA_* of linux/fib_rules.h).
type Rule struct {
	// Rules are tried from the lowest priority. The kernel has rules with 0, 32766 and 32767.
	Priority int `json:"priority"`
	// Source and destination of the packets. The zero value matches all.
	From netip.Prefix `json:"from,omitzero"`
	To   netip.Prefix `json:"to,omitzero"`
	// Incoming matches packets that come in by the interface, and Outgoing those of sockets that
	// are bound to it.
	Incoming bool `json:"incoming,omitempty"`
	Outgoing bool `json:"outgoing,omitempty"`
	Table    int  `json:"table"`
}

// Is6 reports whether the rule is for IPv6. A rule without prefixes is for IPv4: see
// [Rule.Families].
func (r Rule) Is6() bool {
	return r.From.IsValid() && !r.From.Addr().Is4() || r.To.IsValid() && !r.To.Addr().Is4()
}

// Families returns whether the rule is for IPv4 and for IPv6. A rule without prefixes is for both.
func (r Rule) Families() (ipv4, ipv6 bool) {
	any := !r.From.IsValid() && !r.To.IsValid()
	return any || !r.Is6(), any || r.Is6()
}

// VRF is a virtual routing domain of the pod: a netdev, and a routing table that is used for the
// traffic of its ports (Documentation/networking/vrf.rst). Several interfaces of a pod may be in
// one VRF.
type VRF struct {
	Name  string `json:"name"`  // of its netdev in the pod, see [ValidateInterfaceName]
	Table int    `json:"table"` // routing table, 1-2147483647 but for the kernel's own
}

// Neighbor is a permanent entry of the interface's neighbour table (NUD_PERMANENT).
type Neighbor struct {
	Address netip.Addr `json:"address"` // of the neighbour
	MAC     MAC        `json:"mac"`     // a unicast Ethernet address
}

func (r Route) validate() error {
	switch {
	case !r.To.IsValid():
		return errors.New("to: must be a prefix such as 10.2.0.0/16")
	case r.To != r.To.Masked():
		return fmt.Errorf("to %s: must have no host bits, as in %s", r.To, r.To.Masked())
	case r.Via.IsValid() && r.Via.Is4() != r.To.Addr().Is4():
		return fmt.Errorf("via %s: must be of the same family as %s", r.Via, r.To)
	case r.OnLink && !r.Via.IsValid():
		return errors.New("onLink: needs via, the gateway that it is about")
	case r.Source.IsValid() && r.Source.Is4() != r.To.Addr().Is4():
		return fmt.Errorf("source %s: must be of the same family as %s", r.Source, r.To)
	case r.Metric < 0 || r.Metric > math.MaxInt32:
		return fmt.Errorf("metric %d: must be 0-%d", r.Metric, math.MaxInt32)
	case r.Table < 0 || r.Table > math.MaxInt32:
		return fmt.Errorf("table %d: must be 0-%d", r.Table, math.MaxInt32)
	case r.Scope != nil && (*r.Scope < 0 || *r.Scope > math.MaxUint8):
		return fmt.Errorf("scope %d: must be 0-%d", *r.Scope, math.MaxUint8)
	case r.MTU < 0 || r.MTU > math.MaxInt32 || r.AdvMSS < 0 || r.AdvMSS > math.MaxInt32:
		return fmt.Errorf("mtu %d, advMSS %d: must be 0-%d", r.MTU, r.AdvMSS, math.MaxInt32)
	}
	return nil
}

// validateRules reports rules that the kernel would reject, or whose order is not given.
func validateRules(rules []Rule) error {
	if len(rules) > MaxRules {
		return fmt.Errorf("rules: has %d, at most %d may be given", len(rules), MaxRules)
	}

	var errs []error
	seen := map[int]int{}
	for n, r := range rules {
		err := r.validate()
		if other, taken := seen[r.Priority]; err == nil && taken {
			err = fmt.Errorf("priority %d: rules[%d] has it; give each rule its own", r.Priority, other)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("rules[%d]: %w", n, err))
		}
		seen[r.Priority] = n
	}

	return errors.Join(errs...)
}

// validate reports what the kernel would reject, and a table that others use. netdev is the name of
// the interface.
func (v *VRF) validate(netdev string) error {
	if v == nil {
		return nil
	}

	// RT_TABLE_DEFAULT, RT_TABLE_MAIN and RT_TABLE_LOCAL of linux/rtnetlink.h.
	const lowestOfKernel, highestOfKernel = 253, 255
	switch err := ValidateInterfaceName(v.Name); {
	case err != nil:
		return fmt.Errorf("vrf.name: %w", err)
	case v.Name == netdev || v.Name == "lo" || v.Name == "eth0":
		return fmt.Errorf("vrf.name %q: is the name of an interface; choose another name", v.Name)
	case v.Table < 1 || v.Table > math.MaxInt32 ||
		v.Table >= lowestOfKernel && v.Table <= highestOfKernel:
		return fmt.Errorf("vrf.table %d: must be 1-%d, and not 253-255, which are the kernel's own",
			v.Table, math.MaxInt32)
	}

	return nil
}

func (r Rule) validate() error {
	for _, f := range []struct {
		field  string
		prefix netip.Prefix
	}{{"from", r.From}, {"to", r.To}} {
		if f.prefix.IsValid() && f.prefix != f.prefix.Masked() {
			return fmt.Errorf("%s %s: must have no host bits, as in %s", f.field, f.prefix,
				f.prefix.Masked())
		}
	}

	switch {
	case r.Priority < LowestPriority || r.Priority > HighestPriority:
		return fmt.Errorf("priority %d: must be %d-%d, because the kernel's own rules have the "+
			"priorities 0, 32766 and 32767", r.Priority, LowestPriority, HighestPriority)
	case r.Table < 1 || r.Table > math.MaxInt32:
		return fmt.Errorf("table %d: must be 1-%d", r.Table, math.MaxInt32)
	case r.From.IsValid() && r.To.IsValid() && r.From.Addr().Is4() != r.To.Addr().Is4():
		return fmt.Errorf("from %s and to %s: must be of the same family", r.From, r.To)
	case r.From.Bits() <= 0 && r.To.Bits() <= 0 && !r.Incoming && !r.Outgoing:
		return errors.New("from, to, incoming, outgoing: one of them must be given, and no prefix with " +
			"/0, because the rule would be for the traffic of all interfaces of the pod")
	}

	return nil
}

// validateNeighbors reports entries that the kernel would reject or that are given twice.
func validateNeighbors(neighbors []Neighbor) error {
	if len(neighbors) > MaxNeighbors {
		return fmt.Errorf("neighbors: has %d, at most %d may be given", len(neighbors), MaxNeighbors)
	}

	var errs []error
	seen := map[netip.Addr]bool{}
	for n, one := range neighbors {
		switch {
		case !one.Address.IsValid() || one.Address.IsUnspecified() || one.Address.IsMulticast() ||
			one.Address.Zone() != "" || one.Address.Is4In6():
			errs = append(errs, fmt.Errorf("neighbors[%d].address %s: must be a unicast address such "+
				"as 10.1.0.7", n, one.Address))
		case seen[one.Address]:
			errs = append(errs, fmt.Errorf("neighbors[%d].address %s: is given twice", n, one.Address))
		}

		seen[one.Address] = true
		if !one.MAC.isUnicast() {
			errs = append(errs, fmt.Errorf("neighbors[%d].mac %q: must be a unicast Ethernet address "+
				"such as 02:00:00:00:00:01", n, one.MAC))
		}
	}

	return errors.Join(errs...)
}
