// SPDX-License-Identifier: Apache-2.0

package cases_test

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
	"github.com/opiproject/xpu-device-plugin/pkg/conformance/cases"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestModel checks that an agent that does what the contract says passes all cases: the cases of L3
// have no other agent here.
func TestModel(t *testing.T) {
	m := &model{netdevs: interfaces{have: map[string]bool{}}}
	for _, k := range conformance.NewKinds().All() {
		m.kinds = append(m.kinds, &modelKind{Kind: k, objects: map[string]conformance.Message{}})
	}
	socket := filepath.Join(must.SocketDir(t), "agent")
	server := m.serve(t, socket)
	t.Cleanup(func() { server.Stop() })

	runner, err := conformance.NewRunner(conformance.Config{
		Endpoint: conformance.Endpoint{Network: "unix", Address: socket},
		Hooks: conformance.Hooks{
			MakePort: func(_ context.Context, p conformance.Port) error {
				return m.netdevs.set(p.ID, true)
			},
			RemovePort: func(_ context.Context, p conformance.Port) error {
				return m.netdevs.set(p.ID, false)
			},
			Restart: func(context.Context, conformance.Ending) error {
				server.Stop()
				server = m.serve(t, socket)
				return nil
			},
		},
		Prefix: conformance.NewPrefix(),
		VLANs:  conformance.Range{First: 100, Last: 299}, VNIs: conformance.Range{First: 1, Last: 99},
		Settle: 5 * time.Second, CallTimeout: 10 * time.Second, Limit: time.Minute, Scale: 16,
		Declared: conformance.Profiles(),
	}, conformance.NewKinds())
	must.Succeed(t, err)
	t.Cleanup(func() { _ = runner.Close() })

	report, err := runner.Run(t.Context(), cases.All(runner.Kinds))
	must.Succeed(t, err)
	for _, r := range report.Results() {
		isSkipped := r.Outcome == conformance.Skipped && (strings.HasPrefix(r.Text, "needs --") ||
			strings.HasPrefix(r.Text, "the id of a port says"))
		if r.Outcome != conformance.Passed && !isSkipped {
			t.Errorf("%s: %s: %s", r.Case.ID(), r.Outcome, r.Text)
		}
	}
	if len(report.LeftBehind) > 0 || len(m.ids()) > 0 {
		t.Errorf("left behind: %q, %q", report.LeftBehind, m.ids())
	}
}

// model is an agent that keeps objects in memory, of whatever kind, as the contract says.
type model struct {
	mu      sync.Mutex
	kinds   []*modelKind
	netdevs interfaces
	serial  int
}

type modelKind struct {
	*conformance.Kind
	objects map[string]conformance.Message // by id
}

// snake is the kind in the names of fields.
func (k *modelKind) snake() protoreflect.Name {
	return protoreflect.Name(strings.ReplaceAll(k.Slug, "-", "_"))
}

func (m *model) ids() (ids []string) {
	for _, k := range m.kinds {
		ids = slices.AppendSeq(ids, maps.Keys(k.objects))
	}
	return ids
}

// serve serves all calls of all services by one handler.
func (m *model) serve(t *testing.T, socket string) *grpc.Server {
	lis, err := net.Listen("unix", socket)
	must.Succeed(t, err)
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		return m.handle(path.Base(method), s)
	}))
	go func() { _ = server.Serve(lis) }()
	return server
}

func (m *model) handle(method string, stream grpc.ServerStream) error {
	if method == "GetInventory" {
		request := &inventory.GetInventoryRequest{}
		if err := stream.RecvMsg(request); err != nil {
			return err
		}
		if request.GetName() == "" {
			return refuse(codes.InvalidArgument, "name is required")
		}
		return stream.SendMsg(&inventory.Inventory{System: &inventory.SystemInfo{Name: "model"}})
	}

	for _, k := range m.kinds {
		verb, isKind := strings.CutSuffix(strings.TrimSuffix(method, "s"), k.Type)
		if !isKind || !slices.Contains([]string{"Create", "Get", "List", "Update", "Delete"}, verb) {
			continue
		}
		request := message(method + "Request")
		if err := stream.RecvMsg(request); err != nil {
			return err
		}

		m.mu.Lock()
		reply, err := m.call(k, verb, request.ProtoReflect())
		m.mu.Unlock()
		if err != nil {
			return err
		}
		return stream.SendMsg(reply)
	}
	return refuse(codes.Unimplemented, "there is no method %s", method)
}

