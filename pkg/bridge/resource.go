package bridge

import (
	"encoding/base64"
	"regexp"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

// kind is a collection of OPI objects: how they are named, and where they are kept.
type kind struct {
	word   string // for people
	prefix string // of the names we give, the ones opi-evpn-bridge gives
	proto  string // of the names the API's documentation gives; taken too
	bucket string // of the state
}

var (
	networkKind = kind{"logical bridge", "//network.opiproject.org/bridges/", "logicalBridges/", "logical-bridges"}
	portKind    = kind{"bridge port", "//network.opiproject.org/ports/", "bridgePorts/", "bridge-ports"}
)

// idForm is https://google.aip.dev/122 as opi-evpn-bridge checks it.
var idForm = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// parseID checks an id that a client chose.
func (k kind) parseID(id string) error {
	if idForm.MatchString(id) {
		return nil
	}
	return status.Errorf(codes.InvalidArgument,
		"%s id %q: must be 4-63 characters of a-z, 0-9 and '-', begin with a letter and not end with '-'", k.word, id)
}

// parseName gives the id in a resource name.
func (k kind) parseName(name string) (string, error) {
	id, ok := strings.CutPrefix(name, k.prefix)
	if !ok {
		id, ok = strings.CutPrefix(name, k.proto)
	}
	if !ok {
		return "", status.Errorf(codes.InvalidArgument, "%s name %q: must be %s<id> or %s<id>", k.word, name, k.prefix, k.proto)
	}
	return id, k.parseID(id)
}

func (k kind) beingDeleted(id string) error {
	return status.Errorf(codes.FailedPrecondition, "%s %s is being deleted", k.word, id)
}

// lookup returns the object that has a resource name. If there is none the status is NotFound, and the id is valid.
func lookup[O any](k kind, objects map[string]*O, name string) (id string, _ *O, _ error) {
	id, err := k.parseName(name)
	if err != nil {
		return "", nil, err
	}
	if objects[id] == nil {
		return id, nil, status.Errorf(codes.NotFound, "%s %s does not exist", k.word, id)
	}
	return id, objects[id], nil
}

// state is what an object is: in metrics, and as a network and a port in the API.
type state struct {
	word    string
	network evpn.LBOperStatus
	port    evpn.BPOperStatus
}

var (
	stateUp       = state{"up", evpn.LBOperStatus_LB_OPER_STATUS_UP, evpn.BPOperStatus_BP_OPER_STATUS_UP}
	stateDown     = state{"down", evpn.LBOperStatus_LB_OPER_STATUS_DOWN, evpn.BPOperStatus_BP_OPER_STATUS_DOWN}
	stateDeleting = state{"deleting", evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED, evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED}
)

func stateOf(deleting bool, failure error) state {
	switch {
	case deleting:
		return stateDeleting
	case failure != nil:
		return stateDown
	}
	return stateUp
}

func component(name string, failure error) *evpn.Component {
	if failure != nil {
		return &evpn.Component{Name: name, Status: evpn.CompStatus_COMP_STATUS_ERROR, Details: failure.Error()}
	}
	return &evpn.Component{Name: name, Status: evpn.CompStatus_COMP_STATUS_SUCCESS}
}

const (
	defaultPage = 50
	largestPage = 250
)

// page cuts a page out of sorted ids (https://google.aip.dev/158). The token is the last id of the page before, so a
// list goes on where it was also if objects came and went, or the agent was restarted.
func page(ids []string, size int32, token string) (_ []string, next string, _ error) {
	if size < 0 {
		return nil, "", status.Errorf(codes.InvalidArgument, "page_size %d: must not be negative", size)
	}
	if size == 0 {
		size = defaultPage
	}
	size = min(size, largestPage)
	last, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || token != "" && !idForm.Match(last) {
		return nil, "", status.Errorf(codes.InvalidArgument, "page_token %q: is none of this agent's", token)
	}
	first, found := slices.BinarySearch(ids, string(last))
	if found {
		first++
	}
	ids = ids[first:]
	if len(ids) <= int(size) {
		return ids, "", nil
	}
	ids = ids[:size]
	return ids, base64.RawURLEncoding.EncodeToString([]byte(ids[size-1])), nil
}

// applyMask changes the fields of to that the mask names, all of the spec if it is empty (https://google.aip.dev/134).
// Only the spec can be changed.
func applyMask(to, from proto.Message, mask *fieldmaskpb.FieldMask) error {
	spec := to.ProtoReflect().Descriptor().Fields().ByName("spec")
	target, source := to.ProtoReflect(), from.ProtoReflect()
	paths := mask.GetPaths()
	if len(paths) == 0 || slices.Contains(paths, "*") || slices.Contains(paths, "spec") {
		set(target, source, spec)
		return nil
	}
	for _, path := range paths {
		name, inSpec := strings.CutPrefix(path, "spec.")
		field := spec.Message().Fields().ByName(protoreflect.Name(name))
		if !inSpec || field == nil {
			return status.Errorf(codes.InvalidArgument, "update_mask: %q: must be spec or a field of it", path)
		}
		set(target.Mutable(spec).Message(), source.Get(spec).Message(), field)
	}
	return nil
}

func set(to, from protoreflect.Message, field protoreflect.FieldDescriptor) {
	if from.Has(field) {
		to.Set(field, from.Get(field))
		return
	}
	to.Clear(field)
}
