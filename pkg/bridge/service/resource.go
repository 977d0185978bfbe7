// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"encoding/base64"
	"regexp"
	"slices"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/fieldmaskpb"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// names are the names of one kind of objects.
type names struct {
	word       string // for an object in messages to clients
	noun       string // for an object in the log
	component  string // for its component in the API's status
	prefix     string // of the resource names that the agent gives, as opi-evpn-bridge does
	protoAlias string // of the names in the API's documentation, which clients may use
	bucket     string // in the state file
}

var (
	networkNames = names{
		word: "logical bridge", noun: "network", component: "bridge",
		prefix: "//network.opiproject.org/bridges/", protoAlias: "logicalBridges/",
		bucket: "logical-bridges",
	}
	portNames = names{
		word: "bridge port", noun: "port", component: "representor",
		prefix: "//network.opiproject.org/ports/", protoAlias: "bridgePorts/",
		bucket: "bridge-ports",
	}
	vrfNames = names{
		word: "VRF", noun: "VRF", component: "vrf",
		prefix: "//network.opiproject.org/vrfs/", protoAlias: "vrfs/", bucket: "vrfs",
	}
	sviNames = names{
		word: "SVI", noun: "SVI", component: "svi",
		prefix: "//network.opiproject.org/svis/", protoAlias: "svis/", bucket: "svis",
	}
)

// idForm is the form of ids (https://google.aip.dev/122) as opi-evpn-bridge checks it.
var idForm = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// checkID checks an id that a client chose.
func (n names) checkID(id string) error {
	if idForm.MatchString(id) {
		return nil
	}
	return refusal.New(codes.InvalidArgument, refusal.InvalidID,
		"%s id %.100q: must be 4-63 characters of a-z, 0-9 and '-', begin with a letter and not end "+
			"with '-'", n.word, id)
}

// parseName returns the id in a resource name.
func (n names) parseName(name string) (string, error) {
	for _, prefix := range []string{n.prefix, n.protoAlias} {
		if id, ok := strings.CutPrefix(name, prefix); ok {
			return id, n.checkID(id)
		}
	}
	return "", refusal.New(codes.InvalidArgument, refusal.InvalidName,
		"%s name %.100q: must be %s<id> or %s<id>", n.word, name, n.prefix, n.protoAlias)
}

// state is the status of an object. The statuses of all kinds have the same numbers.
type state = evpn.BPOperStatus

const (
	stateUp       = evpn.BPOperStatus_BP_OPER_STATUS_UP
	stateDown     = evpn.BPOperStatus_BP_OPER_STATUS_DOWN
	stateDeleting = evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED
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

// page returns one page of sorted ids (https://google.aip.dev/158). The token is the last id of the
// page before, so that it stays right when objects come and go, and when the agent restarts.
func page(ids []string, size int32, token string) (_ []string, next string, _ error) {
	if size < 0 {
		return nil, "", refusal.New(codes.InvalidArgument, refusal.InvalidPage,
			"page_size %d: must not be negative", size)
	}

	size = min(cmp.Or(size, 50), 250)
	last, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || token != "" && !idForm.Match(last) {
		return nil, "", refusal.New(codes.InvalidArgument, refusal.InvalidPage,
			"page_token %.100q: must be one that this agent gave", token)
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
	return ids, pageToken(ids[size-1]), nil
}

// maxPageBytes limits the size of the objects in a page, because clients of gRPC accept no answer
// of more than 4 MiB unless they are configured to.
const maxPageBytes = 3 << 20

// pageToken returns the token of the page after an id.
func pageToken(last string) string { return base64.RawURLEncoding.EncodeToString([]byte(last)) }

// masked returns a copy of have in which the fields that the mask names come from want
// (https://google.aip.dev/134). Without a mask these are the fields that want has, so that a client
// that does not know of a field does not remove it. Fields that only the agent sets may be in the
// mask and are ignored (https://google.aip.dev/203).
func masked[S proto.Message](have, want S, mask *fieldmaskpb.FieldMask) (S, error) {
	paths := mask.GetPaths()
	whole := slices.Contains(paths, "*") || slices.Contains(paths, "spec")
	if whole || len(paths) == 0 && !want.ProtoReflect().IsValid() {
		return want, nil // a spec that is missing is refused later
	}

	merged := proto.CloneOf(have)
	from, to := want.ProtoReflect(), merged.ProtoReflect()
	if len(paths) == 0 {
		from.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
			to.Set(field, value)
			return true
		})
	}

	for _, path := range paths {
		if path == "name" || path == "status" || strings.HasPrefix(path, "status.") {
			continue
		}

		name, inSpec := strings.CutPrefix(path, "spec.")
		field := to.Descriptor().Fields().ByName(protoreflect.Name(name))
		if !inSpec || field == nil {
			return merged, refusal.New(codes.InvalidArgument, refusal.InvalidMask,
				"update_mask: %q: must be spec or a field of it", path)
		}

		to.Clear(field)
		if from.Has(field) {
			to.Set(field, from.Get(field))
		}
	}

	return merged, nil
}
