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

// objectID is what agents check of https://google.aip.dev/122: 4-63 characters, a letter first, no
// hyphen last.
var objectID = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)

// MinID is how many characters an id has at least.
const MinID = 4

// PortID is the id under which a Function's Port is kept on its xPU. It is a pure function of the
// device, so a call that is repeated after a crash finds what the first one made.
//
// The id is "vf-dddd-bb-dd-f" with the PCI address, or for an SF "sf-bb-dd-f-sfnum" with the
// address of its PF (with the PCI domain, "sf-dddd-bb-dd-f-sfnum", where that is not 0000). In the
// usual domain, with an sfnum below 10000, it has at most 15 characters: it is then also a valid
// netdev name, as agents need that look up a representor by it.
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

// ParsePortID reverses [PortID]. ok is false for an id that no Function has.
func ParsePortID(id string) (f function.ID, ok bool) {
	kind, name, _ := strings.Cut(id, "-")
	if kind == "sf" { // the name of its device is "dddd-bb-dd-f-sf88"
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
	// A Function has a single id.
	if again, err := PortID(f); err != nil || again != id {
		return function.ID{}, false
	}

	return f, true
}

// Installation marks what a cluster, or a node in direct mode, has at OPI agents: the ids of its
// networks begin with it, and its ports are those in its networks. The id of a port cannot have a
// mark, as agents take it for the name of a netdev. The mark has small letters and digits, a letter
// first.
type Installation string

// NewInstallation returns the mark of the installation with this identity, such as the UID of a
// cluster's namespace kube-system. It has 40 bits of the identity's SHA-256, so marks do not
// collide by chance.
func NewInstallation(identity string) Installation { return Installation("n" + digest(identity)) }

// NetworkID is the id under which the installation's network of this name (an XPUNetwork's, any
// length) is kept on an xPU. It has 18 characters. Should two names ever collide,
// [Client.EnsureNetwork] says ErrConflict, as no two networks of an installation have the same
// VLAN.
func (i Installation) NetworkID(name string) string { return string(i) + "-" + digest(name) }

// Owns says whether the network of this id is the installation's.
func (i Installation) Owns(network string) bool { return strings.HasPrefix(network, string(i)+"-") }

// OwnsPort says whether a port is the installation's.
func (i Installation) OwnsPort(p Port) bool {
	return len(p.Networks) > 0 && !slices.ContainsFunc(p.Networks, func(id string) bool {
		return !i.Owns(id)
	})
}

// digest has 8 characters.
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
