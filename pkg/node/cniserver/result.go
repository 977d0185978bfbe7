// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// ipConfig has the addresses and routes for an interface.
type ipConfig struct {
	addresses []netip.Prefix
	routes    []function.Route
	// result is the result of the IPAM plugin; nil without one.
	result *types100.Result
}

// parseIPAM parses the result of an IPAM plugin, if there is one, in any version. A route without a
// gateway gets the first gateway of its family, as with other CNI plugins.
func parseIPAM(raw json.RawMessage) (a ipConfig, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return a, nil
	}

	defer func() {
		if err != nil {
			err = fail(types.ErrDecodingFailure, "result of the IPAM plugin: %w", err)
		}
	}()

	if a.result, err = cni.DecodeResult(raw, "0.1.0"); err != nil {
		return a, err
	}

	if ips, routes := len(a.result.IPs), len(a.result.Routes); ips > maxAddresses ||
		routes > maxRoutes {
		return a, fmt.Errorf("has %d addresses and %d routes, at most %d and %d are allowed",
			ips, routes, maxAddresses, maxRoutes)
	}

	// gateways has the first gateway of each family, by whether the family is IPv4.
	gateways := map[bool]netip.Addr{}
	for i, ip := range a.result.IPs {
		address, ok := netaddr.FromIPNet(&ip.Address)
		if !ok {
			return a, fmt.Errorf("ips[%d]: must have an address with prefix length", i)
		}

		a.addresses = append(a.addresses, address)
		gateway, ok := netaddr.FromIP(ip.Gateway)
		if is4 := gateway.Is4(); ok && !gateways[is4].IsValid() {
			gateways[is4] = gateway
		}
	}

	for i, r := range a.result.Routes {
		to, ok := netaddr.FromIPNet(&r.Dst)
		via, isAddress := gateways[to.Addr().Is4()], true
		if r.GW != nil {
			via, isAddress = netaddr.FromIP(r.GW)
		}
		if !ok || !isAddress {
			return a, fmt.Errorf("routes[%d]: must have a dst, and a gw that is an address where "+
				"there is one", i)
		}

		a.routes = append(a.routes, function.Route{
			To: to.Masked(), Via: via, Metric: r.Priority, Table: ptr.Deref(r.Table, 0),
			Scope: r.Scope,
			MTU:   r.MTU, AdvMSS: r.AdvMSS,
			Yield: true, // a route that the pod has already stays, as with other CNI plugins
		})
	}

	return a, function.Interface{Name: "any", Addresses: a.addresses, Routes: a.routes}.Validate()
}

// usesAddressBook reports whether the network's address book assigns the interface its addresses.
func (r cniRequest) usesAddressBook() bool { return r.conf.IPAM.Type == wire.IPAM }

// withAddresses returns the reservation with the addresses that the network's address book
// assigned, and the routes of the request, as if an IPAM plugin had returned them.
func (r cniRequest) withAddresses(
	reservation journal.Attachment, addresses []netip.Prefix,
) (journal.Attachment, error) {
	if len(addresses) == 0 {
		return reservation, fail(CodeProvision, "network %s gave Function %s no address; see its "+
			"XPUPort", reservation.Port.Network, r.device)
	}

	text, err := r.ipamOutput(addresses)
	if err != nil {
		return reservation, err
	}

	given, err := parseIPAM(text)
	if err != nil {
		return reservation, err
	}

	reservation.CNI, reservation.Port = new(*reservation.CNI), new(*reservation.Port)
	reservation.CNI.IPAM, reservation.Port.Addresses = text, given.addresses
	if !reservation.Interface.Userspace {
		reservation.Interface.Addresses = given.addresses
		reservation.Interface.Routes = given.routes
	}

	return reservation, nil
}

