// SPDX-License-Identifier: Apache-2.0

// Package health says what is wrong with a Function, for all ways of publishing it: taints in
// ResourceSlices, the kubelet's health stream, and the device plugin.
package health

import (
	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Source knows one kind of problem, and returns "" for a Function that does not have it. It is safe
// for concurrent use and does not block.
type Source func(function.ID) (message string)

// Checker combines the sources. The source of a problem that cannot occur may be nil.
type Checker struct {
	// Pool is the pool that has a Function, and Held says whether a pod has the Function, or had it
	// and it is not free yet. Without Pool, what the host shows of Functions is not judged.
	Pool func(function.ID) (pool.Pool, bool)
	Held func(function.ID) bool

	XPUAway func(function.Function) (message string) // the xPU of the Function's PF does not answer
	// the driver of the Function or of its PF reports an error
	Fault func(function.Function) (message string)

	ProvisionFailed Source // the xPU refused the Function's Port
	ReleasePending  Source // the last Attachment is not released yet
	Quarantined     Source // the Function did not come back from the last Attachment as it was
	// a pod has lost the Function because its device went, and does not have it back
	Lost Source
	// a pod has the Function by another way of publishing than the one that asks
	InUse Source
}

// Problems returns what is wrong with the Function, in a stable order; none means healthy.
func (c *Checker) Problems(f function.Function) []function.Problem {
	var problems []function.Problem
	note := func(taint, message string) {
		if message != "" {
			problems = append(problems, function.Problem{Taint: taint, Message: message})
		}
	}

	if problem, ok := c.unusable(f); !ok {
		problems = append(problems, problem)
	}

	if !f.LinkUp {
		note(v1alpha1.TaintLinkDown, f.NoLink())
	}

	if c.Fault != nil {
		note(v1alpha1.TaintFault, c.Fault(f))
	}

	if c.XPUAway != nil {
		note(v1alpha1.TaintXPUAway, c.XPUAway(f))
	}

	noteFrom := func(taint string, source Source) {
		if source != nil {
			note(taint, source(f.ID))
		}
	}

	noteFrom(v1alpha1.TaintProvisionFailed, c.ProvisionFailed)
	noteFrom(v1alpha1.TaintReleasePending, c.ReleasePending)
	noteFrom(v1alpha1.TaintQuarantined, c.Quarantined)
	noteFrom(v1alpha1.TaintLost, c.Lost)
	noteFrom(v1alpha1.TaintInUse, c.InUse)

	return problems
}

// unusable is [Unusable] for a Function that is free. The driver of a pool with spec.driver is
// bound when a pod comes.
func (c *Checker) unusable(f function.Function) (function.Problem, bool) {
	if c.Pool == nil || c.Held(f.ID) {
		return function.Problem{}, true
	}
	p, _ := c.Pool(f.ID)
	return Unusable(f, p, string(p.Spec.Driver))
}
