// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// networkRules are a network's rules for addresses.
type networkRules struct {
	network    string
	generation int64 // of the network's spec
	subnets    []netip.Prefix
	reserved   netaddr.Set // the gateways, and what is reserved
	routed     bool
	// gateways are the addresses of the gateway of each subnet that has one, with the subnet's
	// length.
	gateways []netip.Prefix
}

// rulesOf parses the network's spec, and returns a refusal if a field is invalid. The first
// address of a subnet belongs to its gateway, unless spec.gateways has an address of the same
// family.
func rulesOf(network *v1alpha1.XPUNetwork) (*networkRules, error) {
	rules := &networkRules{
		network: network.Name, generation: network.Generation,
		routed: network.Spec.Routed != nil,
	}
	var reserved []netaddr.Range
	var wrong []string
	gateways := map[bool]netip.Addr{} // by whether it is IPv4
	for i, text := range network.Spec.Gateways {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Zone() != "" {
			wrong = append(wrong,
				fmt.Sprintf("spec.gateways[%d] %q must be an address such as 10.1.0.1", i, text))
			continue
		}
		gateways[ip.Is4()] = ip
		reserved = append(reserved, netaddr.Single(ip))
	}

	for i, text := range network.Spec.Subnets {
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			wrong = append(wrong,
				fmt.Sprintf("spec.subnets[%d] %q must be a prefix such as 10.1.0.0/24", i, text))
			continue
		}

		rules.subnets = append(rules.subnets, subnet)
		gateway := gateways[subnet.Addr().Is4()]
		if !gateway.IsValid() {
			if gateway = subnet.Addr().Next(); !gateway.IsValid() {
				wrong = append(wrong, fmt.Sprintf("spec.subnets[%d] %q has no address for a "+
					"gateway; set spec.gateways, or choose another prefix", i, text))
				continue
			}
			reserved = append(reserved, netaddr.Single(gateway))
		}

		rules.gateways = append(rules.gateways, netip.PrefixFrom(gateway, subnet.Bits()))
		if problem := rules.wrongGateway(subnet, gateway); problem != "" {
			wrong = append(wrong, problem)
		}
	}

	for i, text := range network.Spec.Reserved {
		if r, err := netaddr.ParseRange(text); err == nil {
			reserved = append(reserved, r)
		} else {
			wrong = append(wrong,
				fmt.Sprintf("spec.reserved[%d] %q must be a prefix or a range such as "+
					"10.1.0.10-10.1.0.19", i, text))
		}
	}

	if len(wrong) > 0 {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotReady,
			"XPUNetwork %s: %s", network.Name,
			strings.Join(wrong, "; "))
	}

	rules.reserved = netaddr.NewSet(reserved)
	return rules, nil
}

// wrongGateway says why the xPUs cannot have the address of a gateway, "" if they can or need not.
func (r *networkRules) wrongGateway(subnet netip.Prefix, gateway netip.Addr) string {
	switch {
	case !r.routed:
		return ""
	case !subnet.Contains(gateway):
		return fmt.Sprintf("spec.gateways: %s, which the xPUs have because of spec.routed, must be "+
			"in subnet %s", gateway, subnet)
	case subnet.Bits() == 0, subnet.IsSingleIP(), unusable(subnet, gateway):
		return fmt.Sprintf("the gateway %s cannot be in subnet %s: choose another address in "+
			"spec.gateways, or a larger subnet", gateway, subnet)
	}
	return ""
}

// Gateways returns the address of the network's gateway in each of its subnets, with the length of
// the subnet. A refusal says what is wrong with the network.
func Gateways(network *v1alpha1.XPUNetwork) ([]netip.Prefix, error) {
	rules, err := rulesOf(network)
	if err != nil {
		return nil, err
	}
	return rules.gateways, nil
}

// CheckGateway returns a refusal if the Port has the MAC address or an address of the network's
// gateway. A Port that is up keeps its addresses, although the network may have another gateway
// since.
func CheckGateway(
	port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork, installation opi.Installation,
) error {
	if network.Spec.Routed == nil {
		return nil
	}

	refuse := func(what string) error {
		return reconciling.Refuse(v1alpha1.ReasonConflict,
			"%s is the gateway's in XPUNetwork %s; ask for another one, or for none", what,
			network.Name)
	}
	mac, err := net.ParseMAC(port.Spec.MAC)
	if err == nil && bytes.Equal(mac, installation.GatewayMAC()) {
		return refuse("MAC address " + port.Spec.MAC)
	}
	if port.Status.BridgePort != "" {
		return nil
	}

	gateways, err := Gateways(network)
	if err != nil {
		return err
	}
	for _, text := range In(port, network.Name) {
		address, err := netip.ParsePrefix(text)
		isGateway := func(g netip.Prefix) bool { return g.Addr() == address.Addr() }
		if err == nil && slices.ContainsFunc(gateways, isGateway) {
			return refuse("address " + text)
		}
	}

	return nil
}

// wrong says why no Port may have the address, "" if one may.
func (r *networkRules) wrong(address netip.Prefix) string {
	ip := address.Addr()
	if len(r.subnets) == 0 {
		return ""
	}

	for _, subnet := range r.subnets {
		switch {
		case !subnet.Contains(ip):
			continue
		case unusable(subnet, ip):
			return fmt.Sprintf("is the network's own or its broadcast address in subnet %s; "+
				"choose another one", subnet)
		case address.Bits() != subnet.Bits():
			return fmt.Sprintf("must have the prefix length of subnet %s", subnet)
		case r.reserved.Contains(ip):
			return fmt.Sprintf("is a gateway's or reserved in XPUNetwork %s; choose another one",
				r.network)
		}
		return ""
	}

	return fmt.Sprintf("is in none of the subnets of XPUNetwork %s (%s); choose one inside, or "+
		"leave addresses away to be given one",
		r.network, strings.Join(texts(r.subnets), ", "))
}

// unusable reports whether the address is the subnet's own (RFC 4291 2.6.1 for IPv6) or its IPv4
// broadcast address.
func unusable(subnet netip.Prefix, ip netip.Addr) bool {
	return !subnet.IsSingleIP() &&
		(ip == subnet.Addr() || ip.Is4() && ip == netaddr.Last(subnet))
}

func texts(prefixes []netip.Prefix) (list []string) {
	for _, prefix := range prefixes {
		list = append(list, prefix.String())
	}
	return list
}