func message(name string) proto.Message {
	full := protoreflect.FullName("opi_api.network.evpn_gw.v1alpha1." + name)
	kind, err := protoregistry.GlobalTypes.FindMessageByName(full)
	if err != nil {
		panic(err)
	}
	return kind.New().Interface()
}

func refuse(code codes.Code, format string, args ...any) error {
	s, err := status.Newf(code, format, args...).WithDetails(&errdetails.ErrorInfo{
		Reason: "REFUSED_" + strings.ToUpper(code.String()), Domain: "model.example.com",
	})
	return cmp.Or(err, s.Err())
}

// get returns a field of a request.
func get(r protoreflect.Message, name protoreflect.Name) protoreflect.Value {
	return r.Get(r.Descriptor().Fields().ByName(name))
}

func (m *model) call(k *modelKind, verb string, r protoreflect.Message) (proto.Message, error) {
	object := func() conformance.Message {
		field := r.Descriptor().Fields().ByName(k.snake())
		if !r.Has(field) {
			return nil
		}
		return r.Get(field).Message().Interface().(conformance.Message)
	}

	switch verb {
	case "Create":
		return m.create(k, get(r, k.snake()+"_id").String(), object())
	case "List":
		return m.list(k, int(get(r, "page_size").Int()), get(r, "page_token").String())
	case "Update":
		mask, _ := get(r, "update_mask").Message().Interface().(*fieldmaskpb.FieldMask)
		return m.update(k, object(), mask.GetPaths(), get(r, "allow_missing").Bool())
	}

	id, err := k.find(get(r, "name").String())
	switch {
	case verb == "Delete" && status.Code(err) == codes.NotFound && get(r, "allow_missing").Bool():
		return &emptypb.Empty{}, nil
	case err != nil:
		return nil, err
	case verb == "Get":
		return m.show(k, id), nil
	}
	return m.remove(k, id)
}

var modelID = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// find returns the id in a name.
func (k *modelKind) find(name string) (string, error) {
	id, ok := strings.CutPrefix(name, k.Collection)
	if !ok || !modelID.MatchString(id) {
		return "", refuse(codes.InvalidArgument, "name %.50q is wrong", name)
	}
	if k.objects[id] == nil {
		return id, refuse(codes.NotFound, "%s does not exist", name)
	}
	return id, nil
}

func (m *model) create(k *modelKind, id string, o conformance.Message) (proto.Message, error) {
	if id == "" {
		m.serial++
		id = fmt.Sprintf("auto-%d", m.serial)
	}
	if !modelID.MatchString(id) {
		return nil, refuse(codes.InvalidArgument, "%s_id %.50q is wrong", k.snake(), id)
	}
	if o == nil || conformance.SpecOf(o) == nil {
		return nil, refuse(codes.InvalidArgument, "spec is required")
	}

	if err := m.check(k, id, conformance.SpecOf(o)); err != nil {
		return nil, err
	}
	if have := k.objects[id]; have != nil &&
		!proto.Equal(sorted(conformance.SpecOf(have)), sorted(conformance.SpecOf(o))) {
		return nil, refuse(codes.AlreadyExists, "%s exists otherwise", id)
	}
	k.objects[id] = k.NewMessage(k.Collection+id, conformance.SpecOf(o))
	return m.show(k, id), nil
}

// sorted returns a spec whose logical bridges are in one order.
func sorted(spec proto.Message) proto.Message {
	spec = proto.Clone(spec)
	if port, ok := spec.(*evpn.BridgePortSpec); ok {
		slices.Sort(port.LogicalBridges)
	}
	return spec
}

