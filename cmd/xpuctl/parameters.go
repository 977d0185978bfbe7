// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// wrongParameters returns what the driver would refuse in the parameters of classes, templates, and
// claims that are not allocated, each with its object. The scheduler does not look into parameters,
// so that a pod gets its device and does not start.
func wrongParameters(s *snapshot.Snapshot) (notes []string) {
	add := func(object string, err error) {
		if err == nil {
			return
		}
		for line := range strings.SplitSeq(err.Error(), "\n") {
			notes = append(notes, fmt.Sprintf("%s: pods with it would not start: %s", object, line))
		}
	}

	for _, c := range s.Classes {
		add("DeviceClass "+c.Name, claim.ValidateClass("spec", &c.Spec))
	}
	for _, t := range s.Templates {
		add("ResourceClaimTemplate "+t.Namespace+"/"+t.Name,
			claim.ValidateClaim("spec.spec.devices", &t.Spec.Spec.Devices))
	}
	for _, c := range s.Claims {
		if c.Status.Allocation == nil {
			add("ResourceClaim "+c.Namespace+"/"+c.Name,
				claim.ValidateClaim("spec.devices", &c.Spec.Devices))
		}
	}

	return notes
}
