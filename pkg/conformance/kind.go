// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"path"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

// Message is an object in OPI's API: a LogicalBridge, BridgePort, Vrf or Svi.
type Message interface {
	proto.Message
	GetName() string
}

// Kind is a kind of objects in OPI's API. All kinds have the same five calls.
type Kind struct {
	// Word is the kind in texts, such as "logical bridge", and Slug in the names of cases.
	Word, Slug string
	// Type is the kind in the names of calls, such as "LogicalBridge".
	Type string
	// Collection begins the names that the API documents, such as "logicalBridges/".
	Collection string
	// letter is the kind in ids.
	letter string
	// Proto is the file that describes the kind.
	Proto string

	empty func() Message
	dial  func(grpc.ClientConnInterface) calls
}

// calls are the calls of a kind.
type calls struct {
	create func(ctx context.Context, id string, m Message) (Message, error)
	get    func(ctx context.Context, name string) (Message, error)
	list   func(ctx context.Context, size int32, token string) ([]Message, string, error)
	update func(ctx context.Context, m Message, mask *fieldmaskpb.FieldMask,
		allowMissing bool) (Message, error)
	remove func(ctx context.Context, name string, allowMissing bool) error
}

// State is the operational status of an object. The kinds have the same numbers.
type State = evpn.BPOperStatus

// The states.
const (
	Up       = evpn.BPOperStatus_BP_OPER_STATUS_UP
	Down     = evpn.BPOperStatus_BP_OPER_STATUS_DOWN
	Deleting = evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED
)

// NewMessage returns an object of the kind. A nil spec is left out.
func (k *Kind) NewMessage(name string, spec proto.Message) Message {
	m := k.empty()
	r := m.ProtoReflect()
	if name != "" {
		r.Set(field(r, "name"), protoreflect.ValueOfString(name))
	}
	if spec != nil {
		r.Set(field(r, "spec"), protoreflect.ValueOfMessage(proto.Clone(spec).ProtoReflect()))
	}
	return m
}

// SetStatus sets the status of an object, which only an agent should do.
func (k *Kind) SetStatus(m Message, state State, components ...*evpn.Component) {
	r := m.ProtoReflect()
	status := r.Mutable(field(r, "status")).Message()
	status.Set(field(status, "oper_status"), protoreflect.ValueOfEnum(state.Number()))
	list := status.Mutable(field(status, "components")).List()
	for _, c := range components {
		list.Append(protoreflect.ValueOfMessage(c.ProtoReflect()))
	}
}

// SpecOf returns the spec of an object, or nil if it has none.
func SpecOf(m Message) proto.Message {
	r := m.ProtoReflect()
	if spec := field(r, "spec"); r.IsValid() && r.Has(spec) {
		return r.Get(spec).Message().Interface()
	}
	return nil
}

// StateOf returns the operational status of an object. It is zero if the object has none.
func StateOf(m Message) State {
	r := m.ProtoReflect()
	if !r.IsValid() {
		return 0
	}
	status := r.Get(field(r, "status")).Message()
	return State(status.Get(field(status, "oper_status")).Enum())
}

// ComponentsOf returns the components in the status of an object.
func ComponentsOf(m Message) (components []*evpn.Component) {
	r := m.ProtoReflect()
	status := r.Get(field(r, "status")).Message()
	list := status.Get(field(status, "components")).List()
	for i := range list.Len() {
		components = append(components, list.Get(i).Message().Interface().(*evpn.Component))
	}
	return components
}

func field(r protoreflect.Message, name protoreflect.Name) protoreflect.FieldDescriptor {
	return r.Descriptor().Fields().ByName(name)
}

// Word returns a state without its prefix, such as "UP".
func Word(s State) string { return strings.TrimPrefix(s.String(), "BP_OPER_STATUS_") }

// Kinds are the kinds of objects in OPI's API.
type Kinds struct{ LogicalBridge, BridgePort, Vrf, Svi *Kind }

