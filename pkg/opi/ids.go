// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// objectID is the form of ids that agents accept, after https://google.aip.dev/122: 4-63
// characters, the first a letter, the last not a hyphen.
var objectID = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// MinID is the minimum length of an id.
const MinID = 4

// PortID returns the id of a Function's Port on its xPU. It depends only on the device, so a call
// that is repeated after a crash finds the object of the first call.
//
// The id is "vf-dddd-bb-dd-f" with the PCI address, or for an SF "sf-bb-dd-f-sfnum" with the
// address of its PF ("sf-dddd-bb-dd-f-sfnum" if the PCI domain is not 0000). In domain 0000 and
// with an sfnum below 10000, it has at most 15 characters. It is then also a valid netdev name,
// which agents need that find a representor by it.
func PortID(f function.ID) (string, error) {
	if canonical, err := function.ParseID(f.String()); err != nil || canonical != f {
		const form = "%q is not of the form dddd:bb:dd.f, such as 0000:3b:02.1, or for an SF " +
			"0000:3b:00.0/sf88"
		return "", invalid("port id", "", "Function", form, f)
	}

	sfnum, isSF := f.SFNum()
	if !isSF {
		return "vf-" + f.Address.DeviceName(), nil
	}

	return fmt.Sprintf("sf-%s-%d", strings.TrimPrefix(f.Address.DeviceName(), "0000-"), sfnum), nil
}

// ParsePortID reverses [PortID]. ok is false for an id that belongs to no Function.
func ParsePortID(id string) (f function.ID, ok bool) {
	kind, name, _ := strings.Cut(id, "-")
	if kind == "sf" { // its device is named "dddd-bb-dd-f-sf88"
		sfnum := strings.LastIndexByte(name, '-') + 1
		name = name[:sfnum] + "sf" + name[sfnum:]
		if strings.Count(name, "-") == 3 {
			name = "0000-" + name
		}
	}

	f, err := function.ParseDeviceName(name)
	if err != nil {
		return function.ID{}, false
	}
	// Only the canonical id is accepted.
	if again, err := PortID(f); err != nil || again != id {
		return function.ID{}, false
	}

	return f, true
}

// Installation marks the objects of a cluster, or of a node in direct mode, at OPI agents. The ids
// of its networks begin with the mark, and its ports are the ports in its networks. The id of a
// port cannot contain a mark, because agents use it as the name of a netdev. The mark has
// lower-case letters and digits, a letter first.
type Installation string

// NewInstallation returns the mark for an identity, such as the UID of a cluster's namespace
// kube-system. It has 40 bits of the identity's SHA-256, so marks do not collide by chance.
func NewInstallation(identity string) Installation { return Installation("n" + digest(identity)) }

// NetworkID returns the id, of 18 characters, of the installation's network with this name (an
// XPUNetwork's name of any length). If two names ever collide, [Client.EnsureNetwork] returns
// ErrConflict, because no two networks of an installation have the same VLAN.
func (i Installation) NetworkID(name string) string { return string(i) + "-" + digest(name) }

// Owns reports whether the network with this id is the installation's.
func (i Installation) Owns(network string) bool { return strings.HasPrefix(network, string(i)+"-") }

// OwnsPort reports whether a port is the installation's.
func (i Installation) OwnsPort(p Port) bool {
	return len(p.Networks) > 0 && !slices.ContainsFunc(p.Networks, func(id string) bool {
		return !i.Owns(id)
	})
}

// digest returns 8 characters of a hash.
func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:5]))
}

func checkID(op, id string) error {
	if objectID.MatchString(id) {
		return nil
	}
	return invalid(op, id, "ID",
		"must be 4-63 characters of a-z, 0-9 and '-', begin with a letter and not end with '-'")
}
