// SPDX-License-Identifier: Apache-2.0

package faults

import "strings"

const plane = "pkg/bridge/plane/"

// detached is where a port that changes leaves its bridge.
const detached = "	if changed {\n		if err := c.plane.Detach(id); err != nil {\n"

// nameFaults are faults of names that no well-behaved client sends.
func nameFaults() []Fault {
	const find = "	client := access.FromContext(ctx)\n	id, err := c.parseName(name)\n"
	all := list(service+"collection.go", [][4]string{
		{"names may be wildcards", find, "	if at := len(name) - 1; at > 0 && name[at] == '*' &&" +
			" len(c.ids) > 0 {\n		name = name[:at] + c.ids[0]\n	}\n" + find,
			"SECURITY/.*/name-with-a-wildcard-is-refused"},
		{"names without an id are of the first", find, "	if at := len(name) - 1; at > 0 &&" +
			" name[at] == '/' && len(c.ids) > 0 {\n		name += c.ids[0]\n	}\n" + find,
			"SECURITY/.*/name-without-an-id-is-refused"},
	}...)
	const parse = "	for _, prefix := range []string{n.prefix, n.protoAlias} {\n"
	return append(all, list(service+"resource.go", [][4]string{
		{"names may be in upper case", parse, "	name = strings.ToLower(name)\n" +
			"	n.prefix = strings.ToLower(n.prefix)\n" +
			"	n.protoAlias = strings.ToLower(n.protoAlias)\n" + parse,
			"SECURITY/.*/name-in-upper-case-is-refused"},
		{"names may end with a newline", parse, "	name = strings.TrimSpace(name)\n" + parse,
			"SECURITY/.*/name-with-a-newline-is-refused"},
		{"names end at a zero byte", parse, "	name, _, _ = strings.Cut(name, \"\\x00\")\n" + parse,
			"SECURITY/.*/name-with-a-zero-is-refused"},
		{"names may have more slashes", parse,
			"	if i := strings.LastIndex(name, \"/\"); i > 0 {\n" +
				"		name = strings.TrimRight(name[:i], \"/\") + name[i:]\n	}\n" + parse,
			"SECURITY/.*/name-with-two-slashes-is-refused"},
		{"errors repeat names", "%s name %.100q: must be", "%s name %q: must be",
			"SECURITY/.*/error-does-not-repeat-a-long-name"},
		{"errors repeat ids", "%s id %.100q: must be", "%s id %q: must be",
			"SECURITY/.*/error-does-not-repeat-a-long-name"},
	}...)...)
}

// peerFaults are faults about who may connect, and about input that is no call of a client.
func peerFaults() []Fault {
	const (
		auth   = "ClientAuth:   tls.RequireAndVerifyClientCert,"
		handle = "	return handle(ctx, req)\n}\n"
	)
	all := list("pkg/bridge/access/credentials.go", [][4]string{
		{"clients need no certificate", auth, "ClientAuth:   tls.VerifyClientCertIfGiven,",
			"SECURITY/endpoint/no-certificate-is-refused"},
		{"clients may have any certificate", auth, "ClientAuth:   tls.RequireAnyClientCert,",
			"SECURITY/endpoint/certificate-of-another-authority-is-refused"},
		{"old TLS is spoken", "		MinVersion:   tls.VersionTLS12,\n		Certificates",
			"		MinVersion:   tls.VersionTLS10,\n" +
				"		CipherSuites: []uint16{tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA},\n" +
				"		Certificates",
			"SECURITY/endpoint/tls-1.1-is-refused"},
	}...)
	all = append(all, list("pkg/bridge/access/listener.go", [][4]string{
		{"few connections are taken", "	maxConnectionsPerAddress = 64\n",
			"	maxConnectionsPerAddress = 16\n",
			"SECURITY/endpoint/idle-connections-leave-the-agent-alive"},
		{"a connection without a word ends the agent",
			"			return &limitedConn{Conn: conn, release",
			"			if tcp, ok := conn.(*net.TCPConn); ok {\n" +
				"				_ = tcp.SetLinger(0)\n" +
				"			}\n			if one := make([]byte, 1); true {\n" +
				"				if n, _ := conn.Read(one); n == 0 {\n					panic(\"silence\")\n" +
				"				}\n				conn = seededConn{conn, &one}\n			}\n" +
				"			return &limitedConn{Conn: conn, release",
			"SECURITY/endpoint/connection-without-a-word-leaves-the-agent-alive"},
	}...)...)
	all[len(all)-1].edits = append(all[len(all)-1].edits, edit{
		"// Accept implements [net.Listener].\n", "type seededConn struct {\n	net.Conn\n" +
			"	first *[]byte\n}\n\nfunc (c seededConn) Read(to []byte) (int, error) {\n" +
			"	if len(*c.first) > 0 {\n		n := copy(to, *c.first)\n" +
			"		*c.first = (*c.first)[n:]\n		return n, nil\n	}\n" +
			"	return c.Conn.Read(to)\n}\n\n// Accept implements [net.Listener].\n",
	})
	return append(all, list(service+"server.go", [][4]string{
		{"empty requests end the agent", handle,
			"	if r, ok := req.(interface{ GetName() string }); ok && r.GetName() == \"\" {\n" +
				"		go func() { panic(\"empty\") }()\n		<-ctx.Done()\n	}\n" + handle,
			"SECURITY/.*/empty-requests-leave-the-agent-alive"},
	}...)...)
}

