// Package health says what is wrong with a Function, in one place for every way of publishing it: taints in
// ResourceSlices, the kubelet's health stream, and the device plugin.
package health

import (
	"fmt"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
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
type Source func(function.ID) (message string)

// Checker puts the sources together. A kind of problem that cannot be, as a way of working that is not in use has none,
// has a nil source.
type Checker struct {
	// XPUAway knows Functions whose xPU cannot be asked. It is given the whole Function, as the xPU is that of its PF. A
	// Function whose PF has no xPU is free of it.
	XPUAway func(function.Function) (message string)
	// Fault knows Functions of which their driver tells an error. It is given the whole Function, as it may be its PF's.
	Fault func(function.Function) (message string)
	// ProvisionFailed knows Functions whose Port the xPU refused.
	ProvisionFailed Source
	// ReleasePending knows Functions whose last Attachment could not be taken back.
	ReleasePending Source
	// Lost knows Functions that a pod has lost, as their device went and came back, and has not got back.
	Lost Source
	// InUse knows Functions that a pod has by another way of publishing than the one that asks.
	InUse Source
}

// Problems returns what is wrong with the Function, in a stable order; none means healthy.
func (c *Checker) Problems(f function.Function) []Problem {
	var problems []Problem
	note := func(taint, message string) {
		if message != "" {
			problems = append(problems, Problem{Taint: taint, Message: message})
		}
	}
	if !f.LinkUp {
		note(v1alpha1.TaintLinkDown, fmt.Sprintf("PF %s (%s) has no link: check its cable and the xPU", f.PFName, f.PF))
	}
	if c.Fault != nil {
		note(v1alpha1.TaintFault, c.Fault(f))
	}
	if c.XPUAway != nil {
		note(v1alpha1.TaintXPUAway, c.XPUAway(f))
	}
	note(v1alpha1.TaintProvisionFailed, c.ProvisionFailed.message(f.ID))
	note(v1alpha1.TaintReleasePending, c.ReleasePending.message(f.ID))
	note(v1alpha1.TaintLost, c.Lost.message(f.ID))
	note(v1alpha1.TaintInUse, c.InUse.message(f.ID))
	return problems
}

func (s Source) message(id function.ID) string {
	if s == nil {
		return ""
	}
	return s(id)
}