// show returns an object with its status.
func (m *model) show(k *modelKind, id string) conformance.Message {
	o := proto.Clone(k.objects[id]).(conformance.Message)
	state, component := conformance.Up, &evpn.Component{
		Name: "model", Status: evpn.CompStatus_COMP_STATUS_SUCCESS,
	}
	if k.Type == "BridgePort" {
		if err := m.netdevs.find(id); err != nil {
			state, component.Status = conformance.Down, evpn.CompStatus_COMP_STATUS_ERROR
			component.Details = fmt.Sprintf("%q", err)
		}
	}
	k.SetStatus(o, state, component)
	return o
}

func (m *model) list(k *modelKind, size int, token string) (proto.Message, error) {
	last, err := hex.DecodeString(token)
	if size < 0 || err != nil {
		return nil, refuse(codes.InvalidArgument, "page %d of %.50q is wrong", size, token)
	}
	reply := message("List" + k.Type + "sResponse")
	r := reply.ProtoReflect()
	page := r.Mutable(r.Descriptor().Fields().ByName(k.snake() + "s")).List()
	size = min(cmp.Or(size, 10), 100)

	for _, id := range slices.Sorted(maps.Keys(k.objects)) {
		if id <= string(last) {
			continue
		}
		if page.Len() == size {
			previous := page.Get(size - 1).Message().Interface().(conformance.Message).GetName()
			r.Set(r.Descriptor().Fields().ByName("next_page_token"),
				protoreflect.ValueOfString(hex.EncodeToString([]byte(path.Base(previous)))))
			break
		}
		page.Append(protoreflect.ValueOfMessage(m.show(k, id).ProtoReflect()))
	}

	return reply, nil
}

func (m *model) update(
	k *modelKind, to conformance.Message, mask []string, allowMissing bool,
) (proto.Message, error) {
	if to == nil {
		return nil, refuse(codes.InvalidArgument, "%s is required", k.snake())
	}
	id, err := k.find(to.GetName())
	if status.Code(err) == codes.NotFound && allowMissing {
		return m.create(k, id, to)
	}
	if err != nil {
		return nil, err
	}

	spec, err := merge(conformance.SpecOf(k.objects[id]), conformance.SpecOf(to), mask)
	if err == nil {
		err = m.check(k, id, spec)
	}
	if err != nil {
		return nil, err
	}
	k.objects[id] = k.NewMessage(k.Collection+id, spec)
	return m.show(k, id), nil
}

// merge returns the spec of an object after an update.
func merge(have, want proto.Message, mask []string) (proto.Message, error) {
	if want == nil {
		return nil, refuse(codes.InvalidArgument, "spec is required")
	}
	if slices.Contains(mask, "*") || slices.Contains(mask, "spec") {
		return want, nil
	}

	merged := proto.Clone(have)
	from, to := want.ProtoReflect(), merged.ProtoReflect()
	for i := range from.Descriptor().Fields().Len() {
		f := from.Descriptor().Fields().Get(i)
		named := slices.Contains(mask, "spec."+string(f.Name()))
		if named {
			to.Clear(f)
		}
		if (named || len(mask) == 0) && from.Has(f) {
			to.Set(f, from.Get(f))
		}
	}

	for _, p := range mask {
		name, inSpec := strings.CutPrefix(p, "spec.")
		isKnown := inSpec && from.Descriptor().Fields().ByName(protoreflect.Name(name)) != nil
		if !isKnown && p != "status" && p != "name" {
			return nil, refuse(codes.InvalidArgument, "update_mask: %.50q is unknown", p)
		}
	}
	return merged, nil
}

func (m *model) remove(k *modelKind, id string) (proto.Message, error) {
	name := k.Collection + id
	for _, other := range m.kinds {
		for _, o := range other.objects {
			if slices.Contains(references(conformance.SpecOf(o)), name) {
				return nil, refuse(codes.FailedPrecondition, "%s is in use by %s", name,
					o.GetName())
			}
		}
	}
	delete(k.objects, id)
	return &emptypb.Empty{}, nil
}