// ipamOutput returns the output of an IPAM plugin that gives these addresses, with the routes of
// the request.
func (r cniRequest) ipamOutput(addresses []netip.Prefix) (json.RawMessage, error) {
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
	if len(r.conf.IPAM.Routes) > 0 {
		if err := json.Unmarshal(r.conf.IPAM.Routes, &result.Routes); err != nil {
			return nil, r.conf.invalid("ipam.routes: %w", err)
		}
	}

	for _, address := range addresses {
		result.IPs = append(result.IPs, &types100.IPConfig{Address: *netaddr.ToIPNet(address)})
	}

	text, err := json.Marshal(result)
	if err == nil {
		_, err = parseIPAM(text)
	}
	if err != nil {
		return nil, r.conf.invalid("ipam.routes: %w", err)
	}

	return text, nil
}

// encode adds an attachment to the result of the earlier plugins, in the version of the
// configuration. The result depends on the journal and the configuration only, so that a repeated
// ADD gets the same result.
func (r cniRequest) encode(a journal.Attachment) (json.RawMessage, error) {
	ipam, err := parseIPAM(a.CNI.IPAM)
	if err != nil {
		return nil, err
	}

	given := cmp.Or(ipam.result, withoutIPAM(a.Interface))
	result := new(types100.Result)
	if r.prev != nil {
		*result = *r.prev
	}

	result.Interfaces = slices.Clone(result.Interfaces)
	result.IPs = slices.Clone(result.IPs)
	result.Routes = slices.Clone(result.Routes)
	index := len(result.Interfaces)

	attached := &types100.Interface{
		Name: a.Observed.Name, Mac: string(a.Observed.MAC), Mtu: a.Observed.MTU,
		Sandbox: a.Place.NetNS,
	}

	if a.Function.Subfunction == "" {
		attached.PciID = string(a.Function.Address)
	}

	result.Interfaces = append(result.Interfaces, attached)
	for _, ip := range given.IPs {
		result.IPs = append(result.IPs,
			&types100.IPConfig{Interface: &index, Address: ip.Address, Gateway: ip.Gateway})
	}

	result.Routes = append(result.Routes, given.Routes...)
	switch {
	case !given.DNS.IsEmpty():
		result.DNS = given.DNS
	case result.DNS.IsEmpty():
		result.DNS = r.conf.DNS
	}

	versioned, err := result.GetAsVersion(r.conf.CNIVersion)
	if err != nil {
		return nil, fail(types.ErrIncompatibleCNIVersion, "result in CNI version %s: %w",
			r.conf.CNIVersion, err)
	}

	return json.Marshal(versioned)
}

// checkResult refuses a request whose result could not be returned after the Function is attached
// as want says. Addresses that the network's address book assigns later are not known yet.
func (r cniRequest) checkResult(want journal.Attachment) error {
	addresses := len(want.Interface.Addresses) > 0 || r.ipam.result != nil ||
		len(r.ipam.addresses) > 0
	if r.conf.CNIVersion < "0.3" && !addresses {
		if r.usesAddressBook() {
			return nil
		}
		return r.conf.invalid("cniVersion: %s (without cniVersion it is 0.1.0) knows no result "+
			"without an address; write 0.3.1 or later, or an ipam that gives an address to ADD",
			r.conf.CNIVersion)
	}

	want.Place.NetNS = r.NetNS
	want.Observed = &netdev.Observed{
		Name: r.IfName, MAC: want.Interface.MAC, MTU: want.Interface.MTU,
	}
	result, err := r.encode(want)
	if err != nil {
		return err
	}
	if most := wire.MaxMessage - answerSpace; len(result) > most {
		return r.conf.invalid("prevResult and ipam: make a result of %d bytes, at most %d are "+
			"allowed", len(result), most)
	}

	return nil
}

// withoutIPAM returns the addresses and routes of an interface without an IPAM plugin.
func withoutIPAM(i function.Interface) *types100.Result {
	r := &types100.Result{}
	for _, address := range i.Addresses {
		r.IPs = append(r.IPs, &types100.IPConfig{Address: *netaddr.ToIPNet(address)})
	}

	for _, to := range i.Routes {
		r.Routes = append(r.Routes,
			&types.Route{
				Dst: *netaddr.ToIPNet(to.To), GW: to.Via.AsSlice(), Priority: to.Metric,
			})
	}

	return r
}
