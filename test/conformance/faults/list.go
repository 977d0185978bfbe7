// SPDX-License-Identifier: Apache-2.0

package faults

const service = "pkg/bridge/service/"

// list makes faults of one file with one edit each, of name, old text, new text and cases.
func list(file string, rows ...[4]string) []Fault {
	all := make([]Fault, len(rows))
	for i, r := range rows {
		all[i] = Fault{Name: r[0], file: file, edits: []edit{{r[1], r[2]}}, Cases: r[3]}
	}
	return all
}

func collectionFaults() []Fault {
	return append(list(service+"collection.go", [][4]string{
		{"ids are not checked", "if err := c.checkID(id); err != nil {",
			"if err := c.checkID(id); false && err != nil {", "AIP/.*/id-in-upper-case-is-refused"},
		{"another spec is taken for the same", "case !proto.Equal(have.spec, spec):", "case false:",
			"L2-CORE/.*/create-again-of-another-is-refused"},
		{"another spec replaces the first", "	if have != nil {\n		switch {",
			"	if have != nil && proto.Equal(have.spec, spec) {\n		switch {",
			"L2-CORE/.*/create-again-of-another-changes-nothing"},
		{"duplicates have a code of no meaning", "refusal.New(codes.AlreadyExists, refusal.OtherSpec,",
			"refusal.New(codes.Unknown, refusal.OtherSpec,",
			"AIP/.*/error-duplicate-has-a-canonical-code"},
		{"what is made is not brought up", "failure: errPending})\n	c.reconcile(id, false)\n",
			"failure: errPending})\n", "L2-CORE/.*/create-comes-up"},
		{"what is made is not written down",
			"if err := c.store(id, spec, 0); err != nil {\n		return reply, err\n	}\n\n	c.insert",
			"c.insert", "RECOVERY/.*/is-there-after-kill"},
		{"lists lack the first", "		replies = append(replies, reply)",
			"		if i > 0 {\n			replies = append(replies, reply)\n		}",
			"L2-CORE/.*/list-has-it"},
		{"lists have everything twice", "		replies = append(replies, reply)",
			"		replies = append(replies, reply, reply)", "L2-CORE/.*/list-has-it-once"},
		{"lists have no names", "		reply := c.reply(client, id)\n",
			"		reply := c.message(\"x\", c.objects[id].spec, stateUp)\n",
			"L2-CORE/.*/list-has-it"},
		{"Update makes what is missing", "if status.Code(err) == codes.NotFound && allowMissing {\n" +
			"		return c.add(", "if status.Code(err) == codes.NotFound {\n		return c.add(",
			"L2-CORE/.*/update-of-a-missing-one"},
		{"Update makes nothing", "if status.Code(err) == codes.NotFound && allowMissing {\n" +
			"		return c.add(", "if false {\n		return c.add(",
			"L2-CORE/.*/update-of-a-missing-one-allowed"},
		{"a change is not written down",
			"		if err := c.store(id, spec, 0); err != nil {\n			return reply, err\n		}\n",
			"", "RECOVERY/.*/update-is-kept-after-kill"},
		{"a change is forgotten", "		o.spec = spec\n", "", "L2-CORE/.*/update-changes"},
		{"a change is answered without the object",
			"	c.reconcile(id, changed)\n	return c.reply(client, id), nil",
			"	c.reconcile(id, changed)\n	return c.message(c.prefix+id, *new(S), 0), nil",
			"L2-CORE/.*/update-answers-the-object"},
		{"a port stays in the network that it left",
			"		c.unindex(id, o.spec)\n		c.index(id, spec)\n", "",
			"L2-CORE/bridge-port/leaves-its-logical-bridge-when-it-moves"},
		{"a port is not in the network that it moved to",
			"		c.unindex(id, o.spec)\n		c.index(id, spec)\n", "		c.unindex(id, o.spec)\n",
			"L2-CORE/bridge-port/is-in-the-logical-bridge-that-it-moved-to"},
		{"a status that is sent refuses an update", "	id, o, err := c.findForChange(ctx, to.GetName())\n",
			"	id, o, err := c.findForChange(ctx, to.GetName())\n" +
				"	if c.operStatus(to) != 0 {\n		return reply, c.beingDeleted(id)\n	}\n",
			"L2-CORE/.*/update-ignores-the-status"},
		{"Delete of what is missing fails always",
			"if status.Code(err) == codes.NotFound && allowMissing {\n		return &emptypb.Empty{}, nil",
			"if false {\n		return &emptypb.Empty{}, nil",
			"L2-CORE/.*/delete-of-a-missing-one-allowed"},
		{"Delete of what is missing fails never",
			"if status.Code(err) == codes.NotFound && allowMissing {\n		return &emptypb.Empty{}, nil",
			"if status.Code(err) == codes.NotFound {\n		return &emptypb.Empty{}, nil",
			"L2-CORE/.*/delete-of-a-missing-one"},
		{"Delete allowing missing deletes nothing", "	client := access.FromContext(ctx)\n" +
			"	if err := c.checkUnused(", "	if allowMissing {\n		return &emptypb.Empty{}, nil\n" +
			"	}\n	client := access.FromContext(ctx)\n	if err := c.checkUnused(",
			"L2-CORE/.*/delete-allowing-missing-deletes"},
		{"networks in use are deleted", "if err := c.checkUnused(client, id); err != nil {",
			"if err := c.checkUnused(client, id); false && err != nil {",
			"L2-CORE/logical-bridge/with-a-port-is-not-deleted"},
		{"Delete is answered and not done", "	c.reconcile(id, false)\n	if o.failure != nil {",
			"	if o.failure != nil {", "L2-CORE/.*/deleted-is-gone"},
		{"what is deleted stays in memory", "	c.drop(id)\n", "", "L2-CORE/.*/deleted-is-gone"},
		{"what is deleted stays in lists",
			"slices.BinarySearch(c.ids, id); found {\n		c.ids = slices.Delete",
			"slices.BinarySearch(c.ids, id); found && at < 0 {\n		c.ids = slices.Delete",
			"L2-CORE/.*/deleted-leaves-the-list"},
		{"a deleted port keeps its network", "	c.unindex(id, c.objects[id].spec)\n", "",
			"L2-CORE/logical-bridge/without-its-ports-is-deleted"},
		{"a deleted port keeps its MAC address", "	c.unindex(id, c.objects[id].spec)\n", "",
			"L2-CORE/bridge-port/mac-address-is-free-after-delete"},
		{"Delete deletes all", "	c.drop(id)\n", "	for other := range maps.Clone(c.objects) {\n" +
			"		c.drop(other)\n	}\n", "L2-CORE/.*/delete-leaves-the-others"},
		{"missing ones have another code", "refusal.New(codes.NotFound, refusal.Missing,",
			"refusal.New(codes.Internal, refusal.Missing,", "L2-CORE/.*/get-of-a-missing-one"},
		{"names lack the collection", "return c.message(c.prefix+id, o.spec,",
			"return c.message(id, o.spec,", "L2-CORE/.*/get-answers-what-was-made"},
		{"there is no name", "return c.message(c.prefix+id, o.spec,",
			"return c.message(\"\", o.spec,", "L2-CORE/.*/create-answers-a-name"},
		{"what is up has an error", "Status: evpn.CompStatus_COMP_STATUS_SUCCESS}",
			"Status: evpn.CompStatus_COMP_STATUS_ERROR}", "L2-CORE/.*/up-has-no-component-in-error"},
		{"why it is down is not said",
			"		component.Details = c.agent.errorText(client, failure)\n", "",
			"L2-CORE/bridge-port/without-its-interface-says-so"},
		{"lists are not sorted", "c.ids = slices.Insert(c.ids, at, id)",
			"_ = at\n	c.ids = append(c.ids, id)", "SCALE/.*/many-are-listed"},
	}...), Fault{
		Name: "what is deleted stays in the file", file: service + "collection.go",
		edits: []edit{
			{"tx.Delete(c.bucket, []byte(id)), ", ""},
			{"c.store(id, o.spec, stateDeleting)", "c.store(id, o.spec, 0)"},
		},
		Cases: "RECOVERY/.*/deleted-stays-gone-after-kill",
	}, Fault{
		Name: "large lists lose what comes after a page", file: service + "collection.go",
		edits: []edit{
			{"bytes > maxPageBytes && i > 0", "bytes > 500 && i > 0"},
			{"return replies, pageToken(ids[i-1]), nil", "return replies, \"\", nil"},
		},
		Cases: "SCALE/.*/many-are-listed",
	})
}

