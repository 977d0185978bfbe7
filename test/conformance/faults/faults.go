// SPDX-License-Identifier: Apache-2.0

// Package faults has faults of opi-bridge, and puts them into its source for the go command's
// -overlay. It does not change the files in the tree.
package faults

import (
	"fmt"
	"slices"
	"strings"
)

// Fault is a mistake in opi-bridge.
type Fault struct {
	Name  string
	Cases string // regexp of the names of cases that find it, with the profile

	file  string // in the module
	edits []edit
}

// edit replaces a text that a file has once.
type edit struct{ old, new string }

// Variable is the environment variable that says which fault opi-bridge has, by its name.
const Variable = "OPI_BRIDGE_FAULT"

// All returns all faults.
func All() []Fault {
	return slices.Concat(collectionFaults(), resourceFaults(), nameFaults(), networkFaults(),
		portFaults(), otherFaults(), peerFaults(), packetFaults(), trunkFaults(), l3Faults())
}

// Profile returns the profile of the cases.
func (f Fault) Profile() string {
	profile, _, _ := strings.Cut(f.Cases, "/")
	return profile
}

// IsVLANAware reports whether the fault shows only where bridges filter VLANs and there are VRFs,
// which some kernels lack.
func (f Fault) IsVLANAware() bool {
	return f.Profile() == "TRUNK" || f.Profile() == "L3" || strings.HasPrefix(f.Name, vlanAware)
}

// vlanAware begins the names of faults of other profiles that show only there.
const vlanAware = "with VLANs: "

// IsOfPeers reports whether the fault is about who may connect, so that the agent needs TLS.
func (f Fault) IsOfPeers() bool { return strings.HasPrefix(f.Cases, "SECURITY/endpoint/") }

// Pattern returns the regexp of the whole names of the cases.
func (f Fault) Pattern() string {
	return "^(" + strings.ReplaceAll(f.Cases, ".*", "(logical-bridge|bridge-port)") + ")$"
}

// apply returns the source with the fault in it.
func (f Fault) apply(source string) (string, error) {
	for _, e := range f.edits {
		if n := strings.Count(source, e.old); n != 1 {
			return "", fmt.Errorf("%s has %q %d times, want once", f.file, e.old, n)
		}
		source = strings.Replace(source, e.old, e.new, 1)
	}
	return source, nil
}
