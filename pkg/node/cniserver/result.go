package cniserver

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"go4.org/netipx"

	"github.com/opiproject/xpu-device-plugin/cni"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// addressing is what an IPAM plugin says, for link and as it was.
type addressing struct {
	addresses []netip.Prefix
	routes    []function.Route
	result    *types100.Result
}

// parseIPAM reads the result of an IPAM plugin, of any version. Without a result everything is empty.
func parseIPAM(raw json.RawMessage) (addressing, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return addressing{}, nil
	}
	a, err := decodeIPAM(raw)
	if err != nil {
		return addressing{}, fail(types.ErrDecodingFailure, "result of the IPAM plugin: %w", err)
	}
	return a, nil
}

func decodeIPAM(raw json.RawMessage) (a addressing, err error) {
	if a.result, err = cni.DecodeResult(raw, "0.1.0"); err != nil {
		return a, err
	}
	gateways := map[bool]netip.Addr{} // the first of each family, by whether that is IPv4
	for i, ip := range a.result.IPs {
		address, ok := netipx.FromStdIPNet(&ip.Address)
		if !ok {
			return a, fmt.Errorf("ips[%d]: must have an address with prefix length", i)
		}
		a.addresses = append(a.addresses, address)
		gateway, ok := netipx.FromStdIP(ip.Gateway)
		if is4 := gateway.Is4(); ok && !gateways[is4].IsValid() {
			gateways[is4] = gateway
		}
	}
	for i, r := range a.result.Routes {
		route, ok := routeOf(r, gateways)
		if !ok {
			return a, fmt.Errorf("routes[%d]: must have a dst, and a gw that is an address where there is one", i)
		}
		a.routes = append(a.routes, route)
	}
	return a, function.Interface{Name: "any", Addresses: a.addresses, Routes: a.routes}.Validate()
}

// routeOf leads by the gateway of the addresses where the route names none, as CNI plugins do, and yields to a route
// that the pod has already, as they do too.
func routeOf(r *types.Route, gateways map[bool]netip.Addr) (function.Route, bool) {
	to, ok := netipx.FromStdIPNet(&r.Dst)
	if !ok {
		return function.Route{}, false
	}
	route := function.Route{
		To: to.Masked(), Via: gateways[to.Addr().Is4()], Metric: r.Priority, Scope: r.Scope, MTU: r.MTU, AdvMSS: r.AdvMSS,
		Yield: true,
	}
	if r.Table != nil {
		route.Table = *r.Table
	}
	if r.GW != nil {
		route.Via, ok = netipx.FromStdIP(r.GW)
	}
	return route, ok
}

// encode makes the CNI result of an attachment, after what the plugins before made, in the version of the
// configuration. It depends on the journal and the configuration alone, so that a repeated ADD gets the same.
func (r cniRequest) encode(a journal.Attachment) (json.RawMessage, error) {
	ipam, err := parseIPAM(a.CNI.IPAM)
	if err != nil {
		return nil, err
	}
	given := ipam.result
	if given == nil {
		given = withoutIPAM(a.Interface)
	}
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
	if r.prev != nil {
		result = r.prev
	}
	index := len(result.Interfaces)
	attached := &types100.Interface{
		Name: a.Observed.Name, Mac: string(a.Observed.MAC), Mtu: a.Observed.MTU, Sandbox: a.Place.NetNS,
	}
	if a.Function.Subfunction == "" {
		attached.PciID = string(a.Function.Address)
	}
	result.Interfaces = append(result.Interfaces, attached)
	for _, ip := range given.IPs {
		result.IPs = append(result.IPs, &types100.IPConfig{Interface: &index, Address: ip.Address, Gateway: ip.Gateway})
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
		return nil, fail(types.ErrIncompatibleCNIVersion, "result in CNI version %s: %w", r.conf.CNIVersion, err)
	}
	return json.Marshal(versioned)
}

// withoutIPAM are the addresses and routes of an interface for which no IPAM plugin was asked.
func withoutIPAM(i function.Interface) *types100.Result {
	r := &types100.Result{}
	for _, address := range i.Addresses {
		ip := net.IPNet{IP: address.Addr().AsSlice(), Mask: net.CIDRMask(address.Bits(), address.Addr().BitLen())}
		r.IPs = append(r.IPs, &types100.IPConfig{Address: ip})
	}
	for _, to := range i.Routes {
		route := &types.Route{Dst: *netipx.PrefixIPNet(to.To), Priority: to.Metric}
		if to.Via.IsValid() {
			route.GW = to.Via.AsSlice()
		}
		r.Routes = append(r.Routes, route)
	}
	return r
}

// deviceInfo is what there is to say of the Function; nothing of an SF, for which the specification has no word.
func (s *Server) deviceInfo(a cniRequest) (json.RawMessage, error) {
	asVDPA := false
	if p, ok := s.Pools.PoolOf(a.device); ok {
		asVDPA = p.Options(a.function).VDPA != ""
	}
	info := deviceinfo.Of(a.function, asVDPA)
	if info == nil {
		return nil, nil
	}
	return json.Marshal(info)
}
