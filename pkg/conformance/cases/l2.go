// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"fmt"
	"net"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// crud are the cases about how objects of any kind are made, shown, changed and deleted.
func crud() []generic { return slices.Concat(crudCreate(), crudRead(), crudUpdate(), crudDelete()) }

func l2Core(kinds conformance.Kinds) []Case {
	const profile = conformance.L2Core
	return slices.Concat(
		of(profile, kinds.LogicalBridge, crud()),
		about(profile, kinds.LogicalBridge, logicalBridgeCases(kinds.LogicalBridge)),
		of(profile, kinds.BridgePort, crud()),
		about(profile, kinds.BridgePort, bridgePortCases(kinds.BridgePort)),
		about(profile, kinds.BridgePort, interfaceCases(kinds.BridgePort)),
		about(profile, kinds.BridgePort, packets(kinds)),
	)
}

// Sentences of the proto files.
const (
	saysVLAN    = "the VLAN of the L2 domain"
	saysMAC     = "Bridge Port's MAC address."
	saysBridges = "List of Logical Bridges this Bridge Port will attach. This will define the " +
		"VLANs that will be enabled in this Bridge Port"
	saysAccess = "\"access\" bridge port type"
)

// refused is a spec that an agent must refuse.
type refused struct {
	name, says, violation string
	source                string
	level                 conformance.Level
	spoil                 func(t *T, spec proto.Message)
}

// refusals returns a case for each spec that an agent must refuse.
func refusals(k *Kind, all []refused) []Case {
	cases := make([]Case, len(all))
	for i, r := range all {
		cases[i] = Case{
			Name: r.name + "-is-refused", Source: r.source, Says: r.says, Level: r.level,
			Violation: r.violation,
			Run: func(t *T) {
				id, spec := t.Sample(k)
				r.spoil(t, spec)
				got, err := t.Create(k, id, spec)
				if err == nil {
					t.Failf("Create: OK with %v, want an error", conformance.SpecOf(got))
				}
				if t.Exists(k, id) {
					t.Failf("Create: %s, and it is there all the same", status.Code(err))
				}
			},
		}
	}
	return cases
}

func logicalBridgeCases(k *Kind) []Case {
	return slices.Concat(refusedBridges(k), vlans(k), bridgesWithPorts(k))
}

// refusedBridges are cases about specs that must be refused.
func refusedBridges(k *Kind) []Case {
	vlan := func(n uint32) func(*T, proto.Message) {
		return func(_ *T, spec proto.Message) { spec.(*evpn.LogicalBridgeSpec).VlanId = n }
	}
	const noVLAN = "The pods of the logical bridge share no VLAN, or share that of all untagged " +
		"frames."

	return append(refusals(k, []refused{
		{
			name: "vlan-id-missing", source: "AIP-203", says: required, violation: noVLAN,
			spoil: vlan(0),
		},
		{
			name:      "vlan-id-4095",
			says:      saysVLAN + " (IEEE 802.1Q: 4095 is reserved and not a VLAN.)",
			violation: noVLAN, spoil: vlan(4095),
		},
		{
			name: "vlan-id-4096", says: saysVLAN + " (IEEE 802.1Q: a VLAN id has 12 bits.)",
			violation: "Pods are in the VLAN that the lower 12 bits say, which is another tenant's.",
			spoil:     vlan(4096),
		},
		{
			name:      "vlan-id-of-32-bits",
			says:      saysVLAN + " (IEEE 802.1Q: a VLAN id has 12 bits.)",
			violation: "Pods are in the VLAN that the lower 12 bits say, which is another tenant's.",
			spoil:     vlan(0xffff0005),
		},
	}), Case{
		Name: "spec-missing-is-refused", Source: "AIP-203", Says: required,
		Violation: "A client that forgets the spec makes a logical bridge of no VLAN, or ends " +
			"the agent.",
		Run: func(t *T) { wantNoSpecRefused(t, k) },
	})
}

