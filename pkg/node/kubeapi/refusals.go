package kubeapi

import (
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// refusalTime is how long a Function stays tainted after the Port that its xPU refused is gone: long enough for the
// scheduler to try the others first.
const refusalTime = time.Minute

// refusal is what the xPU said about one Port.
type refusal struct {
	port    types.UID
	message string
}

// ProvisionFailed says why the xPU refused the Function's last Port; "" if it did not.
func (a *API) ProvisionFailed(f function.ID) string {
	last, refused := a.refusals.Load(f)
	if !refused {
		return ""
	}
	return last.(refusal).message
}

func (a *API) portHandler() toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(port any) { a.portChanged(port.(*v1alpha1.XPUPort)) },
		UpdateFunc: func(_, port any) { a.portChanged(port.(*v1alpha1.XPUPort)) },
		DeleteFunc: func(port any) {
			if unknown, missed := port.(toolscache.DeletedFinalStateUnknown); missed {
				port = unknown.Obj
			}
			a.portDeleted(port.(*v1alpha1.XPUPort))
		},
	}
}

func (a *API) portChanged(port *v1alpha1.XPUPort) {
	defer a.portsChanged()
	ready := meta.FindStatusCondition(port.Status.Conditions, v1alpha1.ConditionReady)
	// What a Port says while it is being deleted is not about its Function.
	if ready == nil || !port.DeletionTimestamp.IsZero() {
		return
	}
	f := claim.FunctionOf(port.Spec.Function)
	// The other reasons are about what the xPU cannot do for any Function just now.
	if ready.Status != metav1.ConditionTrue &&
		(ready.Reason == v1alpha1.ReasonFailed || ready.Reason == v1alpha1.ReasonConflict) {
		message := fmt.Sprintf("the xPU refused the Function's last Port: %s: %s", ready.Reason, ready.Message)
		a.refusals.Store(f, refusal{port: port.UID, message: message})
	} else {
		a.refusals.Delete(f)
	}
}

func (a *API) portDeleted(port *v1alpha1.XPUPort) {
	defer a.portsChanged()
	f := claim.FunctionOf(port.Spec.Function)
	last, refused := a.refusals.Load(f)
	if !refused || last.(refusal).port != port.UID {
		return
	}
	time.AfterFunc(refusalTime, func() {
		if a.refusals.CompareAndDelete(f, last) { // not if it is about the next Port by now
			a.portsChanged()
		}
	})
}

// portsChanged tells of a change of a Port or an XPU.
func (a *API) portsChanged() {
	a.changed.Notify()
	a.events.PortsChanged()
}