// All returns the kinds in an order in which none needs a later one.
func (k Kinds) All() []*Kind { return []*Kind{k.LogicalBridge, k.BridgePort, k.Vrf, k.Svi} }

// NewKinds returns the kinds of objects.
func NewKinds() Kinds {
	return Kinds{
		LogicalBridge: logicalBridges(), BridgePort: bridgePorts(), Vrf: vrfs(), Svi: svis(),
	}
}

const (
	l2Proto = "l2_xpu_infra_mgr.proto"
	l3Proto = "l3_xpu_infra_mgr.proto"
)

func logicalBridges() *Kind {
	return &Kind{
		Word: "logical bridge", Slug: "logical-bridge", Type: "LogicalBridge", letter: "b",
		Collection: "logicalBridges/", Proto: l2Proto,
		empty: func() Message { return &evpn.LogicalBridge{} },
		dial: func(conn grpc.ClientConnInterface) calls {
			c := evpn.NewLogicalBridgeServiceClient(conn)
			return calls{
				create: func(ctx context.Context, id string, m Message) (Message, error) {
					return c.CreateLogicalBridge(ctx, &evpn.CreateLogicalBridgeRequest{
						LogicalBridgeId: id, LogicalBridge: as[evpn.LogicalBridge](m),
					})
				},
				get: func(ctx context.Context, name string) (Message, error) {
					return c.GetLogicalBridge(ctx, &evpn.GetLogicalBridgeRequest{Name: name})
				},
				list: func(
					ctx context.Context, size int32, token string,
				) ([]Message, string, error) {
					r, err := c.ListLogicalBridges(ctx,
						&evpn.ListLogicalBridgesRequest{PageSize: size, PageToken: token})
					return messages(r.GetLogicalBridges()), r.GetNextPageToken(), err
				},
				update: func(
					ctx context.Context, m Message, mask *fieldmaskpb.FieldMask, allowMissing bool,
				) (Message, error) {
					return c.UpdateLogicalBridge(ctx, &evpn.UpdateLogicalBridgeRequest{
						LogicalBridge: as[evpn.LogicalBridge](m), UpdateMask: mask,
						AllowMissing: allowMissing,
					})
				},
				remove: func(ctx context.Context, name string, allowMissing bool) error {
					_, err := c.DeleteLogicalBridge(ctx, &evpn.DeleteLogicalBridgeRequest{
						Name: name, AllowMissing: allowMissing,
					})
					return err
				},
			}
		},
	}
}

func bridgePorts() *Kind {
	return &Kind{
		Word: "bridge port", Slug: "bridge-port", Type: "BridgePort", letter: "p",
		Collection: "bridgePorts/", Proto: l2Proto,
		empty: func() Message { return &evpn.BridgePort{} },
		dial: func(conn grpc.ClientConnInterface) calls {
			c := evpn.NewBridgePortServiceClient(conn)
			return calls{
				create: func(ctx context.Context, id string, m Message) (Message, error) {
					return c.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{
						BridgePortId: id, BridgePort: as[evpn.BridgePort](m),
					})
				},
				get: func(ctx context.Context, name string) (Message, error) {
					return c.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: name})
				},
				list: func(
					ctx context.Context, size int32, token string,
				) ([]Message, string, error) {
					r, err := c.ListBridgePorts(ctx,
						&evpn.ListBridgePortsRequest{PageSize: size, PageToken: token})
					return messages(r.GetBridgePorts()), r.GetNextPageToken(), err
				},
				update: func(
					ctx context.Context, m Message, mask *fieldmaskpb.FieldMask, allowMissing bool,
				) (Message, error) {
					return c.UpdateBridgePort(ctx, &evpn.UpdateBridgePortRequest{
						BridgePort: as[evpn.BridgePort](m), UpdateMask: mask,
						AllowMissing: allowMissing,
					})
				},
				remove: func(ctx context.Context, name string, allowMissing bool) error {
					_, err := c.DeleteBridgePort(ctx, &evpn.DeleteBridgePortRequest{
						Name: name, AllowMissing: allowMissing,
					})
					return err
				},
			}
		},
	}
}