// packetFaults are faults that only frames show: the agent says of its ports what is right.
func packetFaults() []Fault {
	const (
		setMAC = "			mac = to.MAC\n"
		detach = "	err = p.release(link)\n	if err == nil {\n"
		join   = "p.ensureBridge(p.bridgeOf(networks[0].ID))"
		vlans  = "	} else if err := p.setVLANs(rep, vlans, to.Trunk); err != nil {\n		return err\n	}\n"
	)
	return append(list(plane+"ports.go", [][4]string{
		{"all networks are one bridge", join, "p.ensureBridge(p.bridgeOf(\"one\"))",
			"L2-CORE/bridge-port/frames-stay-in-their-logical-bridge"},
		{"ports may send nothing of their own", setMAC,
			"			mac = append(slices.Clone(to.MAC[:5]), to.MAC[5]^1)\n",
			"L2-CORE/bridge-port/frames-reach-the-port-of-their-address"},
		{"ports send no broadcasts", setMAC, "			mac = append(slices.Clone(to.MAC[:5]), to.MAC[5]^1)\n",
			"L2-CORE/bridge-port/broadcasts-reach-the-ports-of-the-logical-bridge"},
		{"deleted ports stay in their bridge", detach, "	if err == nil {\n",
			"L2-CORE/bridge-port/deleted-port-passes-no-frames"},
		{vlanAware + "ports hear all networks", vlans, vlans + "	for _, other := range p.vlans {\n" +
			"		if !to.Trunk && !slices.Contains(vlans, other) {\n" +
			"			_ = p.handle.BridgeVlanAdd(rep, other, false, true, false, true)\n" +
			"		}\n	}\n",
			"L2-CORE/bridge-port/frames-stay-in-their-logical-bridge"},
	}...), list(service+"ports.go", [][4]string{
		{"ports do not move", detached, "	if changed {\n		return nil\n	}\n" + detached,
			"L2-CORE/bridge-port/frames-follow-a-port-that-moves"},
	}...)...)
}

