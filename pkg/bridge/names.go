package bridge

import (
	"crypto/sha256"
	"encoding/base32"
	"regexp"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// kind is a collection of OPI objects: how they are named.
type kind struct {
	word   string // for people
	prefix string // of the names we give, the ones opi-evpn-bridge gives
	proto  string // of the names the API's documentation gives; taken too
}

var (
	networkKind = kind{word: "logical bridge", prefix: "//network.opiproject.org/bridges/", proto: "logicalBridges/"}
	portKind    = kind{word: "bridge port", prefix: "//network.opiproject.org/ports/", proto: "bridgePorts/"}
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

// netdevSuffix makes a netdev name (at most 15 bytes) of a three-byte prefix and a network's id: the id itself if it
// fits, so that people recognise it, else 60 bits of its hash.
func netdevSuffix(id string) string {
	const room = 15 - 3
	if len(id) <= room {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:]))[:room]
}

func bridgeName(id string) string { return "br-" + netdevSuffix(id) }
func vxlanName(id string) string  { return "vx-" + netdevSuffix(id) }

// aliasPrefix marks the netdevs that are ours, in their ifalias.
const aliasPrefix = "opi-bridge:"
