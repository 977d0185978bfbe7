package agent

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// users reports to pods and claims that they lose a Function or get it back. See [lifecycle.Options].
type users struct {
	report   func(journal.Claim)
	recorder events.EventRecorder // nil in direct mode
	node     string
}

// Report reports that the pod lost its Function, and what the user can do, or that the pod has its Function again.
func (u *users) Report(a journal.Attachment) {
	u.report(a.Claim)
	if u.recorder == nil || a.Pod.Name == "" {
		return
	}
	kind, reason := corev1.EventTypeNormal, "FunctionBack"
	message := fmt.Sprintf("interface %s is in the pod again", a.Interface.Name)
	if a.State == journal.Lost {
		kind, reason = corev1.EventTypeWarning, "FunctionLost"
		message = fmt.Sprintf("the device of interface %s went: it comes back to the pod with the device", a.Interface.Name)
		if a.Interface.Userspace {
			message = "its device went, and a program that had it cannot get it back: delete the pod"
		}
	}
	pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: a.Pod.Namespace, Name: a.Pod.Name, UID: a.Pod.UID}
	u.recorder.Eventf(pod, nil, kind, reason, "Attach", "Function %s on node %s: %s", a.Function, u.node, message)
}
