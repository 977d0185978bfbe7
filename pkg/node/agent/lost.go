package agent

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cniserver"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// ports knows what the xPU serves, whoever asked for it. See [lifecycle.Options].
type ports struct {
	// find returns a Function of this node as it is now.
	find        func(function.ID) (f function.Function, exists bool)
	provisioner provisioning.Provisioner
	// claims is for Ports that were not made by the provisioner but for a claim. It is nil where there are no claims.
	claims func(context.Context, journal.Attachment) error
}

// Serve returns once the xPU serves the Function for whoever has it, and at once where no Port was asked for.
func (p ports) Serve(ctx context.Context, a journal.Attachment) error {
	switch {
	case a.Port != nil:
		f, known := p.find(a.Function)
		if !known { // an SF that is to be made again
			f.ID, f.PF = a.Function, a.PF
		}
		_, err := p.provisioner.Provision(ctx, provisioning.Request{
			Function: f, DevicePool: a.Port.DevicePool, Network: a.Port.Network, MAC: a.Port.MAC, Pod: a.Pod,
		})
		return err
	case a.Claim.UID != "" && p.claims != nil:
		return p.claims(ctx, a)
	}
	return nil
}

// users tells pods and claims of Functions that they lose and get back. See [lifecycle.Options].
type users struct {
	reporter cniserver.Reporter
	recorder events.EventRecorder // nil where there is nobody to tell
	node     string
}

// Lost says what became of the pod's Function, and what the user can do.
func (u *users) Lost(a journal.Attachment) {
	message := fmt.Sprintf("the device of interface %s went: it comes back to the pod with the device", a.Interface.Name)
	if a.Interface.Userspace {
		message = "its device went, and a program that had it cannot get it back: delete the pod"
	}
	u.tell(a, corev1.EventTypeWarning, "FunctionLost", message)
}

// Back says that the pod has it again.
func (u *users) Back(a journal.Attachment) {
	u.tell(a, corev1.EventTypeNormal, "FunctionBack", fmt.Sprintf("interface %s is in the pod again", a.Interface.Name))
}

func (u *users) tell(a journal.Attachment, kind, reason, message string) {
	if a.Claim.UID != "" {
		u.reporter.Report(a.Claim)
	}
	if u.recorder == nil || a.Pod.Name == "" {
		return
	}
	pod := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: a.Pod.Namespace, Name: a.Pod.Name, UID: a.Pod.UID}
	u.recorder.Eventf(pod, nil, kind, reason, "Attach", "Function %s on node %s: %s", a.Function, u.node, message)
}