func resourceFaults() []Fault {
	const form = "`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`"
	return list(service+"resource.go", [][4]string{
		{"ids of 3 characters are taken", form, "`^[a-z][a-z0-9-]{1,61}[a-z0-9]$`",
			"AIP/logical-bridge/id-of-3-characters-is-refused"},
		{"ids of 64 characters are taken", form, "`^[a-z][a-z0-9-]{2,80}[a-z0-9]$`",
			"AIP/logical-bridge/id-of-64-characters-is-refused"},
		{"ids of 63 characters are refused", form, "`^[a-z][a-z0-9-]{2,40}[a-z0-9]$`",
			"AIP/logical-bridge/id-of-63-characters-is-taken"},
		{"ids of 4 characters are refused", form, "`^[a-z][a-z0-9-]{3,61}[a-z0-9]$`",
			"AIP/logical-bridge/id-of-4-characters-is-taken"},
		{"ids may have upper case", form, "`^[a-z][a-zA-Z0-9-]{2,61}[a-zA-Z0-9]$`",
			"AIP/logical-bridge/id-in-upper-case-is-refused"},
		{"ids may have underscores", form, "`^[a-z][a-z0-9_-]{2,61}[a-z0-9]$`",
			"AIP/logical-bridge/id-with-an-underscore-is-refused"},
		{"ids may have slashes", form, "`^[a-z][a-z0-9/-]{2,61}[a-z0-9]$`",
			"AIP/logical-bridge/id-with-a-slash-is-refused"},
		{"ids may have blanks", form, "`^[a-z][a-z0-9 -]{2,61}[a-z0-9]$`",
			"AIP/logical-bridge/id-with-a-blank-is-refused"},
		{"ids may have other letters", form, "`^[a-z][\\pL0-9-]{2,61}[\\pL0-9]$`",
			"AIP/logical-bridge/id-with-other-letters-is-refused"},
		{"a wrong id is no invalid argument",
			"return refusal.New(codes.InvalidArgument, refusal.InvalidID,",
			"return refusal.New(codes.Internal, refusal.InvalidID,",
			"AIP/.*/wrong-id-is-an-invalid-argument"},
		{"a name is its last part", "if id, ok := strings.CutPrefix(name, prefix); ok {",
			"if id := name[strings.LastIndex(name, \"/\")+1:]; id != prefix {",
			"SECURITY/.*/name-with-dots-is-refused"},
		{"an id is a name", "for _, prefix := range []string{n.prefix, n.protoAlias} {",
			"for _, prefix := range []string{n.prefix, n.protoAlias, \"\"} {",
			"AIP/.*/id-is-a-part-of-the-name-only"},
		{"names of other kinds are taken", "[]string{n.prefix, n.protoAlias} {",
			"[]string{n.prefix, \"bridgePorts/\", \"logicalBridges/\", \"vrfs/\", \"svis/\"} {",
			"AIP/.*/name-of-another-kind-is-not-found"},
		{"documented names are not taken", "[]string{n.prefix, n.protoAlias} {",
			"[]string{n.prefix} {", "AIP/.*/get-by-the-documented-name"},
		{"what is down is up", "	case failure != nil:\n		return stateDown",
			"	case failure != nil:\n		return stateUp",
			"L2-CORE/bridge-port/without-its-interface-is-not-up"},
		{"what is up is down", "	return stateUp\n}", "	return stateDown\n}",
			"L2-CORE/.*/create-comes-up"},
		{"what is up has no state", "	return stateUp\n}", "	return 0\n}",
			"L2-CORE/.*/status-is-known"},
		{"negative sizes of pages are taken", "	if size < 0 {", "	if size < -9 {",
			"AIP/.*/page-size-negative-is-refused"},
		{"sizes of pages are not heeded", "size = min(cmp.Or(size, 50), 250)",
			"size = min(cmp.Or(50, size), 250)",
			"AIP/.*/page-is-not-larger-than-asked"},
		{"large pages are refused", "	if size < 0 {", "	if size < 0 || size > 1000 {",
			"AIP/.*/page-size-huge-is-taken"},
		{"pages without a size are refused", "	if size < 0 {", "	if size < 1 {",
			"AIP/.*/page-size-absent-is-taken"},
		{"pages overlap", "	if found {\n		first++\n	}", "	_ = found",
			"AIP/.*/pages-of-two-have-all"},
		{"pages leave one out", "	if found {\n		first++\n	}", "	if found {\n		first += 2\n	}",
			"AIP/.*/pages-of-one-have-all"},
		{"the first page is the last", "return ids, pageToken(ids[size-1]), nil",
			"return ids, \"\", nil", "AIP/.*/pages-of-one-have-all"},
		{"the last page does not say so", "		return ids, \"\", nil",
			"		return ids, pageToken(cmp.Or(string(last), \"zzzz\")), nil",
			"AIP/.*/last-page-says-so"},
		{"tokens do not fit into URLs",
			"func pageToken(last string) string { return base64.RawURLEncoding.EncodeToString([]byte(last)) }",
			"func pageToken(last string) string { return \"/\" + last }",
			"AIP/.*/page-token-fits-into-urls"},
		{"mask * is unknown", "slices.Contains(paths, \"*\") || ", "",
			"L2-CORE/.*/update-with-mask-star"},
		{"mask spec is unknown", " || slices.Contains(paths, \"spec\")", "",
			"L2-CORE/.*/update-with-mask-spec"},
		{"without a mask all is replaced", "whole := slices", "whole := len(paths) == 0 || slices",
			"L2-CORE/.*/update-without-mask-keeps-absent-fields"},
		{"without a mask nothing changes", "	if len(paths) == 0 {\n		from.Range",
			"	if len(paths) > 99 {\n		from.Range", "L2-CORE/.*/update-changes"},
		{"masks are not heeded", "	merged := proto.CloneOf(have)\n",
			"	merged := proto.CloneOf(have)\n	if len(paths) > 0 {\n		return want, nil\n	}\n",
			"L2-CORE/.*/update-with-mask-leaves-other-fields"},
		{"status in the mask is refused", " || path == \"status\" || strings",
			" || strings", "L2-CORE/.*/update-ignores-status-in-the-mask"},
		{"unknown fields in the mask are taken", "		if !inSpec || field == nil {",
			"		if field == nil {\n			continue\n		}\n		if !inSpec {",
			"L2-CORE/.*/update-with-an-unknown-field-in-the-mask"},
		{"masks do not clear fields", "		to.Clear(field)\n", "",
			"L2-OVERLAY/logical-bridge/update-takes-a-vni-away"},
		{"masks do not set fields", "		if from.Has(field) {", "		if false && from.Has(field) {",
			"L2-CORE/.*/update-with-mask-changes-the-field"},
	}...)
}

