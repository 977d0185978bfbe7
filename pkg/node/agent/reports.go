// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// reports reports the fate of Functions to users.
type reports struct {
	node string
	// claim queues a write of the status of a claim.
	claim    func(journal.Claim)
	recorder events.EventRecorder // nil in direct mode
}

// loss implements Report of [lifecycle.Options]. The status of the claim and an event of the pod
// say that the pod lost its Function, and what the user can do, or that the pod has its Function
// again.
func (r *reports) loss(attachment journal.Attachment) {
	r.claim(attachment.Claim)
	pod := attachment.Pod
	if r.recorder == nil || pod.Name == "" {
		return
	}

	kind, reason := corev1.EventTypeWarning, "FunctionLost"
	var message string
	switch name := attachment.Interface.Name; {
	case attachment.State != journal.Lost:
		kind, reason = corev1.EventTypeNormal, "FunctionBack"
		message = fmt.Sprintf("interface %s is in the pod again", name)
	case attachment.Interface.Userspace:
		message = "its device went, and a program that had it cannot get it back: delete the pod"
	default:
		message = fmt.Sprintf("the device of interface %s went: it comes back to the pod with "+
			"the device", name)
	}

	about := &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
	}
	r.recorder.Eventf(about, nil, kind, reason, "Attach", "Function %s on node %s: %s",
		attachment.Function, r.node, message)
}

// quarantine implements Quarantined of [lifecycle.Options]. The node gets the event too, because
// the pod may be deleted soon.
func (r *reports) quarantine(attachment journal.Attachment) {
	q := attachment.Quarantine
	if pod := attachment.Pod; pod.Name != "" {
		about := &corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		}
		r.event(about, corev1.EventTypeWarning, "FunctionQuarantined", attachment.Function,
			"is kept from other pods: "+q.Message)
	}

	r.event(r.nodeReference(), corev1.EventTypeWarning, "FunctionQuarantined", attachment.Function,
		"did not come back from its pod as it was, and is kept from others: "+q.Message)
}

// release implements Unquarantined of [lifecycle.Options].
func (r *reports) release(attachment journal.Attachment, outcome string) {
	r.event(r.nodeReference(), corev1.EventTypeNormal, "FunctionReleased", attachment.Function,
		"was quarantined, and "+outcome)
}

func (r *reports) nodeReference() *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Node", Name: r.node, UID: types.UID(r.node),
	}
}

// event records an event about a Function, if there is an API server.
func (r *reports) event(
	about *corev1.ObjectReference, kind, reason string, id function.ID, message string,
) {
	if r.recorder != nil {
		r.recorder.Eventf(about, nil, kind, reason, "Release", "Function %s on node %s: %s",
			id, r.node, message)
	}
}