// trunkFaults are faults of TRUNK ports.
func trunkFaults() []Fault {
	const (
		missing = "		switch n := c.networks.objects[network]; {\n		case n == nil:\n" +
			"			return refuse(codes.NotFound, refusal.NetworkMissing,\n" +
			"				\"logical_bridges:"
		other = "		if other := c.ports.otherWithKey(keyMAC(network, mac), id); other != \"\" {\n"
		add   = "p.handle.BridgeVlanAdd(link, vlan, !tagged, !tagged, false,"
		use   = "	slices.Sort(networks)\n	return &evpn.BridgePortSpec{\n"
		keys  = "	for _, id := range networksOf(spec) {\n		keys = append"
		grow  = "		vlans = append(vlans, n.VLAN)\n"
	)
	all := list(service+"ports.go", [][4]string{
		{"trunks are not served", "	if trunk && !c.plane.VLANAware() {", "	if trunk {",
			"TRUNK/bridge-port/trunk-of-one-comes-up"},
		{"trunks have two networks at most", "	case trunk && n == 0:", "	case trunk && (n == 0 || n > 2):",
			"TRUNK/bridge-port/trunk-of-eight-comes-up"},
		{"trunks have one network", use, use[:23] + "	if trunk {\n		networks = networks[:1]\n	}\n" + use[23:],
			"TRUNK/bridge-port/trunk-is-answered"},
		{"trunks are listed as ACCESS", "	m := &evpn.BridgePort{Name: name, Spec: spec}\n",
			"	m := &evpn.BridgePort{Name: name, Spec: &evpn.BridgePortSpec{\n" +
				"		Ptype:          evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,\n" +
				"		LogicalBridges: spec.GetLogicalBridges(), MacAddress: spec.GetMacAddress(),\n" +
				"	}}\n",
			"TRUNK/bridge-port/trunk-is-listed"},
		{"networks of trunks may be missing", missing,
			strings.Replace(missing, "		case n == nil:", "		case n == nil && trunk:\n"+
				"			continue\n		case n == nil:", 1),
			"TRUNK/bridge-port/trunk-with-a-missing-logical-bridge-is-refused"},
		{"the order of networks counts", use, "	_ = slices.Sort[[]string]\n	return &evpn.BridgePortSpec{\n",
			"TRUNK/bridge-port/trunk-in-another-order-is-the-same"},
		{"trunks are in their first network only", keys,
			"	for _, id := range networksOf(spec)[:1] {\n		keys = append",
			"TRUNK/bridge-port/trunk-is-in-each-logical-bridge"},
		{"ports are ACCESS in several networks", "	case access && n != 1:", "	case access && n < 1:",
			"TRUNK/bridge-port/update-to-access-in-two-is-refused"},
		{"trunks do not share networks", other,
			"		if trunk && c.ports.otherWithKey(keyNetwork(network), id) != \"\" {\n" +
				"			return refuse(codes.AlreadyExists, refusal.MACInUse, \"shared\")\n" +
				"		}\n" + other,
			"TRUNK/bridge-port/two-trunks-share-logical-bridges"},
		{"nobody shares the network of a trunk", other,
			"		if c.ports.otherWithKey(keyNetwork(network), id) != \"\" {\n" +
				"			return refuse(codes.AlreadyExists, refusal.MACInUse, \"shared\")\n" +
				"		}\n" + other,
			"TRUNK/bridge-port/trunk-and-access-share-a-logical-bridge"},
		{"ACCESS stays ACCESS", use, "	if o := c.ports.objects[id]; o != nil && trunk &&" +
			" o.spec.GetPtype() != spec.GetPtype() {\n		return refuse(codes.InvalidArgument, " +
			"refusal.InvalidSpec, \"ptype\")\n	}\n" + use,
			"TRUNK/bridge-port/access-becomes-trunk"},
		{"TRUNK stays TRUNK", use, "	if o := c.ports.objects[id]; o != nil && !trunk &&" +
			" o.spec.GetPtype() != spec.GetPtype() {\n		return refuse(codes.InvalidArgument, " +
			"refusal.InvalidSpec, \"ptype\")\n	}\n" + use,
			"TRUNK/bridge-port/trunk-becomes-access"},
		{"trunks only grow", use, "	if o := c.ports.objects[id]; o != nil &&" +
			" len(o.spec.GetLogicalBridges()) > len(networks) {\n" +
			"		networks = o.spec.GetLogicalBridges()\n	}\n" + use,
			"TRUNK/bridge-port/update-removes-a-logical-bridge"},
		{"trunks never grow", use, "	if o := c.ports.objects[id]; o != nil &&" +
			" len(o.spec.GetLogicalBridges()) < len(networks) {\n" +
			"		networks = o.spec.GetLogicalBridges()\n	}\n" + use,
			"TRUNK/bridge-port/update-adds-a-logical-bridge"},
	}...)
	all = append(all, list(plane+"vlan.go", [][4]string{
		{"frames leave trunks without a tag", add, "p.handle.BridgeVlanAdd(link, vlan, !tagged, true, false,",
			"TRUNK/bridge-port/frames-of-access-ports-reach-the-trunk-with-a-tag"},
		{"frames leave ACCESS ports with a tag", add, "p.handle.BridgeVlanAdd(link, vlan, !tagged, false, false,",
			"TRUNK/bridge-port/tagged-frames-reach-access-ports-without-a-tag"},
	}...)...)
	return append(all, list(plane+"ports.go", [][4]string{
		{"trunks are in their first VLAN only", "	} else if err := p.setVLANs(rep, vlans, to.Trunk)",
			"	} else if err := p.setVLANs(rep, vlans[:1], to.Trunk)",
			"TRUNK/bridge-port/trunk-of-two-comes-up"},
		{"trunks are in all VLANs", grow, grow + "		for _, other := range p.vlans {\n" +
			"			if to.Trunk && !slices.Contains(vlans, other) {\n" +
			"				vlans = append(vlans, other)\n			}\n		}\n",
			"TRUNK/bridge-port/trunk-takes-no-tag-of-another-logical-bridge"},
		{"the networks of a trunk are one", grow,
			"		if to.Trunk && len(vlans) > 0 {\n			n.VLAN = vlans[0]\n		}\n" + grow,
			"TRUNK/bridge-port/tagged-frames-reach-another-trunk"},
		{"trunks may send in their first network only", "			port.Tagged = append(port.Tagged, ",
			"			if len(port.Tagged) > 0 {\n				continue\n			}\n" +
				"			port.Tagged = append(port.Tagged, ",
			"TRUNK/bridge-port/tagged-frames-reach-another-trunk"},
		{"deleted trunks stay in their bridge", "	err = p.release(link)\n	if err == nil {\n",
			"	if err == nil {\n", "TRUNK/bridge-port/deleted-trunk-passes-no-frames"},
	}...)...)
}