func networkFaults() []Fault {
	return list(service+"networks.go", [][4]string{
		{"VLAN 0 is taken", "vlan < 1 || vlan > plane.MaxVLAN", "vlan > plane.MaxVLAN",
			"L2-CORE/logical-bridge/vlan-id-missing-is-refused"},
		{"VLAN 4095 is taken", "vlan > plane.MaxVLAN", "vlan > 4095",
			"L2-CORE/logical-bridge/vlan-id-4095-is-refused"},
		{"VLAN 4096 is taken", "vlan > plane.MaxVLAN", "vlan > 4096",
			"L2-CORE/logical-bridge/vlan-id-4096-is-refused"},
		{"VLANs are cut to 16 bits", "vlan > plane.MaxVLAN", "uint16(vlan) > plane.MaxVLAN",
			"L2-CORE/logical-bridge/vlan-id-of-32-bits-is-refused"},
		{"VLAN 4094 is refused", "vlan > plane.MaxVLAN", "vlan > 4093",
			"L2-CORE/logical-bridge/vlan-id-4094-is-taken"},
		{"VLAN 1 is refused", "vlan < 1 ||", "vlan < 2 ||",
			"L2-CORE/logical-bridge/vlan-id-1-is-taken"},
		{"VNIs of 25 bits are taken", "vni > plane.MaxVNI", "vni > 1<<26",
			"L2-OVERLAY/logical-bridge/vni-of-25-bits-is-refused"},
		{"the largest VNI is refused", "vni > plane.MaxVNI", "vni >= plane.MaxVNI",
			"L2-OVERLAY/logical-bridge/largest-vni-is-taken"},
		{"two networks have one VNI", "	case sameVNI != \"\":", "	case false:",
			"L2-OVERLAY/logical-bridge/vni-of-another-one-is-refused"},
		{"VNIs are not found", "keyVXLAN, keyVNI(spec.GetVni()))", "keyVXLAN)",
			"L2-OVERLAY/logical-bridge/update-to-the-vni-of-another-is-refused"},
		{"VTEPs are not looked at", "	case !vtepOf(spec).IsValid():", "	case false:",
			"L2-OVERLAY/logical-bridge/vtep-of-5-bytes-is-refused"},
		{"a VNI needs a VTEP", "	case spec.GetVtepIpPrefix() == nil:\n		return nil",
			"	case spec.GetVtepIpPrefix() == nil && spec.Vni == nil:\n		return nil",
			"L2-OVERLAY/logical-bridge/vtep-may-be-absent"},
		{"all ids that the agent makes are one", "strings.ToLower(rand.Text())",
			"strings.ToLower(rand.Text())[:0]+\"one\"",
			"L2-CORE/logical-bridge/create-without-id-makes-different-ones"},
		{"the agent makes no ids", "cmp.Or(req.GetLogicalBridgeId(), ",
			"cmp.Or(req.GetLogicalBridgeId(), \"-\", ",
			"L2-CORE/logical-bridge/create-without-id-makes-one"},
		{"a name overrules the id", "	return s.networks.create(ctx, id, req",
			"	if n := req.GetLogicalBridge().GetName(); n != \"\" {\n" +
				"		id = n[strings.LastIndex(n, \"/\")+1:]\n	}\n" +
				"	return s.networks.create(ctx, id, req",
			"L2-CORE/logical-bridge/create-ignores-the-name"},
		{"a status that is sent is refused", "	return s.networks.create(ctx, id, req",
			"	if req.GetLogicalBridge().GetStatus() != nil {\n" +
				"		return nil, refusal.New(codes.InvalidArgument, refusal.InvalidSpec, \"status\")" +
				"\n	}\n	return s.networks.create(ctx, id, req",
			"L2-CORE/logical-bridge/create-ignores-the-status"},
		{"VNIs are not shown", "&evpn.LogicalBridge{Name: name, Spec: spec}",
			"&evpn.LogicalBridge{Name: name, Spec: &evpn.LogicalBridgeSpec{" +
				"VlanId: spec.GetVlanId()}}",
			"L2-OVERLAY/logical-bridge/vni-is-shown-by-get"},
		{"a VNI is shown where there is none", "&evpn.LogicalBridge{Name: name, Spec: spec}",
			"&evpn.LogicalBridge{Name: name, Spec: &evpn.LogicalBridgeSpec{" +
				"VlanId: spec.GetVlanId(), Vni: proto.Uint32(spec.GetVni())}}",
			"L2-OVERLAY/logical-bridge/without-a-vni-shows-none"},
		{"networks with ports are deleted", "	if user.ID == \"\" {\n		return nil",
			"	if user.ID != \"x\" {\n		return nil",
			"L2-CORE/logical-bridge/with-a-port-is-not-deleted"},
		{"VXLAN is not removed", "c.plane.RemoveNetwork(id)", "error(nil)",
			"L2-OVERLAY/logical-bridge/vni-is-free-after-delete"},
		{"masks of networks are not heeded", "req.GetUpdateMask(),", "nil,",
			"L2-CORE/logical-bridge/update-with-mask-leaves-other-fields"},
		{"Get of networks has no spec", "	return s.networks.get(ctx, req.GetName())",
			"	n, err := s.networks.get(ctx, req.GetName())\n	if err == nil {\n" +
				"		n.Spec = nil\n	}\n	return n, err",
			"L2-CORE/logical-bridge/get-answers-what-was-made"},
		{"Get of networks has another name", "	return s.networks.get(ctx, req.GetName())",
			"	n, err := s.networks.get(ctx, req.GetName())\n	if err == nil {\n" +
				"		n.Name = strings.Replace(n.Name, networkNames.prefix, \"logicalBridges/\", 1)" +
				"\n	}\n	return n, err",
			"L2-CORE/logical-bridge/get-answers-the-same-name"},
		{"lists of networks end after a page", "NextPageToken: next}, err",
			"NextPageToken: next[:0]}, err",
			"AIP/logical-bridge/pages-of-one-have-all"},
		{"lists of networks have no specs", "return &evpn.ListLogicalBridgesResponse{",
			"for i := range networks {\n		networks[i].Spec = nil\n	}\n" +
				"	return &evpn.ListLogicalBridgesResponse{",
			"L2-CORE/logical-bridge/list-has-all-of-it"},
	}...)
}

