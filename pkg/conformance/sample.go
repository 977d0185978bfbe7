// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// NewID returns an id for an object of the kind, which no other object has. It has at most 12
// characters, because agents make names of netdevs of ids.
func (t *T) NewID(k *Kind) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.serial++
	return fmt.Sprintf("%s%s%d", t.cfg.Prefix, k.letter, t.serial)
}

// Sample returns an id and a valid spec for a new object of the kind, and makes what the object
// needs.
func (t *T) Sample(k *Kind) (id string, spec proto.Message) {
	switch k {
	case t.Kinds.LogicalBridge:
		return t.NewID(k), &evpn.LogicalBridgeSpec{VlanId: t.VLAN()}
	case t.Kinds.BridgePort:
		network := t.Network()
		port := t.Port()
		return port.ID, Access(port.MAC, network)
	case t.Kinds.Vrf:
		return t.NewID(k), &evpn.VrfSpec{LoopbackIpPrefix: t.Prefix(32)}
	}

	vrf, bridge := t.Have(t.Kinds.Vrf), t.Network()
	return t.NewID(k), &evpn.SviSpec{
		Vrf: vrf.Name, LogicalBridge: bridge, MacAddress: t.MAC(),
		GwIpPrefix: []*netcommon.IPPrefix{t.Prefix(24)},
	}
}

// Vary returns a valid spec that differs from another one in one field, and the path of that field.
func (t *T) Vary(spec proto.Message) (other proto.Message, path string) {
	other = proto.Clone(spec)
	switch s := other.(type) {
	case *evpn.LogicalBridgeSpec:
		s.VlanId = t.VLAN()
		return s, "spec.vlan_id"
	case *evpn.BridgePortSpec:
		if !t.hasFixedMAC(s.GetMacAddress()) {
			s.MacAddress = t.MAC()
			return s, "spec.mac_address"
		}
		s.LogicalBridges = []string{t.Network()}
		return s, "spec.logical_bridges"
	case *evpn.VrfSpec:
		s.LoopbackIpPrefix = t.Prefix(32)
		return s, "spec.loopback_ip_prefix"
	case *evpn.SviSpec:
		s.GwIpPrefix = []*netcommon.IPPrefix{t.Prefix(24)}
		return s, "spec.gw_ip_prefix"
	}
	panic(fmt.Sprintf("no variant of %T", spec))
}

// Untouched returns the path of a field that [T.Vary] does not change.
func (t *T) Untouched(k *Kind) string {
	return map[*Kind]string{
		t.Kinds.LogicalBridge: "spec.vni", t.Kinds.BridgePort: "spec.ptype",
		t.Kinds.Vrf: "spec.vni", t.Kinds.Svi: "spec.mac_address",
	}[k]
}

// Access returns the spec of an ACCESS port.
func Access(mac net.HardwareAddr, network string) *evpn.BridgePortSpec {
	return &evpn.BridgePortSpec{
		MacAddress: mac, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
		LogicalBridges: []string{network},
	}
}

// TrunkPort returns the spec of a TRUNK port.
func TrunkPort(mac net.HardwareAddr, networks ...string) *evpn.BridgePortSpec {
	return &evpn.BridgePortSpec{
		MacAddress: mac, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
		LogicalBridges: networks,
	}
}

// Network returns the name of a logical bridge that is up.
func (t *T) Network() string {
	if !t.serves(t.Kinds.LogicalBridge) {
		if len(t.cfg.LogicalBridges) == 0 {
			t.Skipf("needs --logical-bridges: LogicalBridgeService is not served")
		}
		return t.cfg.LogicalBridges[0]
	}

	bridge := t.Have(t.Kinds.LogicalBridge)
	t.Prepare(func() { t.WantUp(t.Kinds.LogicalBridge, bridge.Name) })
	return bridge.Name
}

// Port returns a port that the case may make. Its interface exists if ports have interfaces.
func (t *T) Port() Port {
	port := t.BarePort()
	if t.cfg.Hooks.MakePort == nil {
		return port
	}

	t.mu.Lock()
	t.interfaces[port.ID] = port
	t.mu.Unlock()
	if err := t.cfg.Hooks.MakePort(t.ctx, port); err != nil {
		t.Blockf("--make-port for %s: %v", port.ID, err)
	}

	return port
}

// BarePort is Port without its interface.
func (t *T) BarePort() Port {
	if len(t.cfg.Ports) == 0 {
		t.slots++
		return Port{ID: t.NewID(t.Kinds.BridgePort), MAC: t.MAC()}
	}
	if t.slots == len(t.cfg.Ports) {
		t.Skipf("needs more ports: --ports has %d", len(t.cfg.Ports))
	}

	port := t.cfg.Ports[t.slots]
	t.slots++
	if port.MAC == nil {
		port.MAC = t.MAC()
	}

	return port
}

