// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"fmt"
	"strings"
)

// verdict returns the summary: the first stage that is not done, or else the first contradiction.
func verdict(f *facts, p *Pod) (ok bool, sentence string) {
	if len(p.Interfaces) == 0 {
		return true, "the pod asks for no Function: it has no ResourceClaim for one, and no " +
			"extended resource of a DevicePool"
	}

	for _, status := range []Status{Failed, Waiting} {
		for _, i := range p.Interfaces {
			for _, s := range i.Stages {
				if s.Status == status {
					return false, fmt.Sprintf("%s is not %s: %s", i.Title(), s.Name, s.Text)
				}
			}
		}
	}

	for _, i := range p.Interfaces {
		if len(i.Differences) > 0 {
			return false, fmt.Sprintf("%s: %s", i.Title(), i.Differences[0])
		}
	}

	if f.state == nil && f.pod.Spec.NodeName != "" {
		return true, "nothing wrong is known, but the agent of the node could not be asked"
	}
	if len(p.Interfaces) == 1 {
		return true, "nothing is wrong"
	}

	return true, fmt.Sprintf("nothing is wrong with any of the %d interfaces", len(p.Interfaces))
}

// Title returns a heading for an interface.
func (i Interface) Title() string {
	var parts []string
	if i.Name != "" {
		parts = append(parts, "interface "+i.Name)
	}

	switch {
	case i.Claim != "" && i.Request != "":
		parts = append(parts, fmt.Sprintf("request %s of claim %s", i.Request, i.Claim))
	case i.Claim != "":
		parts = append(parts, "claim "+i.Claim)
	case i.Resource != "":
		parts = append(parts, i.Resource)
	}

	return strings.Join(parts, ", ")
}