func portFaults() []Fault {
	return list(service+"ports.go", [][4]string{
		{"MAC addresses may be long", "len(mac) != 6", "len(mac) < 6",
			"L2-CORE/bridge-port/mac-address-of-8-bytes-is-refused"},
		{"MAC addresses may be text", "len(mac) != 6", "len(mac) != 6 && len(mac) != 17",
			"L2-CORE/bridge-port/mac-address-as-text-is-refused"},
		{"MAC addresses may be short", "len(mac) != 6", "len(mac) < 5 || len(mac) > 6",
			"L2-CORE/bridge-port/mac-address-of-5-bytes-is-refused"},
		{"MAC addresses may be multicast", "mac[0]&1 != 0", "mac[0] == 255",
			"L2-CORE/bridge-port/mac-address-multicast-is-refused"},
		{"MAC addresses may be broadcast", "mac[0]&1 != 0", "mac[0]&3 == 1",
			"L2-CORE/bridge-port/mac-address-broadcast-is-refused"},
		{"the MAC address may be zero", " || bytes.Equal(mac, make([]byte, 6)) {",
			" || len(bytes.TrimSpace(mac)) > 6 {",
			"L2-CORE/bridge-port/mac-address-zero-is-refused"},
		{"the type may be missing", "	case !access && !trunk:",
			"	case !access && !trunk && spec.GetPtype() != 0:",
			"L2-CORE/bridge-port/ptype-missing-is-refused"},
		{"the type may be unknown", "	case !access && !trunk:", "	case spec.GetPtype() == 0:",
			"L2-CORE/bridge-port/ptype-unknown-is-refused"},
		{"ACCESS may be in two", "	case access && n != 1:", "	case access && n < 1:",
			"L2-CORE/bridge-port/access-in-two-logical-bridges-is-refused"},
		{"ACCESS may be in none", "	case access && n != 1:", "	case access && n > 1:",
			"L2-CORE/bridge-port/access-in-no-logical-bridge-is-refused"},
		{"networks may be missing", "		case n == nil:\n			return refuse(",
			"		case n == nil:\n			break\n		case n.spec == nil:\n			return refuse(",
			"L2-CORE/bridge-port/logical-bridge-missing-is-refused"},
		{"two ports have one MAC address", "id); other != \"\" {\n			return refuse(",
			"id); other == \"x\" {\n			return refuse(",
			"L2-CORE/bridge-port/mac-address-of-another-port-is-refused"},
		{"ports do not show their type", "m := &evpn.BridgePort{Name: name, Spec: spec}",
			"m := &evpn.BridgePort{Name: name, Spec: &evpn.BridgePortSpec{" +
				"MacAddress: spec.GetMacAddress(), LogicalBridges: spec.GetLogicalBridges()}}",
			"L2-CORE/bridge-port/get-answers-what-was-made"},
		{"the answer of a port lacks its networks",
			"		return s.ports.create(ctx, id, spec)\n	}\n",
			"		p, err := s.ports.create(ctx, id, spec)\n		if err == nil {\n" +
				"			p.Spec = &evpn.BridgePortSpec{MacAddress: spec.GetMacAddress()}\n		}\n" +
				"		return p, err\n	}\n",
			"L2-CORE/bridge-port/create-answers-the-object"},
		{"ids are changed", "		return s.ports.create(ctx, id, spec)\n	}\n",
			"		return s.ports.create(ctx, id+\"0\", spec)\n	}\n",
			"L2-CORE/bridge-port/create-id-ends-the-name"},
		{"errors of the data plane are lost", "	return c.plane.Attach(id, c.membership(id, spec))",
			"	_ = c.plane.Attach(id, c.membership(id, spec))\n	return nil",
			"L2-CORE/bridge-port/without-its-interface-is-not-up"},
		{"masks of ports are not heeded", "req.GetUpdateMask(), ", "nil, ",
			"L2-CORE/bridge-port/update-with-mask-leaves-other-fields"},
		{"Update makes no ports", "req.GetUpdateMask(), req.GetAllowMissing()",
			"req.GetUpdateMask(), false", "L2-CORE/bridge-port/update-of-a-missing-one-allowed"},
		{"a deletion that is repeated fails", "s.ports.delete(ctx, req.GetName(), req.GetAllowMissing()",
			"s.ports.delete(ctx, req.GetName(), false", "BLIND/bridge-port/delete-again"},
		{"a port is made once for ever", "		return s.ports.create(ctx, id, spec)\n	}\n",
			"		if s.ports.objects[id] != nil {\n			return nil, refusal.New(" +
				"codes.Internal, refusal.OtherSpec, \"exists\")\n		}\n" +
				"		return s.ports.create(ctx, id, spec)\n	}\n",
			"BLIND/bridge-port/create-again"},
		{"lists of ports begin again", "req.GetPageSize(), req.GetPageToken()",
			"req.GetPageSize(), req.GetPageToken()[:0]", "AIP/bridge-port/pages-of-two-have-all"},
		{"lists of ports heed no sizes", "s.ports.list(ctx, req.GetPageSize(), ",
			"s.ports.list(ctx, 0, ", "AIP/bridge-port/page-is-not-larger-than-asked"},
		{"a request without a spec ends the agent", "	case spec == nil:\n		return errors.New",
			"	case spec == nil:\n		go func() { panic(\"spec\") }()\n		<-make(chan int)\n" +
				"		return errors.New",
			"L2-CORE/bridge-port/spec-missing-is-refused"},
	}...)
}

