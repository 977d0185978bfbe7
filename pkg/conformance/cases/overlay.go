// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"net/netip"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// Sentences of the proto files.
const (
	saysVNI  = "VXLAN VNI for the L2 EVPN. Also used as EVPN route target"
	saysVTEP = "IPv4 or IPv6 IP address prefix for the VXLAN TEP"
	lenV4    = "IP Prefix length (range:0-128)"
)

// withVNI returns the spec of a logical bridge with a VNI.
func withVNI(t *T) *evpn.LogicalBridgeSpec {
	return &evpn.LogicalBridgeSpec{VlanId: t.VLAN(), Vni: proto.Uint32(t.VNI())}
}

// haveVNI makes a logical bridge with a VNI. It skips the case if the agent says that it does not
// do that here.
func haveVNI(t *T, k *Kind) conformance.Object {
	id, spec := t.NewID(k), withVNI(t)
	var got conformance.Message
	var err error
	t.Prepare(func() { got, err = t.Create(k, id, spec) })
	if status.Code(err) == codes.FailedPrecondition {
		t.Skipf("not served: logical bridges with a VNI: %s", err)
	}
	t.Prepare(func() { t.WantOK("Create with a VNI", err) })
	return conformance.Object{Kind: k, ID: id, Name: got.GetName(), Spec: spec, Got: got}
}

func haveVNIUp(t *T, k *Kind) conformance.Object {
	o := haveVNI(t, k)
	t.Prepare(func() { t.WantUp(k, o.Name) })
	return o
}

// spoiledVNI returns a case for a spec with a VNI that an agent must refuse. It comes to its
// sentence only if the agent takes the spec as it was before.
func spoiledVNI(
	k *Kind, name, source, says, violation string, spoil func(*T, *evpn.LogicalBridgeSpec),
) Case {
	return Case{
		Name: name + "-is-refused", Source: source, Says: says, Violation: violation,
		Run: func(t *T) {
			haveVNI(t, k)
			spec := withVNI(t)
			spoil(t, spec)
			got, err := t.Create(k, t.NewID(k), spec)
			if err == nil {
				t.Failf("Create: OK with %v, want an error", conformance.SpecOf(got))
			}
		},
	}
}

// wrongPlace is what it means for pods that frames do not reach another xPU.
const wrongPlace = "Pods of several xPUs that should reach each other do not."

func l2Overlay(kinds conformance.Kinds) []Case {
	k := kinds.LogicalBridge
	return about(conformance.L2Overlay, k,
		slices.Concat(newVNIs(k), tunnelEndpoints(k), keptVNIs(k), changedVNIs(k)))
}

