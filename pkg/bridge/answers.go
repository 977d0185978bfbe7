package bridge

import (
	"encoding/base64"
	"slices"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
)

func notFound(k kind, id string) error {
	return status.Errorf(codes.NotFound, "%s %s does not exist", k.word, id)
}

func beingDeleted(k kind, id string) error {
	return status.Errorf(codes.FailedPrecondition, "%s %s is being deleted", k.word, id)
}

func internal(err error) error { return status.Error(codes.Internal, err.Error()) }

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
	if token != "" {
		at, found := slices.BinarySearch(ids, string(last))
		if found {
			at++
		}
		ids = ids[at:]
	}
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
		field := specField(spec, path)
		if field == nil {
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

// specField finds "spec.<field>" for a field directly in the spec.
func specField(spec protoreflect.FieldDescriptor, path string) protoreflect.FieldDescriptor {
	const prefix = "spec."
	if len(path) <= len(prefix) || path[:len(prefix)] != prefix {
		return nil
	}
	return spec.Message().Fields().ByName(protoreflect.Name(path[len(prefix):]))
}
