package lifecycle

import (
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// releaseGrace is how long a release may take before the Function counts as unhealthy. A usual one takes milliseconds;
// telling the API server about each would cost two writes for every pod.
const releaseGrace = 10 * time.Second

// tell says that a Function's health may have changed, and again when it took too long to come back.
func (m *Manager) tell(id function.ID) {
	m.options.Changed()
	a, exists := m.journal.Get(id)
	if exists && (a.State == journal.Releasing || a.State == journal.Detaching || a.State == journal.Lost) {
		time.AfterFunc(releaseGrace, m.options.Changed)
	}
}

// Releasing knows Functions that are not free yet after their last pod, at once; "" for all others. It is for the device
// plugin: the kubelet takes a Function for free as soon as the pod is gone, and hears of health by a stream that costs
// nothing.
func (m *Manager) Releasing(id function.ID) string {
	a, exists := m.journal.Get(id)
	if !exists || a.State != journal.Releasing {
		return m.Overdue(id)
	}
	return "the Function " + Pending(a)
}

// Overdue knows Functions that should be back by now; "" for all others. It is for DRA, where telling is a write to the
// API server, and Prepare waits for a Function that is on its way.
func (m *Manager) Overdue(id function.ID) string {
	a, exists := m.journal.Get(id)
	if !exists || a.State != journal.Releasing && a.State != journal.Detaching || time.Since(a.StoppedAt) < releaseGrace {
		return ""
	}
	return "the Function " + Pending(a)
}

// Lost knows Functions that a pod has lost and does not get back, or not in time; "" for all others.
func (m *Manager) Lost(id function.ID) string {
	a, exists := m.journal.Get(id)
	switch {
	case !exists || a.State != journal.Lost && a.State != journal.Reattaching:
		return ""
	case a.Interface.Userspace:
		return fmt.Sprintf("pod %s/%s lost the Function when its device went, and its program cannot get it back: delete the pod",
			a.Pod.Namespace, a.Pod.Name)
	case time.Since(a.LostAt) < releaseGrace:
		return ""
	}
	return fmt.Sprintf("pod %s/%s lost the Function when its device went: it gets it back when the device and its Port are there; "+
		"the log of this node's xpu-agent says what is missing", a.Pod.Namespace, a.Pod.Name)
}

// Elsewhere says that somebody has the Function by another way than by this extended resource, which is "" for claims; ""
// if nobody has. Until that is over the Function must not be offered. It does not block.
func (m *Manager) Elsewhere(id function.ID, resource string) string {
	if a, exists := m.journal.Get(id); exists && a.State != journal.Releasing {
		if message := m.conflict(a, resource); message != "" {
			return message
		}
	}
	if m.options.Kubelet == nil {
		return ""
	}
	return m.options.Kubelet.InUse(id, resource)
}

// conflict says that what is in the journal is not by this resource, "" for a claim.
func (m *Manager) conflict(a journal.Attachment, resource string) string {
	pod := "a pod"
	if a.Pod.Name != "" { // the kubelet does not tell whom it allocates a Function to
		pod = fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
	}
	switch {
	case a.Claim.UID != "" && resource != "":
		return fmt.Sprintf("claim %s/%s has it: it is offered as %s when that is gone",
			a.Claim.Namespace, a.Claim.Name, resource)
	case a.Claim.UID != "":
	case a.Resource == "" && !m.given(a.Function, resource): // nor did the kubelet say so when the CNI plugin came
		return fmt.Sprintf("%s has it by CNI alone: it is offered again when that pod is gone", pod)
	case a.Resource != "" && a.Resource != resource:
		return fmt.Sprintf("%s has it by resource %s: it is offered again when that pod is gone", pod, a.Resource)
	}
	return ""
}

// given says whether the kubelet gave the Function to a pod by this resource.
func (m *Manager) given(id function.ID, resource string) bool {
	return m.options.Kubelet != nil && m.options.Kubelet.Has(id, resource)
}