// vlans are cases about VLAN ids that may be used.
func vlans(k *Kind) []Case {
	return []Case{
		{
			Name: "vlan-id-1-is-taken", Says: saysVLAN,
			Level:     conformance.Should,
			Violation: "The first VLAN, which is the default of many switches, cannot have pods.",
			Run:       func(t *T) { wantVLANTaken(t, k, 1) },
		},
		{
			Name: "vlan-id-4094-is-taken", Says: saysVLAN,
			Violation: "The last VLAN cannot have pods.",
			Run:       func(t *T) { wantVLANTaken(t, k, 4094) },
		},
		{
			Name: "vlan-id-is-free-after-delete", Source: "AIP-135",
			Says: "The Delete method should succeed if and only if a resource was present and " +
				"was successfully deleted.",
			Violation: "Each network that was deleted makes a VLAN useless.",
			Run: func(t *T) {
				o := t.Have(k)
				t.WantOK("Delete", t.Delete(k, o.Name, false))
				t.Prepare(func() { t.WantGone(k, o.Name) })
				got, err := t.Create(k, t.NewID(k), o.Spec)
				t.WantOK("Create with the VLAN id of a deleted one", err)
				t.WantUp(k, got.GetName())
			},
		},
		{
			Name: "vlan-id-is-free-after-update", Source: "AIP-121", Says: strongUpdate,
			Violation: "Each network whose VLAN was changed makes a VLAN useless.",
			Run: func(t *T) {
				o := t.Have(k)
				other, _ := t.Vary(o.Spec)
				t.Prepare(func() {
					_, err := t.Update(k, updated(o, other), nil, false)
					t.WantOK("Update", err)
				})
				got, err := t.Create(k, t.NewID(k), o.Spec)
				t.WantOK("Create with the VLAN id that another one had", err)
				t.WantUp(k, got.GetName())
			},
		},
	}
}

// bridgesWithPorts are cases about logical bridges that have or had ports.
func bridgesWithPorts(k *Kind) []Case {
	return []Case{
		{
			Name: "with-a-port-is-not-deleted", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "The deletion of a network takes it away from pods that run.",
			Run: func(t *T) {
				port := t.Have(t.Kinds.BridgePort)
				bridge := port.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				t.WantRefused("Delete of a logical bridge with a port", t.Delete(k, bridge, false))
				_, err := t.Get(k, bridge)
				t.WantOK("Get after that Delete", err)
			},
		},
		{
			Name: "with-a-port-stays-up-after-refused-delete", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "Pods lose their traffic because somebody tried to delete their network.",
			Run: func(t *T) {
				port := t.HaveUp(t.Kinds.BridgePort)
				bridge := port.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				_ = t.Delete(k, bridge, false)
				got, err := t.Get(t.Kinds.BridgePort, port.Name)
				t.WantOK("Get of the port", err)
				if conformance.StateOf(got) != conformance.Up {
					t.Failf("the port: %s", conformance.Status(got))
				}
			},
		},
		{
			Name: "without-its-ports-is-deleted", Source: "AIP-121", Says: strongDelete,
			Violation: "Networks pile up at the agent, and their VLANs stay in use.",
			Run: func(t *T) {
				port := t.Have(t.Kinds.BridgePort)
				bridge := port.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				t.Prepare(func() {
					t.WantOK("Delete of the port", t.Delete(t.Kinds.BridgePort, port.Name, false))
					t.WantGone(t.Kinds.BridgePort, port.Name)
				})
				t.WantOK("Delete", t.Delete(k, bridge, false))
				t.WantGone(k, bridge)
			},
		},
		{
			Name: "update-keeps-its-ports-up", Source: "AIP-134",
			Says:      "Update methods should not trigger other side effects.",
			Violation: "A change of a network ends the traffic of its pods.",
			Run: func(t *T) {
				port := t.HaveUp(t.Kinds.BridgePort)
				bridge := port.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				spec := &evpn.LogicalBridgeSpec{VlanId: t.VLAN()}
				_, err := t.Update(k, k.NewMessage(bridge, spec), nil, false)
				t.WantOK("Update", err)
				t.WantUp(t.Kinds.BridgePort, port.Name)
			},
		},
	}
}