func vrfs() *Kind {
	return &Kind{
		Word: "VRF", Slug: "vrf", Type: "Vrf", letter: "v", Collection: "vrfs/", Proto: l3Proto,
		empty: func() Message { return &evpn.Vrf{} },
		dial: func(conn grpc.ClientConnInterface) calls {
			c := evpn.NewVrfServiceClient(conn)
			return calls{
				create: func(ctx context.Context, id string, m Message) (Message, error) {
					return c.CreateVrf(ctx, &evpn.CreateVrfRequest{
						VrfId: id, Vrf: as[evpn.Vrf](m),
					})
				},
				get: func(ctx context.Context, name string) (Message, error) {
					return c.GetVrf(ctx, &evpn.GetVrfRequest{Name: name})
				},
				list: func(
					ctx context.Context, size int32, token string,
				) ([]Message, string, error) {
					r, err := c.ListVrfs(ctx,
						&evpn.ListVrfsRequest{PageSize: size, PageToken: token})
					return messages(r.GetVrfs()), r.GetNextPageToken(), err
				},
				update: func(
					ctx context.Context, m Message, mask *fieldmaskpb.FieldMask, allowMissing bool,
				) (Message, error) {
					return c.UpdateVrf(ctx, &evpn.UpdateVrfRequest{
						Vrf: as[evpn.Vrf](m), UpdateMask: mask, AllowMissing: allowMissing,
					})
				},
				remove: func(ctx context.Context, name string, allowMissing bool) error {
					_, err := c.DeleteVrf(ctx, &evpn.DeleteVrfRequest{
						Name: name, AllowMissing: allowMissing,
					})
					return err
				},
			}
		},
	}
}

func svis() *Kind {
	return &Kind{
		Word: "SVI", Slug: "svi", Type: "Svi", letter: "s", Collection: "svis/", Proto: l3Proto,
		empty: func() Message { return &evpn.Svi{} },
		dial: func(conn grpc.ClientConnInterface) calls {
			c := evpn.NewSviServiceClient(conn)
			return calls{
				create: func(ctx context.Context, id string, m Message) (Message, error) {
					return c.CreateSvi(ctx, &evpn.CreateSviRequest{
						SviId: id, Svi: as[evpn.Svi](m),
					})
				},
				get: func(ctx context.Context, name string) (Message, error) {
					return c.GetSvi(ctx, &evpn.GetSviRequest{Name: name})
				},
				list: func(
					ctx context.Context, size int32, token string,
				) ([]Message, string, error) {
					r, err := c.ListSvis(ctx,
						&evpn.ListSvisRequest{PageSize: size, PageToken: token})
					return messages(r.GetSvis()), r.GetNextPageToken(), err
				},
				update: func(
					ctx context.Context, m Message, mask *fieldmaskpb.FieldMask, allowMissing bool,
				) (Message, error) {
					return c.UpdateSvi(ctx, &evpn.UpdateSviRequest{
						Svi: as[evpn.Svi](m), UpdateMask: mask, AllowMissing: allowMissing,
					})
				},
				remove: func(ctx context.Context, name string, allowMissing bool) error {
					_, err := c.DeleteSvi(ctx, &evpn.DeleteSviRequest{
						Name: name, AllowMissing: allowMissing,
					})
					return err
				},
			}
		},
	}
}

// as returns the message as its type, or nil if there is no message.
func as[M any](m Message) *M {
	typed, _ := any(m).(*M)
	return typed
}

func messages[M Message](typed []M) []Message {
	all := make([]Message, len(typed))
	for i, m := range typed {
		all[i] = m
	}
	return all
}

// HasID reports whether an object's name ends with an id.
func HasID(m Message, id string) bool { return path.Base(m.GetName()) == id }