// hasFixedMAC reports whether a MAC address belongs to an interface and cannot be another one.
func (t *T) hasFixedMAC(mac []byte) bool {
	return slices.ContainsFunc(t.cfg.Ports, func(p Port) bool { return bytes.Equal(p.MAC, mac) })
}

// MAC returns a locally administered unicast address that no other object of the run has. Its
// second byte is not 0, because some cards take that byte as the number of a function.
func (t *T) MAC() net.HardwareAddr {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.macs++
	return binary.BigEndian.AppendUint16(slices.Clone(t.macPrefix), t.macs)
}

// VLAN returns a VLAN id that nothing at the agent has, as far as the run knows.
func (t *T) VLAN() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	vlan, ok := t.vlans.next()
	if !ok {
		t.Blockf("all VLAN ids of --vlans are in use")
	}
	return vlan
}

// VNI returns a VNI that nothing at the agent has, as far as the run knows.
func (t *T) VNI() uint32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	vni, ok := t.vnis.next()
	if !ok {
		t.Blockf("all VNIs of --vnis are in use")
	}
	return vni
}

// TakesVLAN reports whether the run may use a VLAN id that is not in its range.
func (t *T) TakesVLAN(vlan uint32) bool { return !t.vlans.foreign[vlan] }

// TakesVNI reports whether the run may use a VNI that is not in its range.
func (t *T) TakesVNI(vni uint32) bool { return !t.vnis.foreign[vni] }

// Prefix returns an IPv4 prefix of 198.18.0.0/15, which is for tests (RFC 2544), with this length.
func (t *T) Prefix(length int32) *netcommon.IPPrefix {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prefixes++
	return IPPrefix(netip.PrefixFrom(
		netip.AddrFrom4([4]byte{198, 18, byte(t.prefixes), 1}), int(length)))
}

// IPPrefix returns a prefix as OPI's API has it.
func IPPrefix(p netip.Prefix) *netcommon.IPPrefix {
	out := &netcommon.IPPrefix{Addr: &netcommon.IPAddress{}, Len: int32(p.Bits())}
	if p.Addr().Is4() {
		v4 := p.Addr().As4()
		out.Addr.Af = netcommon.IpAf_IP_AF_INET
		out.Addr.V4OrV6 = &netcommon.IPAddress_V4Addr{V4Addr: binary.BigEndian.Uint32(v4[:])}
		return out
	}

	v6 := p.Addr().As16()
	out.Addr.Af = netcommon.IpAf_IP_AF_INET6
	out.Addr.V4OrV6 = &netcommon.IPAddress_V6Addr{V6Addr: v6[:]}
	return out
}

// numbers gives out numbers of a range, one after the other and again from the first.
type numbers struct {
	in      Range
	given   uint32 // how many were given out
	foreign map[uint32]bool
}

func (n *numbers) next() (uint32, bool) {
	for range n.in.size() {
		number := n.in.First + n.given%uint32(n.in.size())
		n.given++
		if !n.foreign[number] {
			return number, true
		}
	}
	return 0, false
}

// Lacks returns how a spec differs from another one in the fields that the other has, or "". The
// order of names of logical bridges does not count.
func Lacks(got, want proto.Message) string {
	if got == nil {
		return "the answer has no spec"
	}

	var differs []string
	from := got.ProtoReflect()
	want.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		has := from.Get(f)
		if !equal(f, has, value) {
			differs = append(differs, fmt.Sprintf("%s is %s, want %s", f.Name(), text(f, has),
				text(f, value)))
		}
		return true
	})

	slices.Sort(differs)
	return strings.Join(differs, "; ")
}

func equal(f protoreflect.FieldDescriptor, a, b protoreflect.Value) bool {
	if f.IsList() && f.Kind() == protoreflect.StringKind {
		return slices.Equal(sortedStrings(a.List()), sortedStrings(b.List()))
	}
	return a.Equal(b)
}

func sortedStrings(list protoreflect.List) []string {
	all := make([]string, list.Len())
	for i := range all {
		all[i] = list.Get(i).String()
	}
	slices.Sort(all)
	return all
}

// text returns the value of a field for people.
func text(f protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch {
	case f.IsList() && f.Kind() == protoreflect.StringKind:
		return strings.Join(sortedStrings(v.List()), ", ")
	case f.Kind() == protoreflect.BytesKind:
		return net.HardwareAddr(v.Bytes()).String()
	}
	return v.String()
}

// absent returns the names of the fields that a spec has and another one lacks.
func absent(got, want proto.Message) (fields []string) {
	want.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if got == nil || !got.ProtoReflect().Has(f) {
			fields = append(fields, string(f.Name()))
		}
		return true
	})
	slices.Sort(fields)
	return fields
}

// Without returns a copy of a spec without these fields.
func Without(spec proto.Message, fields []string) proto.Message {
	rest := proto.Clone(spec)
	for _, name := range fields {
		rest.ProtoReflect().Clear(field(rest.ProtoReflect(), protoreflect.Name(name)))
	}
	return rest
}