// wantNoSpecRefused ends the case unless a Create without a spec, and one without an object, are
// refused.
func wantNoSpecRefused(t *T, k *Kind) {
	id := t.NewID(k)
	_, err := t.Create(k, id, nil)
	t.WantRefused("Create without a spec", err)
	_, err = t.CreateMessage(k, id, nil)
	t.WantRefused("Create without an object", err)
}

func wantVLANTaken(t *T, k *Kind, vlan uint32) {
	if !t.TakesVLAN(vlan) {
		t.Skipf("VLAN id %d is in use at the agent", vlan)
	}
	spec := &evpn.LogicalBridgeSpec{VlanId: vlan}
	got, err := t.Create(k, t.NewID(k), spec)
	t.WantOK(fmt.Sprintf("Create with VLAN id %d", vlan), err)
	t.WantSpec("the answer", got, spec)
}

func bridgePortCases(k *Kind) []Case {
	mac := func(address ...byte) func(*T, proto.Message) {
		return func(_ *T, spec proto.Message) {
			spec.(*evpn.BridgePortSpec).MacAddress = address
		}
	}
	const noMAC = "The pod's frames come from an address that the xPU does not know, and it gets " +
		"none."

	return append(refusals(k, []refused{
		{
			name: "mac-address-missing", source: "AIP-203", says: required, violation: noMAC,
			spoil: mac(),
		},
		{
			name: "mac-address-of-5-bytes", says: saysMAC, violation: noMAC,
			spoil: mac(2, 17, 0, 0, 1),
		},
		{
			name: "mac-address-of-8-bytes", says: saysMAC, violation: noMAC,
			spoil: mac(2, 17, 0, 0, 0, 0, 0, 1),
		},
		{
			name: "mac-address-as-text", says: saysMAC, violation: noMAC,
			spoil: mac([]byte("02:11:00:00:00:01")...),
		},
		{
			name:      "mac-address-multicast",
			says:      saysMAC + " (IEEE 802: a station has an individual address.)",
			violation: "Frames for the pod go to all ports of its network.",
			spoil:     mac(3, 17, 0, 0, 0, 1),
		},
		{
			name:      "mac-address-broadcast",
			says:      saysMAC + " (IEEE 802: a station has an individual address.)",
			violation: "Frames for the pod go to all ports of its network.",
			spoil:     mac(255, 255, 255, 255, 255, 255),
		},
		{
			name: "mac-address-zero", source: "AIP-203", says: required, violation: noMAC,
			level: conformance.Should, spoil: mac(0, 0, 0, 0, 0, 0),
		},
		{
			name: "ptype-missing", source: "AIP-203", says: required,
			violation: "Whether the pod's frames have tags is left to chance.",
			spoil: func(_ *T, spec proto.Message) {
				spec.(*evpn.BridgePortSpec).Ptype = 0
			},
		},
		{
			name: "ptype-unknown", source: "AIP-193",
			says:      "Services must return a google.rpc.Status message when an API error occurs.",
			violation: "A client that is newer than the agent gets another type of port.",
			spoil: func(_ *T, spec proto.Message) {
				spec.(*evpn.BridgePortSpec).Ptype = 99
			},
		},
		{
			name: "access-in-no-logical-bridge", says: saysAccess,
			violation: "The pod has an interface that leads nowhere, or into all networks.",
			spoil: func(_ *T, spec proto.Message) {
				spec.(*evpn.BridgePortSpec).LogicalBridges = nil
			},
		},
		{
			name:      "access-in-two-logical-bridges",
			says:      saysAccess + " (IEEE 802.1Q: untagged frames are in one VLAN.)",
			violation: "Two networks that are to be apart are one, or the pod is in either.",
			spoil: func(t *T, spec proto.Message) {
				s := spec.(*evpn.BridgePortSpec)
				s.LogicalBridges = append(s.LogicalBridges, t.Network())
			},
		},
		{
			name: "logical-bridge-missing", says: saysBridges,
			violation: "A pod starts in a network that does not exist.",
			spoil: func(t *T, spec proto.Message) {
				spec.(*evpn.BridgePortSpec).LogicalBridges =
					[]string{missing(t, t.Kinds.LogicalBridge)}
			},
		},
		{
			name: "logical-bridge-without-a-name", says: saysBridges,
			violation: "A pod starts in a network that does not exist, or in some network.",
			spoil: func(_ *T, spec proto.Message) {
				spec.(*evpn.BridgePortSpec).LogicalBridges = []string{""}
			},
		},
	}), portRelations(k)...)
}