// newVNIs are cases about a new logical bridge with a VNI.
func newVNIs(k *Kind) []Case {
	return []Case{
		{
			Name: "vni-comes-up", Says: "Logical Bridge is up", Violation: wrongPlace,
			Run: func(t *T) {
				o := haveVNI(t, k)
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "vni-is-answered", Source: "AIP-133",
			Says:      "The response must include any fields that were provided.",
			Violation: "A controller takes its network for another one.",
			Run: func(t *T) {
				o := haveVNI(t, k)
				t.WantSpec("the answer", o.Got, o.Spec)
			},
		},
		{
			Name: "vni-is-shown-by-get", Source: "AIP-121", Says: strongCreate,
			Violation: "A controller takes its network for another one.",
			Run:       func(t *T) { t.WantAsMade(haveVNI(t, k)) },
		},
		{
			Name: "vni-is-shown-by-list", Source: "AIP-132", Level: conformance.Should,
			Says: "The response should usually include fully-populated resources.",
			Violation: "A controller does not see that a VNI is in use, and gives it to another " +
				"tenant.",
			Run: func(t *T) {
				o := haveVNI(t, k)
				got := t.Listed(k, o.Name)
				if got == nil {
					t.Failf("the list lacks %s", o.Name)
				}
				t.WantSpec("the list", got, o.Spec)
			},
		},
		{
			Name: "without-a-vni-shows-none", Source: "AIP-121", Says: strongCreate +
				" (The field vni is optional, and its absence is a value.)",
			Violation: "A network that is to stay on its xPU seems to reach others.",
			Run: func(t *T) {
				o := t.Have(k)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				if spec, _ := conformance.SpecOf(got).(*evpn.LogicalBridgeSpec); spec.Vni != nil {
					t.Failf("Get has the VNI %d, Create had none", spec.GetVni())
				}
			},
		},
		{
			Name:      "largest-vni-is-taken",
			Says:      saysVNI + " (RFC 7348: a VNI has 24 bits.)",
			Violation: "A tenant whose VNI is large has no network.",
			Run: func(t *T) {
				haveVNI(t, k)
				const largest = 1<<24 - 1
				if !t.TakesVNI(largest) {
					t.Skipf("VNI %d is in use at the agent", largest)
				}
				spec := &evpn.LogicalBridgeSpec{VlanId: t.VLAN(), Vni: proto.Uint32(largest)}
				got, err := t.Create(k, t.NewID(k), spec)
				t.WantOK("Create with VNI 16777215", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		spoiledVNI(k, "vni-of-25-bits", "", saysVNI+" (RFC 7348: a VNI has 24 bits.)",
			"Pods are in the VNI that the lower 24 bits say, which is another tenant's.",
			func(_ *T, s *evpn.LogicalBridgeSpec) { s.Vni = proto.Uint32(1<<24 + 5) }),
		spoiledVNI(k, "vni-of-another-one", "",
			saysVNI+" (RFC 7348: a VNI identifies a segment.)",
			"Two tenants have one network.",
			func(t *T, s *evpn.LogicalBridgeSpec) {
				s.Vni = haveVNI(t, k).Spec.(*evpn.LogicalBridgeSpec).Vni
			}),
	}
}

// tunnelEndpoints are cases about vtep_ip_prefix.
func tunnelEndpoints(k *Kind) []Case {
	return []Case{
		spoiledVNI(k, "vtep-of-5-bytes", "", saysVTEP, wrongPlace,
			func(_ *T, s *evpn.LogicalBridgeSpec) {
				s.VtepIpPrefix = &netcommon.IPPrefix{Len: 64, Addr: &netcommon.IPAddress{
					Af:     netcommon.IpAf_IP_AF_INET6,
					V4OrV6: &netcommon.IPAddress_V6Addr{V6Addr: []byte{1, 2, 3, 4, 5}},
				}}
			}),
		spoiledVNI(k, "vtep-length-of-129", "", lenV4, wrongPlace, withVTEPLength(129)),
		spoiledVNI(k, "vtep-length-negative", "", lenV4, wrongPlace, withVTEPLength(-1)),
		{
			Name: "vtep-may-be-absent", Source: "AIP-203",
			Says: "The use of OPTIONAL indicates that a field is not required.",
			Violation: "The agent ends when a network has no address for its tunnels, and all " +
				"pods of the xPU wait.",
			Run: func(t *T) {
				_, err := t.Create(k, t.NewID(k), withVNI(t))
				if status.Code(err) == codes.FailedPrecondition {
					t.Skipf("not served: logical bridges with a VNI: %s", err)
				}
				t.WantOK("Create with a VNI and without vtep_ip_prefix", err)
			},
		},
		{
			Name: "vtep-is-taken", Says: saysVTEP, Violation: wrongPlace,
			Run: func(t *T) {
				if !t.Config().VTEP.IsValid() {
					t.Skipf("needs --vtep: an address of the xPU for VXLAN tunnels")
				}
				haveVNI(t, k)
				spec := withVNI(t)
				spec.VtepIpPrefix = conformance.IPPrefix(t.Config().VTEP)
				got, err := t.Create(k, t.NewID(k), spec)
				t.WantOK("Create with vtep_ip_prefix", err)
				t.WantSpec("the answer", got, spec)
				t.WantUp(k, got.GetName())
			},
		},
	}
}

// keptVNIs are cases about VNIs while ports and other logical bridges come and go.
func keptVNIs(k *Kind) []Case {
	return []Case{
		{
			Name: "port-comes-up", Says: "Bridge Port is up", Violation: wrongPlace,
			Run: func(t *T) {
				t.NeedInterfaces()
				bridge, port := haveVNIUp(t, k), t.Port()
				got, err := t.Create(t.Kinds.BridgePort, port.ID,
					conformance.Access(port.MAC, bridge.Name))
				t.WantOK("Create of a port", err)
				t.WantUp(t.Kinds.BridgePort, got.GetName())
			},
		},
		{
			Name: "vni-is-free-after-delete", Source: "AIP-121", Says: strongDelete,
			Violation: "Each network that was deleted makes a VNI useless.",
			Run: func(t *T) {
				o := haveVNI(t, k)
				t.Prepare(func() {
					t.WantOK("Delete", t.Delete(k, o.Name, false))
					t.WantGone(k, o.Name)
				})
				spec := withVNI(t)
				spec.Vni = o.Spec.(*evpn.LogicalBridgeSpec).Vni
				got, err := t.Create(k, t.NewID(k), spec)
				t.WantOK("Create with the VNI of a deleted one", err)
				t.WantUp(k, got.GetName())
			},
		},
		{
			Name: "vni-stays-when-another-is-deleted", Says: "Logical Bridge is up",
			Violation: "The end of one tenant's network ends another's.",
			Run: func(t *T) {
				stays, gone := haveVNIUp(t, k), haveVNIUp(t, k)
				t.WantOK("Delete of another one", t.Delete(k, gone.Name, false))
				t.WantGone(k, gone.Name)
				t.WantAsMade(stays)
				t.WantUp(k, stays.Name)
			},
		},
		{
			Name: "vni-stays-when-a-failed-one-is-deleted", Says: "Logical Bridge is up",
			Violation: "A mistake in one tenant's network ends another's.",
			Run: func(t *T) {
				stays := haveVNIUp(t, k)
				spec := withVNI(t)
				spec.Vni = stays.Spec.(*evpn.LogicalBridgeSpec).Vni
				id := t.NewID(k)
				got, err := t.Create(k, id, spec)
				if err == nil {
					t.WantOK("Delete", t.Delete(k, got.GetName(), true))
				}
				t.WantAsMade(stays)
				t.WantUp(k, stays.Name)
			},
		},
	}
}

// changedVNIs are cases about an Update of the VNI.
func changedVNIs(k *Kind) []Case {
	return []Case{
		{
			Name: "update-sets-a-vni", Source: "AIP-121", Says: strongUpdate,
			Violation: "A network that is extended to other xPUs does not reach them.",
			Run: func(t *T) {
				haveVNI(t, k)
				o := t.Have(k)
				spec := proto.CloneOf(o.Spec.(*evpn.LogicalBridgeSpec))
				spec.Vni = proto.Uint32(t.VNI())
				_, err := t.Update(k, updated(o, spec), []string{"spec.vni"}, false)
				t.WantOK("Update with mask spec.vni", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: spec})
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "update-takes-a-vni-away", Source: "AIP-134",
			Says: "Only fields declared in the field mask are updated. (A field of the mask that " +
				"the object lacks is cleared.)",
			Violation: "A network that is to stay on its xPU goes on to reach others.",
			Run: func(t *T) {
				o := haveVNI(t, k)
				spec := proto.CloneOf(o.Spec.(*evpn.LogicalBridgeSpec))
				spec.Vni = nil
				_, err := t.Update(k, updated(o, spec), []string{"spec.vni"}, false)
				t.WantOK("Update with mask spec.vni", err)
				got, err := t.Get(k, o.Name)
				t.WantOK("Get", err)
				if spec := conformance.SpecOf(got).(*evpn.LogicalBridgeSpec); spec.Vni != nil {
					t.Failf("Get has the VNI %d after it was taken away", spec.GetVni())
				}
			},
		},
		{
			Name: "update-without-mask-keeps-the-vni", Source: "AIP-134",
			Says: "The service must treat an omitted field mask as an implied field mask " +
				"equivalent to all fields that are populated.",
			Violation: "A client that does not know of VNIs cuts a network off from other xPUs.",
			Run: func(t *T) {
				o := haveVNI(t, k)
				want := proto.CloneOf(o.Spec.(*evpn.LogicalBridgeSpec))
				want.VlanId = t.VLAN()
				part := &evpn.LogicalBridgeSpec{VlanId: want.VlanId}
				_, err := t.Update(k, updated(o, part), nil, false)
				t.WantOK("Update of the VLAN id without a mask", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: want})
			},
		},
		{
			Name:      "update-to-the-vni-of-another-is-refused",
			Says:      saysVNI + " (RFC 7348: a VNI identifies a segment.)",
			Violation: "Two tenants have one network.",
			Run: func(t *T) {
				o, other := haveVNI(t, k), haveVNI(t, k)
				spec := proto.CloneOf(o.Spec.(*evpn.LogicalBridgeSpec))
				spec.Vni = other.Spec.(*evpn.LogicalBridgeSpec).Vni
				_, err := t.Update(k, updated(o, spec), []string{"spec.vni"}, false)
				t.WantRefused("Update to the VNI of another one", err)
				t.WantAsMade(o)
			},
		},
	}
}

// withVTEPLength sets a wrong prefix length, at an address that the xPU has if the run knows one.
func withVTEPLength(n int32) func(*T, *evpn.LogicalBridgeSpec) {
	return func(t *T, s *evpn.LogicalBridgeSpec) {
		vtep := t.Config().VTEP
		if !vtep.IsValid() {
			vtep = netip.MustParsePrefix("198.18.0.1/24")
		}
		s.VtepIpPrefix = conformance.IPPrefix(vtep)
		s.VtepIpPrefix.Len = n
	}
}
