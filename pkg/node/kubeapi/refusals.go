package kubeapi

import (
	"fmt"
	"sync"
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

// refusals remembers the Functions whose Port the xPU refused.
type refusals struct {
	mutex      sync.Mutex
	byFunction map[function.ID]refusal
}

// refusal is what the xPU said about one Port.
type refusal struct {
	port    types.UID
	message string
}

// ProvisionFailed says why the xPU refused the Function's last Port; "" if it did not.
func (a *API) ProvisionFailed(f function.ID) string {
	a.refusals.mutex.Lock()
	defer a.refusals.mutex.Unlock()
	return a.refusals.byFunction[f].message
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
	ready := meta.FindStatusCondition(port.Status.Conditions, v1alpha1.ConditionReady)
	// What a Port says on its way out is not about its Function.
	if ready != nil && port.DeletionTimestamp.IsZero() {
		a.refusals.set(port, refusalMessage(ready))
	}
	a.notifyPorts()
}

func (a *API) portDeleted(port *v1alpha1.XPUPort) {
	if a.refusals.isOf(port) {
		time.AfterFunc(refusalTime, func() {
			if a.refusals.isOf(port) { // and not of the next Port
				a.refusals.set(port, "")
				a.notifyPorts()
			}
		})
	}
	a.notifyPorts()
}

// refusalMessage tells what the xPU will not do for this Function from what it cannot do for any just now.
func refusalMessage(ready *metav1.Condition) string {
	if ready.Status == metav1.ConditionTrue {
		return ""
	}
	switch ready.Reason {
	case v1alpha1.ReasonFailed, v1alpha1.ReasonConflict:
		return fmt.Sprintf("the xPU refused the Function's last Port: %s: %s", ready.Reason, ready.Message)
	}
	return ""
}

// set replaces what is known about the Port's Function; "" is no refusal.
func (r *refusals) set(port *v1alpha1.XPUPort, message string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if message == "" {
		delete(r.byFunction, claim.FunctionOf(port.Spec.Function))
		return
	}
	if r.byFunction == nil {
		r.byFunction = map[function.ID]refusal{}
	}
	r.byFunction[claim.FunctionOf(port.Spec.Function)] = refusal{port: port.UID, message: message}
}

// isOf says whether it is this very Port that was refused last.
func (r *refusals) isOf(port *v1alpha1.XPUPort) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	last, refused := r.byFunction[claim.FunctionOf(port.Spec.Function)]
	return refused && last.port == port.UID
}

func (a *API) notifyPorts() {
	a.changed.Notify()
	a.events.PortsChanged()
}
