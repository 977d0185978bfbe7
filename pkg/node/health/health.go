// SPDX-License-Identifier: Apache-2.0

// Package health finds the problems of Functions. All ways of publishing Functions use it: taints
// in ResourceSlices, the health stream to the kubelet, and the device plugin.
package health

import (
	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Source reports one kind of problem. It returns "" if the Function does not have the problem. It
// is safe for concurrent use and does not block.
type Source func(function.ID) (message string)

// Checker combines the sources. A source may be nil if its problem cannot occur.
type Checker struct {
	// Pool returns the pool of a Function. Held reports whether a pod has the Function, or had it
	// and it is not free yet. If Pool is nil, the state of the Function on the host is not checked.
	Pool func(function.ID) (pool.Pool, bool)
	Held func(function.ID) bool

	XPUAway func(function.Function) (message string) // the xPU of the Function's PF does not answer
	// Cordoned reports that an administrator keeps new pods away from the Function's PF.
	Cordoned func(function.Function) (message string)
	// Fault reports an error of the driver of the Function or of its PF.
	Fault func(function.Function) (message string)

	ProvisionFailed Source // the xPU refused the Function's Port
	ReleasePending  Source // the last Attachment is not released yet
	Quarantined     Source // the last release did not restore the Function
	// Lost reports that a pod lost the Function because its device disappeared, and does not have
	// it back.
	Lost Source
	// InUse reports that a pod got the Function by a way of publishing other than the caller's.
	InUse Source
}

// Problems returns the problems of a Function in a stable order. A Function without problems is
// healthy.
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
	if c.Cordoned != nil { // last, because the first problem is the one that is counted
		note(v1alpha1.TaintCordoned, c.Cordoned(f))
	}

	return problems
}

// unusable calls [Unusable] for a Function that is free. If the pool has spec.driver, this driver
// is bound when a pod comes.
func (c *Checker) unusable(f function.Function) (function.Problem, bool) {
	if c.Pool == nil || c.Held(f.ID) {
		return function.Problem{}, true
	}
	p, _ := c.Pool(f.ID)
	return Unusable(f, p, string(p.Spec.Driver))
}
