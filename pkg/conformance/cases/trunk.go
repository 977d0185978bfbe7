// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

const saysTrunk = "\"trunk\" bridge port type"

// haveTrunk makes a TRUNK port with n logical bridges.
func haveTrunk(t *T, k *Kind, n int) conformance.Object {
	port := t.Port()
	return t.HaveAs(k, port.ID, conformance.TrunkPort(port.MAC, networks(t, n)...))
}

func networks(t *T, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = t.Network()
	}
	return names
}

func bridgesOf(o conformance.Object) []string {
	return o.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()
}

// withBridges returns the spec of a port in other logical bridges.
func withBridges(o conformance.Object, names ...string) *evpn.BridgePortSpec {
	spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
	spec.LogicalBridges = names
	return spec
}

func trunk(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	upWith := func(name string, n int, violation string) Case {
		return Case{
			Name: name, Says: saysTrunk, Violation: violation,
			Run: func(t *T) {
				t.NeedInterfaces()
				port := t.Port()
				spec := conformance.TrunkPort(port.MAC, networks(t, n)...)
				got, err := t.Create(k, port.ID, spec)
				t.WantOK("Create", err)
				t.WantUp(k, got.GetName())
				t.WantAsMade(conformance.Object{Kind: k, Name: got.GetName(), Spec: spec})
			},
		}
	}

	return about(conformance.Trunk, k, slices.Concat([]Case{
		upWith("trunk-of-one-comes-up", 1, "A pod with one network and tags has none."),
		upWith("trunk-of-two-comes-up", 2, "A pod with several networks has none."),
		upWith("trunk-of-eight-comes-up", 8, "A pod with many networks has none."),
	}, trunkChanges(kinds), trunkPackets(kinds)))
}

func trunkChanges(kinds conformance.Kinds) []Case {
	return slices.Concat(trunksMade(kinds), trunksRefused(kinds), trunkMembers(kinds),
		trunksBesidePorts(kinds), trunksAndAccess(kinds))
}

// trunksMade are cases about a new TRUNK port.
func trunksMade(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	return []Case{
		{
			Name: "trunk-is-answered", Source: "AIP-133",
			Says:      "The response must include any fields that were provided.",
			Violation: "A controller takes its port for another one.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				t.WantSpec("the answer", o.Got, o.Spec)
			},
		},
		{
			Name: "trunk-is-listed", Source: "AIP-132", Level: conformance.Should,
			Says:      "The response should usually include fully-populated resources.",
			Violation: "A controller does not see which networks a pod is in.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				got := t.Listed(k, o.Name)
				if got == nil {
					t.Failf("the list lacks %s", o.Name)
				}
				t.WantSpec("the list", got, o.Spec)
			},
		},
		{
			Name: "trunk-is-made-once", Source: "AIP-133", Says: duplicate,
			Violation: "A controller that repeats a call whose answer was lost makes a second port.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				_, err := t.Create(k, o.ID, o.Spec)
				t.WantCode("Create of the same again", err, codes.OK, codes.AlreadyExists)
				wantOnce(t, o)
			},
		},
		{
			Name: "trunk-in-another-order-is-the-same", Says: saysBridges,
			Level: conformance.Should,
			Violation: "A controller that names the networks in another order takes its port for " +
				"another one.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				names := bridgesOf(o)
				_, err := t.Create(k, o.ID, withBridges(o, names[1], names[0]))
				t.WantOK("Create of the same in another order", err)
			},
		},
	}
}

// trunksRefused are cases about a TRUNK port that is refused.
func trunksRefused(kinds conformance.Kinds) []Case {
	k, bridges := kinds.BridgePort, kinds.LogicalBridge
	return []Case{
		{
			Name: "trunk-with-a-missing-logical-bridge-is-refused", Says: saysBridges,
			Violation: "A pod starts without one of its networks.",
			Run: func(t *T) {
				haveTrunk(t, k, 1)
				port := t.Port()
				_, err := t.Create(k, port.ID,
					conformance.TrunkPort(port.MAC, t.Network(), missing(t, bridges)))
				t.WantRefused("Create with a missing logical bridge", err)
			},
		},
		{
			Name: "refused-trunk-leaves-the-logical-bridge", Source: "AIP-193",
			Says:      "Services must return a google.rpc.Status message when an API error occurs.",
			Violation: "A port that was refused keeps its networks from being deleted.",
			Run: func(t *T) {
				haveTrunk(t, k, 1)
				port, network := t.Port(), t.Network()
				_, err := t.Create(k, port.ID,
					conformance.TrunkPort(port.MAC, network, missing(t, bridges)))
				t.Prepare(func() { t.WantRefused("Create with a missing logical bridge", err) })
				t.WantOK("Delete of the logical bridge", t.Delete(bridges, network, false))
				t.WantGone(bridges, network)
			},
		},
		{
			Name: "refused-trunk-leaves-the-mac-address-free", Source: "AIP-193",
			Says: "Services must return a google.rpc.Status message when an API error occurs.",
			Violation: "An address that was refused once is taken for ever, and its pod never " +
				"starts.",
			Run: func(t *T) {
				good, bad := t.Port(), t.BarePort()
				network := t.Network()
				_, err := t.Create(k, bad.ID, conformance.TrunkPort(good.MAC, network,
					missing(t, bridges)))
				t.Prepare(func() { t.WantRefused("Create in a missing logical bridge", err) })
				_, err = t.Create(k, good.ID, conformance.Access(good.MAC, network))
				t.WantOK("Create with the MAC address of a refused one", err)
			},
		},
	}
}