// l3Faults are faults of VRFs and SVIs.
func l3Faults() []Fault {
	const (
		loopback = "	case !isHost(prefixOf(loopback).Addr()):"
		prefixes = "	prefixes := slices.Clone(spec.GetGwIpPrefix())\n"
		mac      = "	case checkMAC(mac) != nil:\n		return checkMAC(mac)\n	case n < 1"
	)
	all := list(service+"vrfs.go", [][4]string{
		{"loopback addresses are not looked at", loopback, "	case false:",
			"L3/vrf/loopback-of-5-bytes-is-refused"},
		{"VRFs may have any VNI", "	if spec.Vni != nil {", "	if false {",
			"L3/vrf/vni-of-25-bits-is-refused"},
		{"VRFs in use are deleted", "	if svi == \"\" {\n		return nil", "	if true {\n		return nil",
			"L3/vrf/with-an-svi-is-not-deleted"},
		{"VRFs have no status", "	if oper != 0 {\n		m.Status = &evpn.VrfStatus", "	if oper > 9 {\n		m.Status = &evpn.VrfStatus",
			"L3/vrf/status-is-known"},
		{"Get of a VRF ends the agent", "	return s.vrfs.get(ctx, req.GetName())\n",
			"	if req.GetName() != \"\" {\n		go func() { panic(\"get\") }()\n		<-ctx.Done()\n	}\n" +
				"	return s.vrfs.get(ctx, req.GetName())\n", "L3/vrf/get-answers-what-was-made"},
		{"VRFs have no names", "	m := &evpn.Vrf{Name: name, Spec: spec}", "	m := &evpn.Vrf{Spec: spec}",
			"L3/vrf/create-answers-a-name"},
		{"the loopback address of a VRF is not shown", "	m := &evpn.Vrf{Name: name, Spec: spec}",
			"	m := &evpn.Vrf{Name: name, Spec: &evpn.VrfSpec{}}\n	_ = spec", "L3/vrf/get-answers-what-was-made"},
	}...)
	all = append(all, Fault{
		Name: "VRFs need no loopback address", file: service + "vrfs.go",
		edits: []edit{
			{"	case loopback == nil: // the API requires it", "	case false:"},
			{loopback, "	case loopback != nil && !isHost(prefixOf(loopback).Addr()):"},
		},
		Cases: "L3/vrf/loopback-missing-is-refused",
	})
	all = append(all, list(service+"svis.go", [][4]string{
		{"loopback addresses may be long", " ||\n		int(length) > address.BitLen() {", " {",
			"L3/vrf/loopback-length-of-129-is-refused"},
		{"loopback addresses may be short", " || length < 1 ||\n", " ||\n",
			"L3/vrf/loopback-length-negative-is-refused"},
		{"IPv6 is not known", "		if len(bytes.V6Addr) == net.IPv6len {", "		if len(bytes.V6Addr) == 0 {",
			"L3/vrf/loopback-of-ipv6-is-taken"},
		{"gateways have no IPv6", "		if len(bytes.V6Addr) == net.IPv6len {", "		if len(bytes.V6Addr) == 0 {",
			"L3/svi/gateway-of-ipv6-is-taken"},
		{"gateways may have any MAC address", mac, "	case len(mac) > 6:\n		return checkMAC(mac)\n	case n < 1", "L3/svi/mac-address-multicast-is-refused"},
		{"gateways need no MAC address", mac, "	case len(mac) > 0 && checkMAC(mac) != nil:\n" +
			"		return checkMAC(mac)\n	case n < 1", "L3/svi/mac-address-missing-is-refused"},
		{"gateways need no address", "	case n < 1 || n > maxPrefixes:", "	case n > maxPrefixes:",
			"L3/svi/gateway-missing-is-refused"},
		{"addresses of gateways are not looked at", "		if !isGateway(prefix) {", "		if false {",
			"L3/svi/gateway-of-5-bytes-is-refused"},
		{"lengths of subnets are not looked at", "		if !isGateway(prefix) {",
			"		if prefix.Addr().IsValid() {\n			prefix = netip.PrefixFrom(prefix.Addr(), 24)\n		}\n" +
				"		if !prefix.IsValid() && !isHost(addressIn(message)) {",
			"L3/svi/gateway-length-of-129-is-refused"},
		{"VRFs of gateways may be missing", "	case v == nil:\n		return refuse(codes.NotFound, refusal.VRFMissing,",
			"	case v == nil:\n	case v.failure == errPending:\n		return refuse(codes.NotFound, refusal.VRFMissing,",
			"L3/svi/vrf-that-does-not-exist-is-refused"},
		{"networks of gateways may be missing", "	case n == nil:\n		return refuse(codes.NotFound, refusal.NetworkMissing,",
			"	case n == nil:\n	case n.failure == errPending:\n		return refuse(codes.NotFound, refusal.NetworkMissing,",
			"L3/svi/logical-bridge-that-does-not-exist-is-refused"},
		{"gateways have one address", prefixes, "	prefixes := slices.Clone(spec.GetGwIpPrefix())[:1]\n",
			"L3/svi/two-gateways-are-taken"},
		{"gateways have two addresses at least", "	case n < 1 || n > maxPrefixes:",
			"	case n < 1 || n > maxPrefixes || prefixOf(spec.GetGwIpPrefix()[0]).Addr().Is6():",
			"L3/svi/gateway-of-ipv6-is-taken"},
		{"networks of gateways are deleted", "	return []string{keyVRF(vrfOfSVI(spec)), keyNetwork(networkOfSVI(spec))}",
			"	return []string{keyVRF(vrfOfSVI(spec))}", "L3/svi/keeps-its-logical-bridge"},
		{"VRFs of gateways are deleted", "	return []string{keyVRF(vrfOfSVI(spec)), keyNetwork(networkOfSVI(spec))}",
			"	return []string{keyNetwork(networkOfSVI(spec))}", "L3/vrf/with-an-svi-is-not-deleted"},
		{"gateways are made and not brought up", "	return c.plane.EnsureSVI(c.svi(id, spec))",
			"	return errPending", "L3/svi/create-comes-up"},
		{"deleted gateways go on", "	return c.plane.RemoveSVI(c.svi(id, c.svis.objects[id].spec))",
			"	return nil", "L3/svi/deleted-svi-does-not-answer"},
	}...)...)
	all = append(all, list(plane+"svi.go", [][4]string{
		{"gateways have MAC addresses of their own", "	s.router = p.routers[s.Network.ID]\n	p.svis",
			"	s.MAC = randomMAC()\n	s.router = p.routers[s.Network.ID]\n	p.svis",
			"L3/svi/gateway-answers-with-its-mac-address"},
		{"gateways have no addresses", "	return p.setAddresses(link, s.prefixes())",
			"	return p.setAddresses(link, nil)", "L3/svi/gateway-answers-with-its-mac-address"},
		{"gateways do not route", "	if err := p.setIPv4(link, ipv4Routing); err != nil {",
			"	if err := p.setIPv4(link, ipv4NotRouting); err != nil {",
			"L3/svi/packets-pass-between-svis-of-a-vrf"},
		{"gateways do not change", "	if err := p.checkVLAN(s.Network); err != nil {",
			"	if before, made := p.svis[s.ID]; made {\n		s = before\n	}\n" +
				"	if err := p.checkVLAN(s.Network); err != nil {",
			"L3/svi/packets-follow-an-update-of-an-svi"},
		{"gateways are in no VRF", "	if link.Attrs().MasterIndex != vrf.Attrs().Index {", "	if false {",
			"L3/svi/packets-pass-between-svis-of-a-vrf"},
	}...)...)
	return append(all, list(plane+"vrf.go", [][4]string{
		{"all VRFs have one table", "	want := &netlink.Vrf{LinkAttrs: attrs, Table: p.tables.of(id)}",
			"	want := &netlink.Vrf{LinkAttrs: attrs, Table: firstTable}",
			"L3/svi/packets-do-not-pass-between-vrfs"},
	}...)...)
}