// portRelations are cases about ports beside other objects.
func portRelations(k *Kind) []Case {
	return slices.Concat(portsRefused(k), portsMoved(k), portsBesideOthers(k))
}

// portsRefused are cases about what keeps a port from being made, and what does not.
func portsRefused(k *Kind) []Case {
	return []Case{
		{
			Name: "spec-missing-is-refused", Source: "AIP-203", Says: required,
			Violation: "A client that forgets the spec makes a port of no network, or ends the agent.",
			Run:       func(t *T) { wantNoSpecRefused(t, k) },
		},
		{
			Name: "refused-create-makes-nothing", Source: "AIP-193",
			Says: "Services must return a google.rpc.Status message when an API error occurs.",
			Violation: "A port that was refused is there, and its Function is not free for other " +
				"pods.",
			Run: func(t *T) {
				port := t.BarePort()
				network := missing(t, t.Kinds.LogicalBridge)
				_, err := t.Create(k, port.ID, conformance.Access(port.MAC, network))
				t.Prepare(func() { t.WantRefused("Create in a missing logical bridge", err) })
				for _, m := range t.List(k, 0) {
					if conformance.HasID(m, port.ID) {
						t.Failf("the list has %s, which was refused", m.GetName())
					}
				}
			},
		},
		{
			Name: "refused-create-leaves-the-id-free", Source: "AIP-193",
			Says: "Services must return a google.rpc.Status message when an API error occurs.",
			Violation: "A port whose network came late cannot be made any more, and its pod waits " +
				"for ever.",
			Run: func(t *T) {
				id, spec := t.Sample(k)
				bad := proto.CloneOf(spec.(*evpn.BridgePortSpec))
				bad.LogicalBridges = []string{missing(t, t.Kinds.LogicalBridge)}
				_, err := t.Create(k, id, bad)
				t.Prepare(func() { t.WantRefused("Create in a missing logical bridge", err) })
				got, err := t.Create(k, id, spec)
				t.WantOK("Create after a refused one", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		{
			Name: "mac-address-of-another-port-is-refused", Says: saysMAC +
				" (IEEE 802: an address is that of one station.)",
			Level:     conformance.Should,
			Violation: "Two pods get each other's frames.",
			Run: func(t *T) {
				o := t.Have(k)
				spec := o.Spec.(*evpn.BridgePortSpec)
				port := t.Port()
				_, err := t.Create(k, port.ID,
					conformance.Access(spec.GetMacAddress(), spec.GetLogicalBridges()[0]))
				t.WantRefused("Create with the MAC address of another port of the network", err)
			},
		},
		{
			Name: "mac-address-is-free-after-delete", Source: "AIP-121", Says: strongDelete,
			Violation: "A pod that keeps its address, such as a virtual machine that moves, " +
				"cannot have another Function.",
			Run: func(t *T) {
				o := t.Have(k)
				t.Prepare(func() {
					t.WantOK("Delete", t.Delete(k, o.Name, false))
					t.WantGone(k, o.Name)
				})
				port := t.Port()
				_, err := t.Create(k, port.ID, o.Spec)
				t.WantOK("Create with the MAC address of a deleted port", err)
			},
		},
	}
}

// portsMoved are cases about an Update of the logical bridge or the MAC address of a port.
func portsMoved(k *Kind) []Case {
	return []Case{
		{
			Name: "moves-to-another-logical-bridge", Source: "AIP-121", Says: strongUpdate,
			Violation: "A pod that is moved to another network stays in the old one.",
			Run: func(t *T) {
				o := t.HaveUp(k)
				spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
				spec.LogicalBridges = []string{t.Network()}
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantOK("Update to another logical bridge", err)
				t.WantAsMade(conformance.Object{Kind: k, Name: o.Name, Spec: spec})
				t.WantUp(k, o.Name)
			},
		},
		{
			Name: "leaves-its-logical-bridge-when-it-moves", Source: "AIP-121", Says: strongUpdate,
			Violation: "A network that has no pods any more cannot be deleted.",
			Run: func(t *T) {
				o := t.Have(k)
				old := o.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
				spec.LogicalBridges = []string{t.Network()}
				t.Prepare(func() {
					_, err := t.Update(k, updated(o, spec), nil, false)
					t.WantOK("Update to another logical bridge", err)
				})
				t.WantOK("Delete of the logical bridge that the port has left",
					t.Delete(t.Kinds.LogicalBridge, old, false))
				t.WantGone(t.Kinds.LogicalBridge, old)
			},
		},
		{
			Name: "is-in-the-logical-bridge-that-it-moved-to", Source: "AIP-135",
			Says: "The API must fail with a FAILED_PRECONDITION error if child resources are " +
				"present.",
			Violation: "The deletion of a network takes it away from a pod that was moved to it.",
			Run: func(t *T) {
				o := t.Have(k)
				spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
				spec.LogicalBridges = []string{t.Network()}
				t.Prepare(func() {
					_, err := t.Update(k, updated(o, spec), nil, false)
					t.WantOK("Update to another logical bridge", err)
				})
				t.WantRefused("Delete of the logical bridge that the port moved to",
					t.Delete(t.Kinds.LogicalBridge, spec.GetLogicalBridges()[0], false))
			},
		},
		{
			Name: "update-to-a-missing-logical-bridge-is-refused", Says: saysBridges,
			Violation: "A pod is moved to a network that does not exist.",
			Run: func(t *T) {
				o := t.Have(k)
				spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
				spec.LogicalBridges = []string{missing(t, t.Kinds.LogicalBridge)}
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantRefused("Update to a missing logical bridge", err)
				t.WantAsMade(o)
			},
		},
		{
			Name: "update-to-a-wrong-mac-address-is-refused", Says: saysMAC,
			Violation: "A pod that ran well has an address that the xPU does not know.",
			Run: func(t *T) {
				o := t.Have(k)
				spec := proto.CloneOf(o.Spec.(*evpn.BridgePortSpec))
				spec.MacAddress = net.HardwareAddr{2, 17, 0}
				_, err := t.Update(k, updated(o, spec), nil, false)
				t.WantRefused("Update to a MAC address of 3 bytes", err)
				t.WantAsMade(o)
			},
		},
	}
}

// portsBesideOthers are cases about ports that must not disturb other objects.
func portsBesideOthers(k *Kind) []Case {
	return []Case{
		{
			Name: "may-have-the-id-of-a-logical-bridge", Source: "AIP-122",
			Says: "All resource names defined by an API must be unique within that API. (Names " +
				"have the collection before the id.)",
			Violation: "A network's id keeps a Function from pods.",
			Run: func(t *T) {
				id, spec := t.Sample(k)
				t.HaveAs(t.Kinds.LogicalBridge, id, &evpn.LogicalBridgeSpec{VlanId: t.VLAN()})
				got, err := t.Create(k, id, spec)
				t.WantOK("Create with the id of a logical bridge", err)
				t.WantSpec("the answer", got, spec)
			},
		},
		{
			Name: "two-ports-of-one-logical-bridge-are-up", Says: saysBridges,
			Violation: "A network has one pod only.",
			Run: func(t *T) {
				first := t.HaveUp(k)
				port := t.Port()
				network := first.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				got, err := t.Create(k, port.ID, conformance.Access(port.MAC, network))
				t.WantOK("Create of a second port", err)
				t.WantUp(k, got.GetName())
				t.WantUp(k, first.Name)
			},
		},
		{
			Name: "stays-up-when-another-is-deleted", Says: "Bridge Port is up",
			Violation: "The end of one pod ends the traffic of others.",
			Run: func(t *T) {
				first := t.HaveUp(k)
				port := t.Port()
				network := first.Spec.(*evpn.BridgePortSpec).GetLogicalBridges()[0]
				second := t.HaveAs(k, port.ID, conformance.Access(port.MAC, network))
				t.WantOK("Delete of another port", t.Delete(k, second.Name, false))
				got, err := t.Get(k, first.Name)
				t.WantOK("Get", err)
				if conformance.StateOf(got) != conformance.Up {
					t.Failf("%s", conformance.Status(got))
				}
			},
		},
	}
}

// interfaceCases are cases about what UP is worth.
func interfaceCases(k *Kind) []Case {
	const up, down = "Bridge Port is up", "Bridge Port is down"
	// bare makes a port whose interface does not exist.
	bare := func(t *T) (conformance.Port, conformance.Message) {
		if t.Config().Hooks.MakePort == nil {
			t.Skipf("needs --make-port: without it, which ports lack an interface is not known")
		}
		network, port := t.Network(), t.BarePort()
		if len(t.Config().Ports) > 0 {
			t.RemoveInterface(port)
		}
		got, err := t.Create(k, port.ID, conformance.Access(port.MAC, network))
		if err != nil && status.Code(err) != codes.Unimplemented {
			t.Skipf("the agent refuses ports whose interface is missing: %s", err)
		}
		return port, got
	}

	return []Case{
		{
			Name: "without-its-interface-is-not-up", Says: up,
			Violation: "A pod starts whose frames go nowhere.",
			Run: func(t *T) {
				_, got := bare(t)
				for range 10 {
					read, err := t.Get(k, got.GetName())
					t.WantOK("Get", err)
					if conformance.StateOf(read) == conformance.Up {
						t.Failf("it is UP although it has no interface")
					}
					t.Sleep(conformance.Interval)
				}
			},
		},
		{
			Name: "without-its-interface-says-so", Level: conformance.Should,
			Says:      "Component's status; Component's details",
			Violation: "Who looks why a pod does not start finds nothing.",
			Run: func(t *T) {
				_, got := bare(t)
				read, err := t.Get(k, got.GetName())
				t.WantOK("Get", err)
				for _, c := range conformance.ComponentsOf(read) {
					if c.GetDetails() != "" {
						return
					}
				}
				t.Failf("no component has details: %s", conformance.Status(read))
			},
		},
		{
			Name: "comes-up-with-its-interface", Says: up,
			Violation: "A pod whose Function appears late waits for ever.",
			Run: func(t *T) {
				port, got := bare(t)
				t.MakeInterface(port)
				t.WantUp(k, got.GetName())
			},
		},
		{
			Name: "without-its-interface-can-be-deleted", Source: "AIP-121", Says: strongDelete,
			Violation: "A port whose Function is gone stays for ever.",
			Run: func(t *T) {
				_, got := bare(t)
				t.WantOK("Delete", t.Delete(k, got.GetName(), false))
				t.WantGone(k, got.GetName())
			},
		},
		{
			Name: "goes-down-with-its-interface", Says: down,
			Violation: "A pod whose Function is gone counts as healthy.",
			Run: func(t *T) {
				o := t.HaveUp(k)
				t.RemoveInterface(portOf(o))
				t.WantNotUp(k, o.Name)
			},
		},
		{
			Name: "comes-up-again-with-its-interface", Says: up,
			Violation: "A pod whose Function was away for a moment has no traffic any more.",
			Run: func(t *T) {
				o := t.HaveUp(k)
				t.RemoveInterface(portOf(o))
				t.Prepare(func() { t.WantNotUp(k, o.Name) })
				t.MakeInterface(portOf(o))
				t.WantUp(k, o.Name)
			},
		},
	}
}

// portOf returns the port of an object.
func portOf(o conformance.Object) conformance.Port {
	return conformance.Port{ID: o.ID, MAC: o.Spec.(*evpn.BridgePortSpec).GetMacAddress()}
}