func otherFaults() []Fault {
	all := list("pkg/bridge/refusal/refusal.go", [][4]string{
		{"errors have no reasons", "	detailed, err := s.WithDetails(",
			"	if s.Code() != codes.OK {\n		return s.Err()\n	}\n	detailed, err := s.WithDetails(",
			"AIP/.*/error-missing-has-a-reason"},
		{"reasons are in lower case", "Reason: string(reason), Domain",
			"Reason: strings.ToLower(string(reason)), Domain",
			"AIP/.*/error-missing-has-one-reason-of-the-form"},
		{"reasons have no domain", "Domain: Domain})", "})",
			"AIP/.*/error-wrong-argument-has-one-reason-of-the-form"},
		{"errors have two reasons", "Domain: Domain})",
			"Domain: Domain}, &errdetails.ErrorInfo{Reason: \"ERROR\", Domain: Domain})",
			"AIP/.*/error-duplicate-has-one-reason-of-the-form"},
		{"errors have no text", "withReason(status.New(code, text), reason)",
			"withReason(status.New(code, text[:0]), reason)",
			"AIP/.*/error-missing-has-a-message"},
	}...)

	all = append(all, list("pkg/bridge/inventory/server.go", [][4]string{
		{"the inventory fails", "	return inv, nil\n",
			"	return nil, status.Error(codes.Internal, \"no\")\n", "INVENTORY/inventory/get-answers"},
		{"the inventory ends the agent", "	return inv, nil\n",
			"	os.Exit(3)\n	return inv, nil\n", "INVENTORY/inventory/get-answers"},
		{"the inventory is empty", "	return inv, nil\n",
			"	return &inventory.Inventory{}, nil\n", "INVENTORY/inventory/says-something"},
		{"the date of the firmware is as ISO has it", "Date: dmi(\"bios_date\"),",
			"Date: \"2024-01-31\",", "INVENTORY/inventory/bios-date-has-its-form"},
		{"the UUID is a serial number", "dmi(\"product_uuid\"),", "\"MT2334XZ0LTK\",",
			"INVENTORY/inventory/uuid-has-its-form"},
	}...)...)

	all = append(all, list(service+"agent.go", [][4]string{
		{"nothing is brought up at the start", "	a.reconcileAll()\n	if err := a.filter.Sweep()",
			"	if err := a.filter.Sweep()", "RECOVERY/.*/is-up-after-kill"},
	}...)...)
	all = append(all, list(service+"svis.go", [][4]string{
		{"VTEPs may be long", " ||\n		int(length) > address.BitLen() {", " {",
			"L2-OVERLAY/logical-bridge/vtep-length-of-129-is-refused"},
		{"VTEPs may be short", " || length < 1 ||\n", " ||\n",
			"L2-OVERLAY/logical-bridge/vtep-length-negative-is-refused"},
	}...)...)
	all = append(all, list(service+"state.go", [][4]string{
		{"networks are not read at the start", "errors.Join(a.networks.load(tx), a.ports.load(tx), ",
			"errors.Join(a.ports.load(tx), ", "RECOVERY/logical-bridge/is-there-after-term"},
		{"ports are not read at the start", "errors.Join(a.networks.load(tx), a.ports.load(tx), ",
			"errors.Join(a.networks.load(tx), ", "RECOVERY/bridge-port/is-listed-after-term"},
	}...)...)

	all = append(all, list(service+"run.go", [][4]string{
		{"interfaces that go are not noticed",
			"		a.reconcileObject(change.Object)\n", "",
			"L2-CORE/bridge-port/goes-down-with-its-interface"},
	}...)...)
	all = append(all, list(service+"server.go", [][4]string{
		{"ports are not served", "	evpn.RegisterBridgePortServiceServer(s, portServer{Agent: a})\n",
			"", "L2-CORE/bridge-port/create-answers-a-name"},
		{"the inventory is not served", "	opiinventory.RegisterInventoryServiceServer(s,\n" +
			"		inventory.NewServer(a.cfg.Plane.Representors.HostPFs))\n",
			"	_ = inventory.NewServer\n	_ = opiinventory.RegisterInventoryServiceServer\n",
			"INVENTORY/inventory/get-answers"},
		{"a defect ends the agent", "	return handle(ctx, req)\n}\n",
			"	if r, ok := req.(interface{ GetName() string }); ok && len(r.GetName()) > 9999 {\n" +
				"		go func() { panic(\"long\") }()\n		<-ctx.Done()\n	}\n" +
				"	return handle(ctx, req)\n}\n",
			"SECURITY/.*/name-of-100000-characters-is-refused"},
	}...)...)

	all = append(all, list("pkg/bridge/plane/vxlan.go", [][4]string{
		{"VXLAN ports stay", "func (p *Plane) removeVXLAN(network string) error {\n",
			"func (p *Plane) removeVXLAN(network string) error {\n	if network != \"\" {\n" +
				"		return nil\n	}\n",
			"L2-OVERLAY/logical-bridge/vni-is-free-after-delete"},
	}...)...)
	return append(all, list("pkg/bridge/plane/ports.go", [][4]string{
		{"ports cannot be deleted without their interface",
			"	if link == nil {\n		return nil\n	}\n	if other",
			"	if link == nil {\n		return errors.New(\"missing\")\n	}\n	if other",
			"L2-CORE/bridge-port/without-its-interface-can-be-deleted"},
		{"interfaces are never released", "	err = p.release(link)\n",
			"	err = errors.New(\"never\")\n", "L2-CORE/bridge-port/deleted-is-gone"},
	}...)...)
}
