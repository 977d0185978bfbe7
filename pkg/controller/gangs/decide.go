// SPDX-License-Identifier: Apache-2.0

package gangs

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Answer is what a claim may report to the scheduler.
type Answer int

const (
	// Alone lets the claim report what its own Ports are.
	Alone Answer = iota
	// Wait lets the claim report neither success nor failure yet.
	Wait
	// GiveBack lets the claim report that it failed, so that the scheduler takes its devices back.
	GiveBack
)

// Verdict is the answer for one claim.
type Verdict struct {
	Answer Answer
	// Group is the name of the PodGroup, "" for the claim of a pod that is in no gang.
	Group string
	// Reason and Message say why the claim is given back.
	Reason, Message string

	allocation string    // of the claim that was judged; see [allocationOf]
	pod        types.UID // of the claim that was judged; see [podOf]
}

// pod is a pod of a gang that has not failed and is not being deleted.
type pod struct {
	name  string
	bound bool // or it has succeeded
	// begun is set if the pod is evidence that its gang was complete: it was bound with devices
	// that have binding conditions, or one of its claims says that it may be.
	begun bool
	// lacks says what the pod waits for, "" if nothing of its claims keeps it from being bound.
	lacks string
	// claims are those with devices of this driver that have binding conditions.
	claims []gangClaim
}

// gangClaim is one allocation of a claim.
type gangClaim struct {
	key        types.NamespacedName
	allocation string    // see [allocationOf]
	pod        types.UID // see [podOf]
	allocated  time.Time
	failed     string // why an xPU refuses a Port, "" if none does
	saysFailed bool   // it has reported that it failed or is given back
	// givenBackAt is when the claim reported that its gang is given back, zero if it did not.
	givenBackAt time.Time
	givenBack   string // the message then
}

// gang is what is known about a PodGroup.
type gang struct {
	name string
	// minCount is how many pods run together. It is 0 if that is not known, or if the pods of the
	// group need not run together.
	minCount int
	pods     []pod
	// deadline is when an incomplete gang is given back.
	deadline time.Time
	// begins is set while the controller has just begun to look at gangs.
	begins bool
}

// decide returns the answer for each claim of the pods that are not bound.
func decide(g gang, now time.Time) map[types.NamespacedName]Verdict {
	verdicts := map[types.NamespacedName]Verdict{}
	answer, message := g.answer(now)
	earlier, because := g.givenBack()

	for _, p := range g.pods {
		for _, c := range p.claims {
			v := Verdict{Answer: answer, Group: g.name, Reason: v1alpha1.ReasonGangFailed,
				Message: message, allocation: c.allocation, pod: c.pod}
			switch {
			case p.bound:
				v.Answer = Alone
			case g.begins && answer != Alone && !earlier.IsZero() && !c.allocated.After(earlier):
				// A controller before this one gave the gang back, and did not reach every claim. This
				// one reaches all, and needs not compare its clock with the scheduler's.
				v.Answer, v.Message = GiveBack, because
			case answer == Wait && p.failed() != "":
				// The pod is placed again while the others wait. The scheduler would take back all
				// claims of a gang too slowly: one after the other, with a pause before each. Of a
				// pod it looks at no later claim while an earlier one is not ready, so that all of
				// them must fail (Kubernetes 1.37, isPodReadyForBinding).
				v.Answer, v.Reason = GiveBack, v1alpha1.ReasonSiblingFailed
				v.Message = p.failed()
			}
			verdicts[c.key] = v
		}
	}

	return verdicts
}

// answer returns what all claims of pods that are not bound have in common, and why they are given
// back.
func (g gang) answer(now time.Time) (Answer, string) {
	if g.minCount == 0 {
		return Alone, ""
	}

	ready := 0
	for _, p := range g.pods {
		switch {
		case p.begun:
			return Alone, ""
		case p.bound || p.reason() == "":
			ready++
		}
	}

	switch {
	case ready >= g.minCount:
		return Alone, ""
	case !now.Before(g.deadline):
		return GiveBack, g.incomplete(ready)
	}
	return Wait, ""
}

// failed says why an xPU refuses a Port of the pod, "" if none does.
func (p pod) failed() string {
	for _, c := range p.claims {
		if c.failed != "" {
			return c.failed
		}
	}
	return ""
}

// reason says why the pod cannot be bound yet, "" if it can.
func (p pod) reason() string { return cmp.Or(p.failed(), p.lacks) }

// named is how many pods a message names.
const named = 3

// incomplete says which pods the gang lacks.
func (g gang) incomplete(ready int) string {
	var missing []string
	for _, p := range g.pods {
		if reason := p.reason(); !p.bound && reason != "" {
			missing = append(missing, fmt.Sprintf("pod %s: %s", p.name, reason))
		}
	}
	if more := len(missing) - named; more > 0 {
		missing = append(missing[:named], fmt.Sprintf("and %d other pods", more))
	}
	if absent := g.minCount - len(g.pods); absent > 0 {
		missing = append(missing, fmt.Sprintf("it has %d pods", len(g.pods)))
	}

	return fmt.Sprintf("PodGroup %s was not complete in time, with %d of %d pods: %s", g.name, ready,
		g.minCount, strings.Join(missing, "; "))
}

// givenBack returns when a claim of a pod that is not bound last reported that the gang is given
// back, and why. The time is zero if none reported it.
func (g gang) givenBack() (at time.Time, why string) {
	for _, p := range g.pods {
		for _, c := range p.claims {
			if !p.bound && c.givenBackAt.After(at) {
				at, why = c.givenBackAt, c.givenBack
			}
		}
	}
	return at, why
}
