// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"strings"
)

// verdict returns the summary: the first stage that failed or is not done, or else the first
// contradiction. It is ok only if everything that decides about the interfaces is known.
func verdict(f *facts, p *Pod) (ok bool, sentence string) {
	if names := f.unexplained(); len(p.Interfaces) == 0 && len(names) > 0 {
		return false, fmt.Sprintf("it is not known whether the pod asks for a Function by %s: %s",
			strings.Join(names, ", "), strings.Join(f.unknown, "; "))
	}
	if len(p.Interfaces) == 0 {
		return true, "the pod asks for no Function: it has no ResourceClaim for one, and no " +
			"extended resource of a DevicePool"
	}

	if i, s := first(p.Interfaces, Failed); s != nil {
		return false, fmt.Sprintf("%s is not %s: %s", i.Title(), s.Name, s.Text)
	}
	if f.away != "" && !f.hasEnded() {
		return false, fmt.Sprintf("xpu-agent does not run on node %s: %s", f.pod.Spec.NodeName, f.away)
	}
	if i, s := first(p.Interfaces, Waiting); s != nil {
		return false, fmt.Sprintf("%s is not %s: %s", i.Title(), s.Name, s.Text)
	}

	for _, i := range p.Interfaces {
		if len(i.Differences) > 0 {
			return false, fmt.Sprintf("%s: %s", i.Title(), i.Differences[0])
		}
	}

	if i, s := first(p.Interfaces, Unknown); s != nil {
		return false, strings.TrimSuffix(fmt.Sprintf("it is not known whether %s is %s: %s",
			i.Title(), s.Name, cmp.Or(s.Text, strings.Join(f.unknown, "; "))), ": ")
	}
	return true, f.praise(p)
}

// first returns the first stage with a status, and its interface, or nil.
func first(interfaces []Interface, status Status) (*Interface, *Stage) {
	for n := range interfaces {
		i := &interfaces[n]
		for m := range i.Stages {
			if i.Stages[m].Status == status {
				return i, &i.Stages[m]
			}
		}
	}
	return nil, nil
}

// praise returns the summary of a pod with which nothing is wrong.
func (f *facts) praise(p *Pod) string {
	switch {
	case f.hasEnded():
		return "the pod has ended or is ending, and nothing is wrong"
	case f.state == nil && f.pod.Spec.NodeName != "":
		return "nothing wrong is known, but the agent of the node could not be asked"
	case len(p.Interfaces) > 1:
		return fmt.Sprintf("nothing is wrong with any of the %d interfaces", len(p.Interfaces))
	}

	if _, s := first(p.Interfaces, Skipped); s != nil && s.Name == Provisioned {
		return "nothing is wrong; " + p.Interfaces[0].Title() + " joins no network: if it should, name " +
			"one in the InterfaceConfig, or have one named by the DeviceClass or DevicePool"
	}
	return "nothing is wrong"
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
