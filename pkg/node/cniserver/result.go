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

// parseIPAM reads the result of an IPAM plugin, of any version; nothing is nothing.
func parseIPAM(raw json.RawMessage) (addressing, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return addressing{}, nil
	}
	r, err := cni.DecodeResult(raw, "0.1.0")
	if err != nil {
		return addressing{}, fail(types.ErrDecodingFailure, "result of the IPAM plugin: %w", err)
	}
	a := addressing{result: r}
	if err := a.read(); err != nil {
		return addressing{}, fail(types.ErrDecodingFailure, "result of the IPAM plugin: %w", err)
	}
	return a, nil
}

func (a *addressing) read() error {
	gateways := map[bool]netip.Addr{} // the first of each family, by whether that is IPv4
	for i, ip := range a.result.IPs {
		address, ok := prefix(ip)
		if !ok {
			return fmt.Errorf("ips[%d]: must have an address with prefix length", i)
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
			return fmt.Errorf("routes[%d]: must have a dst, and a gw that is an address where there is one", i)
		}
		a.routes = append(a.routes, route)
	}
	if err := (function.Interface{Name: "any", Addresses: a.addresses, Routes: a.routes}).Validate(); err != nil {
		return err
	}
	return nil
}

func prefix(ip *types100.IPConfig) (netip.Prefix, bool) {
	if ip == nil {
		return netip.Prefix{}, false
	}
	address, ok := netipx.FromStdIP(ip.Address.IP)
	network, masked := netipx.FromStdIPNet(&ip.Address)
	if !ok || !masked || address.BitLen() != network.Addr().BitLen() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(address, network.Bits()), true
}

// routeOf leads by the gateway of the addresses where the route names none, as CNI plugins do, and yields to a route
// that the pod has already, as they do too.
func routeOf(r *types.Route, gateways map[bool]netip.Addr) (function.Route, bool) {
	if r == nil {
		return function.Route{}, false
	}
	to, ok := netipx.FromStdIPNet(&net.IPNet{IP: r.Dst.IP.Mask(r.Dst.Mask), Mask: r.Dst.Mask})
	if !ok {
		return function.Route{}, false
	}
	route := function.Route{
		To: to, Via: gateways[to.Addr().Is4()], Metric: r.Priority, Scope: r.Scope, MTU: r.MTU, AdvMSS: r.AdvMSS, Yield: true,
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
func (w requested) encode(a journal.Attachment) (json.RawMessage, error) {
	ipam, err := parseIPAM(a.CNI.IPAM)
	if err != nil {
		return nil, err
	}
	r := &types100.Result{CNIVersion: types100.ImplementedSpecVersion}
	if w.prev != nil {
		*r = *w.prev
		r.CNIVersion = types100.ImplementedSpecVersion
	}
	index := len(r.Interfaces)
	r.Interfaces = append(r.Interfaces[:index:index], interfaceOf(a))
	r.IPs = append(r.IPs[:len(r.IPs):len(r.IPs)], ips(a, ipam, index)...)
	if ipam.result != nil {
		r.Routes = append(r.Routes[:len(r.Routes):len(r.Routes)], ipam.result.Routes...)
	} else {
		r.Routes = append(r.Routes[:len(r.Routes):len(r.Routes)], routes(a.Interface.Routes)...)
	}
	switch {
	case ipam.result != nil && !ipam.result.DNS.IsEmpty():
		r.DNS = ipam.result.DNS
	case r.DNS.IsEmpty():
		r.DNS = w.dns
	}
	versioned, err := r.GetAsVersion(w.version)
	if err != nil {
		return nil, fail(types.ErrIncompatibleCNIVersion, "result in CNI version %s: %w", w.version, err)
	}
	return json.Marshal(versioned)
}

func interfaceOf(a journal.Attachment) *types100.Interface {
	i := &types100.Interface{
		Name: a.Observed.Name, Mac: string(a.Observed.MAC), Mtu: a.Observed.MTU, Sandbox: a.Place.NetNS,
	}
	if a.Function.Subfunction == "" {
		i.PciID = string(a.Function.Address)
	}
	return i
}

// ips are those of the IPAM plugin, with their gateways, and else those that were asked for otherwise.
func ips(a journal.Attachment, ipam addressing, index int) []*types100.IPConfig {
	var list []*types100.IPConfig
	if ipam.result != nil {
		for _, ip := range ipam.result.IPs {
			list = append(list, &types100.IPConfig{Interface: &index, Address: ip.Address, Gateway: ip.Gateway})
		}
		return list
	}
	for _, address := range a.Interface.Addresses {
		ip := net.IPNet{IP: address.Addr().AsSlice(), Mask: net.CIDRMask(address.Bits(), address.Addr().BitLen())}
		list = append(list, &types100.IPConfig{Interface: &index, Address: ip})
	}
	return list
}

func routes(list []function.Route) []*types.Route {
	var routes []*types.Route
	for _, r := range list {
		route := &types.Route{Dst: *netipx.PrefixIPNet(r.To), Priority: r.Metric}
		if r.Via.IsValid() {
			route.GW = r.Via.AsSlice()
		}
		routes = append(routes, route)
	}
	return routes
}

// deviceInfo is what there is to say of the Function; nothing of an SF, for which the specification has no word.
func (s *Server) deviceInfo(a addRequest) (json.RawMessage, error) {
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
