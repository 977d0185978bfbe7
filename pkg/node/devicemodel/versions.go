// SPDX-License-Identifier: Apache-2.0

package devicemodel

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/version"
)

// firstWithoutPanic are the first patch releases, by minor release of Kubernetes 1.x, whose
// scheduler does not end at a claim with allocationMode All when a device has counters
// (kubernetes/kubernetes#138882). Releases before 1.35 have no counters of another slice, and
// 1.37.0 has the correction.
var firstWithoutPanic = map[uint]uint{35: 6, 36: 2}

// firstWithLists is the first minor release of Kubernetes 1.x whose scheduler keeps count of the
// values that devices have in common. The allocator of 1.36 forgets them when it takes a device
// back: of claims for three and more devices, and of those with several constraints, it refuses
// some that have a solution (matchAttributeConstraint in structured/internal/experimental).
const firstWithLists = 37

// ListsHarm returns a sentence if attributes with several values may make the scheduler of a
// cluster refuse claims that can be satisfied, and "" if the version of its API server, "v1.37.1",
// is known to be new enough. A version that cannot be understood may be an old one.
func ListsHarm(gitVersion string) string {
	v, err := version.ParseGeneric(gitVersion)
	if err != nil {
		return fmt.Sprintf("the version of the API server, %q, is not understood, and lists are "+
			"for Kubernetes 1.%d or later", gitVersion, firstWithLists)
	}
	if v.AtLeast(version.MajorMinor(1, firstWithLists)) {
		return ""
	}
	return fmt.Sprintf("the scheduler of Kubernetes %s refuses claims that match by lists although "+
		"they can be satisfied; upgrade it to 1.%d or later", gitVersion, firstWithLists)
}

// CountersHarm returns a sentence if devices with counters would end the scheduler of a cluster,
// whose API server has this version: "v1.36.1". It returns "" if they would not, or if the version
// cannot be understood. The scheduler may be older than the API server, which does not tell.
func CountersHarm(gitVersion string) string {
	v, err := version.ParseGeneric(gitVersion)
	if err != nil || v.Major() != 1 {
		return ""
	}
	first, affected := firstWithoutPanic[v.Minor()]
	if !affected || v.Patch() >= first {
		return ""
	}
	return fmt.Sprintf("the scheduler of Kubernetes %s ends at a claim with allocationMode All and such "+
		"devices (kubernetes/kubernetes#138882); upgrade it to 1.%d.%d or later", gitVersion, v.Minor(),
		first)
}