// trunkMembers are cases about the logical bridges that a TRUNK port is in.
func trunkMembers(kinds conformance.Kinds) []Case {
	k, bridges := kinds.BridgePort, kinds.LogicalBridge
	return []Case{
		{
			Name: "trunk-is-in-each-logical-bridge", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "The deletion of a network takes it away from a pod with several.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 3)
				for _, name := range bridgesOf(o) {
					t.WantRefused("Delete of a logical bridge of the port",
						t.Delete(bridges, name, false))
				}
				t.WantAsMade(o)
			},
		},
		{
			Name: "deleted-trunk-leaves-all-logical-bridges", Source: "AIP-121", Says: strongDelete,
			Violation: "Networks that have no pods any more cannot be deleted.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 3)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.WantGone(k, o.Name)
				for _, name := range bridgesOf(o) {
					t.WantOK("Delete of a logical bridge", t.Delete(bridges, name, false))
				}
			},
		},
		{
			Name: "update-adds-a-logical-bridge", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod that gets one more network does not have it.",
			Run: func(t *T) {
				t.NeedInterfaces()
				o := haveTrunk(t, k, 1)
				spec := withBridges(o, append(bridgesOf(o), t.Network())...)
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantOK("Update with one more logical bridge", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: spec})
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "update-removes-a-logical-bridge", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod that leaves a network goes on to hear it.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				names := bridgesOf(o)
				_, err := t.Update(k, updated(o, withBridges(o, names[0])), nil, false)
				t.WantOK("Update with one logical bridge less", err)
				t.WantOK("Delete of the logical bridge that the port has left",
					t.Delete(bridges, names[1], false))
				t.WantGone(bridges, names[1])
			},
		},
	}
}

// trunksBesidePorts are cases about ports that share logical bridges.
func trunksBesidePorts(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	return []Case{
		{
			Name: "trunk-and-access-share-a-logical-bridge", Says: saysTrunk,
			Violation: "A pod with several networks reaches no pod with one.",
			Run: func(t *T) {
				t.NeedInterfaces()
				o := haveTrunk(t, k, 2)
				port := t.Port()
				got, err := t.Create(k, port.ID,
					conformance.Access(port.MAC, bridgesOf(o)[0]))
				t.WantOK("Create of an ACCESS port in a logical bridge of the trunk", err)
				t.WantUp(k, got.GetName())
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "two-trunks-share-logical-bridges", Says: saysTrunk,
			Violation: "Only one pod may have several networks.",
			Run: func(t *T) {
				t.NeedInterfaces()
				o := haveTrunk(t, k, 2)
				port := t.Port()
				got, err := t.Create(k, port.ID, conformance.TrunkPort(port.MAC, bridgesOf(o)...))
				t.WantOK("Create of a second TRUNK port", err)
				t.WantUp(k, got.GetName())
				t.WantUp(k, o.Name)
			},
		},
	}
}

// trunksAndAccess are cases about an Update of the type of a port.
func trunksAndAccess(kinds conformance.Kinds) []Case {
	k := kinds.BridgePort
	return []Case{
		{
			Name: "access-becomes-trunk", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod that is to have several networks keeps one.",
			Run: func(t *T) {
				t.NeedInterfaces()
				haveTrunk(t, k, 1)
				o := t.Have(k)
				spec := withBridges(o, append(bridgesOf(o), t.Network())...)
				spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantOK("Update to TRUNK", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: spec})
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "trunk-becomes-access", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod that is to have one network keeps several.",
			Run: func(t *T) {
				t.NeedInterfaces()
				o := haveTrunk(t, k, 2)
				spec := withBridges(o, bridgesOf(o)[0])
				spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantOK("Update to ACCESS", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: spec})
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "update-to-access-in-two-is-refused", Says: saysAccess +
				" (IEEE 802.1Q: untagged frames are in one VLAN.)",
			Violation: "Two networks that are to be apart are one, or the pod is in either.",
			Run: func(t *T) {
				o := haveTrunk(t, k, 2)
				spec := withBridges(o, bridgesOf(o)...)
				spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS
				_, err := t.Update(k, updated(o, spec), []string{"spec.ptype"}, false)
				t.WantRefused("Update to ACCESS in two logical bridges", err)
				t.WantAsMade(o)
			},
		},
	}
}
