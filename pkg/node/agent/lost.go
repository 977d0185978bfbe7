package agent

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// reportLoss is Report of [lifecycle.Options]: the status of the claim and an event of the pod say that the pod lost its
// Function, and what the user can do, or that the pod has its Function again.
func (a *agent) reportLoss(of journal.Attachment) {
	a.report(of.Claim)
	if a.recorder == nil || of.Pod.Name == "" {
		return
	}
	kind, reason := corev1.EventTypeNormal, "FunctionBack"
	message := fmt.Sprintf("interface %s is in the pod again", of.Interface.Name)
	if of.State == journal.Lost {
		kind, reason = corev1.EventTypeWarning, "FunctionLost"
		message = fmt.Sprintf("the device of interface %s went: it comes back to the pod with the device", of.Interface.Name)
		if of.Interface.Userspace {
			message = "its device went, and a program that had it cannot get it back: delete the pod"
		}
	}
	pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: of.Pod.Namespace, Name: of.Pod.Name, UID: of.Pod.UID}
	a.recorder.Eventf(pod, nil, kind, reason, "Attach", "Function %s on node %s: %s", of.Function, a.config.NodeName, message)
}