// references returns the names in a spec.
func references(spec proto.Message) []string {
	switch s := spec.(type) {
	case *evpn.BridgePortSpec:
		return s.GetLogicalBridges()
	case *evpn.SviSpec:
		return []string{s.GetVrf(), s.GetLogicalBridge()}
	}
	return nil
}

// check returns what is wrong with a spec.
func (m *model) check(k *modelKind, id string, spec proto.Message) error {
	var err error
	switch s := spec.(type) {
	case *evpn.LogicalBridgeSpec:
		err = m.checkBridge(k, id, s)
	case *evpn.BridgePortSpec:
		err = m.checkPort(k, id, s)
	case *evpn.VrfSpec:
		err = checkPrefix(s.GetLoopbackIpPrefix())
		if s.GetVni() >= 1<<24 {
			err = errors.New("vni is wrong")
		}
	case *evpn.SviSpec:
		err = checkSvi(s)
	}
	if err != nil {
		return refuse(codes.InvalidArgument, "spec: %v", err)
	}

	for _, name := range references(spec) {
		found := false
		for _, other := range m.kinds {
			found = found || other.objects[path.Base(name)] != nil &&
				name == other.Collection+path.Base(name)
		}
		if !found {
			return refuse(codes.NotFound, "%.50q does not exist", name)
		}
	}
	return nil
}

func (m *model) checkBridge(k *modelKind, id string, s *evpn.LogicalBridgeSpec) error {
	for other, o := range k.objects {
		spec := conformance.SpecOf(o).(*evpn.LogicalBridgeSpec)
		if other != id && (spec.GetVlanId() == s.GetVlanId() ||
			s.Vni != nil && spec.GetVni() == s.GetVni()) {
			return fmt.Errorf("vlan_id or vni is that of %s", other)
		}
	}
	if s.GetVlanId() < 1 || s.GetVlanId() > 4094 || s.GetVni() >= 1<<24 {
		return errors.New("vlan_id or vni is wrong")
	}
	if s.GetVtepIpPrefix() == nil {
		return nil
	}
	return checkPrefix(s.GetVtepIpPrefix())
}

func (m *model) checkPort(k *modelKind, id string, s *evpn.BridgePortSpec) error {
	for other, o := range k.objects {
		spec := conformance.SpecOf(o).(*evpn.BridgePortSpec)
		if other != id && string(spec.GetMacAddress()) == string(s.GetMacAddress()) {
			return fmt.Errorf("mac_address is that of %s", other)
		}
	}
	n := len(s.GetLogicalBridges())
	isTrunk := s.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK && n > 0
	isAccess := s.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS && n == 1
	if !isTrunk && !isAccess {
		return errors.New("ptype or logical_bridges is wrong")
	}
	return checkMAC(s.GetMacAddress())
}

func checkSvi(s *evpn.SviSpec) error {
	if len(s.GetGwIpPrefix()) == 0 || s.GetRemoteAs() > 65535 {
		return errors.New("gw_ip_prefix or remote_as is wrong")
	}
	for _, p := range s.GetGwIpPrefix() {
		if err := checkPrefix(p); err != nil {
			return err
		}
	}
	return checkMAC(s.GetMacAddress())
}

func checkMAC(mac []byte) error {
	if len(mac) != 6 || mac[0]&1 != 0 || strings.Trim(string(mac), "\x00") == "" {
		return errors.New("mac_address is wrong")
	}
	return nil
}

func checkPrefix(p *netcommon.IPPrefix) error {
	bits := int32(0)
	switch a := p.GetAddr().GetV4OrV6().(type) {
	case *netcommon.IPAddress_V4Addr:
		bits = 32
	case *netcommon.IPAddress_V6Addr:
		if len(a.V6Addr) == net.IPv6len {
			bits = 128
		}
	}
	if bits == 0 || p.GetLen() < 1 || p.GetLen() > bits {
		return errors.New("the prefix is wrong")
	}
	return nil
}
