package nodeapi

import (
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// refusalTime is how long a Function stays tainted after the Port that its xPU refused is gone: long enough for the
// scheduler to try the others first.
const refusalTime = time.Minute

// refusals remembers the Functions whose Port the xPU refused.
type refusals struct {
	mutex    sync.Mutex
	messages map[inventory.ID]string
}

// ProvisionFailed says why the xPU refused the Function's last Port; "" if it did not.
func (a *API) ProvisionFailed(f inventory.ID) string {
	a.refusals.mutex.Lock()
	defer a.refusals.mutex.Unlock()
	return a.refusals.messages[f]
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
	if ready != nil {
		a.setRefusal(port, refusal(ready))
	}
	a.notifyPorts()
}

func (a *API) portDeleted(port *v1alpha1.XPUPort) {
	if a.ProvisionFailed(claim.FunctionOf(port.Spec.Function)) != "" {
		time.AfterFunc(refusalTime, func() {
			a.setRefusal(port, "")
			a.notifyPorts()
		})
	}
	a.notifyPorts()
}

// refusal tells what the xPU will not do for this Function from what it cannot do for any just now.
func refusal(ready *metav1.Condition) string {
	if ready.Status == metav1.ConditionTrue {
		return ""
	}
	switch ready.Reason {
	case v1alpha1.ReasonFailed, v1alpha1.ReasonConflict:
		return fmt.Sprintf("the xPU refused the Function's last Port: %s: %s", ready.Reason, ready.Message)
	}
	return ""
}

func (a *API) setRefusal(port *v1alpha1.XPUPort, message string) {
	a.refusals.mutex.Lock()
	defer a.refusals.mutex.Unlock()
	if message == "" {
		delete(a.refusals.messages, claim.FunctionOf(port.Spec.Function))
		return
	}
	if a.refusals.messages == nil {
		a.refusals.messages = map[inventory.ID]string{}
	}
	a.refusals.messages[claim.FunctionOf(port.Spec.Function)] = message
}

func (a *API) notifyPorts() {
	a.portsChanged.Notify()
	a.events.PortsChanged()
}
