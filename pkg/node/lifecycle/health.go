// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// releaseGrace is how long a release may take before the Function counts as unhealthy. Releases
// usually take milliseconds.
const releaseGrace = 10 * time.Second

// healthChanged reports that a Function's health may have changed. It reports again after
// releaseGrace, when a release that is still running counts as unhealthy.
func (m *Manager) healthChanged(id function.ID) {
	m.options.Changed()
	switch a, _ := m.journal.Get(id); a.State {
	case journal.Releasing, journal.Detaching, journal.Lost:
		time.AfterFunc(releaseGrace, m.options.Changed)
	}
}

// Releasing describes a Function that is not free yet after its last pod. It returns "" for all
// others, and for a Function that [Quarantined] describes. The device plugin needs it, because the
// kubelet considers a Function free as soon as the pod is gone.
func (m *Manager) Releasing(id function.ID) string {
	if a, _ := m.journal.Get(id); a.State == journal.Releasing && !a.Quarantined() {
		return "the Function " + pending(a)
	}
	return m.Overdue(id)
}

// Overdue describes a Function whose release takes longer than usual. It returns "" for all others.
// DRA needs it, because each change of health is a write to the API server, and Prepare waits for a
// Function that is being released.
func (m *Manager) Overdue(id function.ID) string {
	a, _ := m.journal.Get(id)
	if a.State != journal.Releasing && a.State != journal.Detaching || a.Quarantined() ||
		m.ages.of(a, sinceStopped) < releaseGrace {
		return ""
	}
	return "the Function " + pending(a)
}

// pending says what a Function waits for that is not back yet. The text changes only when the
// reason does.
func pending(a journal.Attachment) string {
	back := fmt.Sprintf("back from %s, which ended at %s", lastPod(a),
		a.StoppedAt.Format(time.RFC3339))
	switch {
	case !a.Restored():
		return "is not " + back + ": the log of this node's xpu-agent says why"
	case a.Hooks == nil || a.Hooks.Error == "":
		return "is " + back + ", and waits for its post-delete hooks"
	}

	return fmt.Sprintf("is %s, and waits for post-delete hook %s, which is tried again: %s",
		back, a.Hooks.Next, a.Hooks.Error)
}

func lastPod(a journal.Attachment) string {
	if a.Pod.Name == "" {
		return "its last pod"
	}
	return fmt.Sprintf("pod %s/%s", a.Pod.Namespace, a.Pod.Name)
}

// Lost describes a Function that its pod has lost and does not get back, or not in time. It returns
// "" for all others.
func (m *Manager) Lost(id function.ID) string {
	a, _ := m.journal.Get(id)
	lost := fmt.Sprintf("pod %s/%s lost the Function when its device went", a.Pod.Namespace,
		a.Pod.Name)
	switch {
	case a.State != journal.Lost && a.State != journal.Reattaching:
		return ""
	case a.Interface.Userspace:
		return lost + ", and its program cannot get it back: delete the pod"
	case m.ages.of(a, sinceLost) < releaseGrace:
		return ""
	}

	return lost + ": it gets it back when the device and its Port are there; the log of this " +
		"node's xpu-agent says what is missing"
}

// Replaced reports whether it is certain that the pod cannot get back the Function that it lost,
// because another device is in place of the one that its program had. lost is for how long this
// process has seen that the Function is lost.
func (m *Manager) Replaced(a journal.Attachment) (lost time.Duration, replaced bool) {
	if a.State != journal.Lost || !m.replaced(a) {
		return 0, false
	}
	return m.ages.of(a, sinceLost), true
}
