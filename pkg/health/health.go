// Package health says what is wrong with a Function, in one place for every way of publishing it: taints in
// ResourceSlices, the kubelet's health stream, and the device plugin.
package health

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// Problem is a reason not to hand out a Function.
type Problem struct {
	// Taint is the key of the device taint.
	Taint string
	// Message says what happened and what to do, in a sentence.
	Message string
}

// Source knows one kind of problem: an empty message means that the Function is free of it. Implementations are safe
// for concurrent use and do not block.
type Source func(inventory.ID) (message string)

// Checker puts the sources together.
type Checker struct {
	// ReleasePending knows Functions whose last Attachment could not be taken back.
	ReleasePending Source
	// ProvisionFailed knows Functions whose Port the xPU refused.
	ProvisionFailed Source
}

// Problems returns what is wrong with the Function, in a stable order; none means healthy.
func (c *Checker) Problems(f inventory.Function) []Problem {
	var problems []Problem
	if !f.LinkUp {
		problems = append(problems, Problem{
			Taint:   v1alpha1.TaintLinkDown,
			Message: fmt.Sprintf("PF %s (%s) has no link: check its cable and the xPU", f.PFName, f.PF),
		})
	}
	if message := c.ProvisionFailed(f.ID); message != "" {
		problems = append(problems, Problem{Taint: v1alpha1.TaintProvisionFailed, Message: message})
	}
	if message := c.ReleasePending(f.ID); message != "" {
		problems = append(problems, Problem{Taint: v1alpha1.TaintReleasePending, Message: message})
	}
	return problems
}
