// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// portsByFunction is the cache's index of Ports by their Function.
const portsByFunction = "function"

func functionOf(port client.Object) []string {
	return []string{claim.FunctionOf(port.(*v1alpha1.XPUPort).Spec.Function).String()}
}

// Subscribe returns a channel that receives a value after every change of a Port or an XPU of the
// node, until ctx ends.
func (a *API) Subscribe(ctx context.Context) <-chan struct{} { return a.changed.Subscribe(ctx) }

// Ports returns the Ports of the node in all namespaces. The caller must not change them.
func (a *API) Ports(ctx context.Context) ([]v1alpha1.XPUPort, error) {
	var list v1alpha1.XPUPortList
	if err := a.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUPorts of node %s: %w", a.node, err)
	}
	return list.Items, nil
}

// PortsOf returns the Ports of a Function: at most one in each namespace, and at most one that was
// made ahead. The caller must not change them.
func (a *API) PortsOf(ctx context.Context, f function.ID) ([]v1alpha1.XPUPort, error) {
	var list v1alpha1.XPUPortList
	err := a.cache.List(ctx, &list, client.MatchingFields{portsByFunction: f.String()},
		client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("list XPUPorts of Function %s: %w", f, err)
	}
	return list.Items, nil
}

// CreatePort creates a Port that the garbage collector deletes with the Node.
func (a *API) CreatePort(ctx context.Context, port *v1alpha1.XPUPort) error {
	node := nodeMetadata()
	if err := a.cache.Get(ctx, types.NamespacedName{Name: a.node}, node); err != nil {
		return fmt.Errorf("node %s: %w", a.node, err)
	}

	port.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: node.Name,
			UID: node.UID},
	}

	return a.writer.Create(ctx, port)
}

// DeletePort requests the deletion of a Port. If uid is not empty, only the Port with this uid is
// deleted. The error is NotFound if there is no such Port. After DeletePort returned nil, the Port
// exists until the xPU does not serve it any more.
func (a *API) DeletePort(ctx context.Context, key types.NamespacedName, uid types.UID) error {
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name},
	}
	var options []client.DeleteOption
	if uid != "" {
		options = append(options, client.Preconditions{UID: &uid})
	}
	return a.writer.Delete(ctx, port, options...)
}

// Wait returns the Port of a Function that is allocated to a claim, once the xPU serves the Port.
// If ctx ends before, the error has the conditions of the Port and of the claim.
func (a *API) Wait(
	ctx context.Context, c *resourceapi.ResourceClaim, f function.ID,
) (*v1alpha1.XPUPort, error) {
	var port *v1alpha1.XPUPort
	err := a.await(ctx, func() (err error) {
		port, err = a.port(ctx, c.Namespace, c.UID, f)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, a.claimProblem(c))
	}
	return port, nil
}

// Serves returns nil once the xPU serves the claim's Port of a Function. It returns nil at once if
// the claim has no Port. If ctx ends before, the error says what is missing.
func (a *API) Serves(ctx context.Context, namespace string, claim types.UID, f function.ID) error {
	return a.await(ctx, func() error {
		_, err := a.port(ctx, namespace, claim, f)
		if errors.Is(err, errNoPort) {
			return nil
		}
		return err
	})
}

// await waits until problem returns nil. When ctx ends, it returns the last problem.
func (a *API) await(ctx context.Context, problem func() error) error {
	var err error
	_ = loop.Until(ctx, a.changed.Subscribe, func() bool { err = problem(); return err == nil })
	return err
}

// ProvisionedAhead reports whether the xPU serves a Port of the Function in the network that was
// made before a pod has the Function.
func (a *API) ProvisionedAhead(f function.ID, network string) bool {
	if !a.isSynced() {
		return false // a read would block
	}

	ports, err := a.PortsOf(context.Background(), f)
	if err != nil || len(ports) != 1 {
		return false
	}

	port := &ports[0]
	return port.Spec.Ahead && port.Spec.Network == network && port.DeletionTimestamp.IsZero() &&
		v1alpha1.ReadyOf(port.Status.Conditions).Status == metav1.ConditionTrue
}

// errNoPort means that xpu-controller has not made a Port for a claim. The name of the Port
// follows.
var errNoPort = errors.New("the xPU is not provisioned: xpu-controller has not made XPUPort")

func (a *API) port(
	ctx context.Context, namespace string, uid types.UID, f function.ID,
) (*v1alpha1.XPUPort, error) {
	name := types.NamespacedName{Namespace: namespace, Name: claim.PortName(a.node, f)}
	var port v1alpha1.XPUPort
	// The read comes from the cache and must work even if the caller's context has ended.
	err := a.cache.Get(context.WithoutCancel(ctx), name, &port)
	if apierrors.IsNotFound(err) || err == nil && port.Spec.Claim.UID != uid {
		return nil, fmt.Errorf("%w %s for this claim yet", errNoPort, name)
	}
	if err != nil {
		return nil, fmt.Errorf("XPUPort %s: %w", name, err)
	}

	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	switch {
	case !port.DeletionTimestamp.IsZero():
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s is being deleted", name)
	case ready.Status == "":
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s is waiting for xPU %s",
			name, port.Spec.XPU)
	case ready.Status != metav1.ConditionTrue:
		return nil, fmt.Errorf("the xPU is not provisioned: XPUPort %s: %s: %s", name, ready.Reason,
			ready.Message)
	}

	return &port, nil
}

// claimProblem returns what the controller wrote into the claim if it could not make a Port.
func (a *API) claimProblem(c *resourceapi.ResourceClaim) error {
	for _, device := range c.Status.Devices {
		if device.Driver != v1alpha1.GroupName {
			continue
		}
		for _, conditionType := range []string{
			v1alpha1.ConditionProvisioned, v1alpha1.ConditionProvisionFailed,
		} {
			condition := meta.FindStatusCondition(device.Conditions, conditionType)
			if condition != nil && condition.Reason != v1alpha1.ReasonUp &&
				condition.Message != "" {
				return fmt.Errorf("%s: %s", condition.Reason, condition.Message)
			}
		}
	}
	return nil
}

// XPUOf returns the XPU that serves a PF of the node, or nil if no XPU does. The caller must not
// change it.
func (a *API) XPUOf(ctx context.Context, pf pci.Address) (*v1alpha1.XPU, error) {
	all, err := a.xpus(ctx)
	if err != nil {
		return nil, err
	}
	return claim.XPUOf(all, pf), nil
}

// xpus returns the XPUs of the node. The caller must not change them.
func (a *API) xpus(ctx context.Context) ([]v1alpha1.XPU, error) {
	var list v1alpha1.XPUList
	if err := a.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUs of node %s: %w", a.node, err)
	}
	return list.Items, nil
}

// XPUAway returns why xpu-controller cannot reach the OPI agent of the Function's xPU. It returns
// "" if the agent can be reached, if the Function has no xPU or it is not known which of several it
// has, and as long as nothing else is known. It also returns a reason for a Function that an
// administrator has given up.
func (a *API) XPUAway(f function.Function) string {
	if !a.isSynced() {
		return "" // a read would block
	}

	all, err := a.xpus(context.Background())
	if err != nil {
		return ""
	}

	if name := givenUpBy(all, f); name != "" {
		return fmt.Sprintf("XPU %s: %s: the Function is given up, because the xPU may still "+
			"serve a port of its last pod; once that is "+
			"gone, take the Function from spec.abandonedFunctions", name, v1alpha1.ReasonAbandoned)
	}

	xpu := claim.ServerOf(all, f.PF)
	if xpu == nil {
		return ""
	}

	ready := v1alpha1.ReadyOf(xpu.Status.Conditions)
	if ready.Status != metav1.ConditionFalse {
		return ""
	}

	return fmt.Sprintf("XPU %s: %s: %s", xpu.Name, ready.Reason, ready.Message)
}

// givenUpBy returns the name of an XPU that may serve the Function and says that it is given up, ""
// if there is none. The PF may have another XPU by now, because an administrator gave the Function up
// at the one before.
func givenUpBy(all []v1alpha1.XPU, f function.Function) string {
	for i := range all {
		xpu := &all[i]
		if xpu.Serves(string(f.PF)) &&
			slices.Contains(xpu.Spec.AbandonedFunctions, f.ID.String()) {
			return xpu.Name
		}
	}
	return ""
}

// refusalTime is how long a Function stays tainted after its xPU refused a Port and the Port was
// deleted. Meanwhile the scheduler can try other Functions.
const refusalTime = time.Minute

// refusal is the answer of an xPU that refused a Port.
type refusal struct {
	port    types.UID
	message string
}

// ProvisionFailed returns why the xPU refused the Function's last Port, or "" if it did not.
func (a *API) ProvisionFailed(f function.ID) string {
	last, _ := a.refusals.Load(f)
	refused, _ := last.(refusal)
	return refused.message
}

func (a *API) portHandler() toolscache.ResourceEventHandler {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc: func(port any) { a.portChanged(port.(*v1alpha1.XPUPort)) },
		UpdateFunc: func(before, port any) {
			was, is := before.(*v1alpha1.XPUPort), port.(*v1alpha1.XPUPort)
			if was.UID != is.UID { // the watch missed the deletion
				a.portDeleted(was)
			}
			a.portChanged(is)
		},
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
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	// The condition of a Port that is being deleted is no answer about its Function.
	if ready.Status == "" || !port.DeletionTimestamp.IsZero() {
		return
	}

	f := claim.FunctionOf(port.Spec.Function)
	if ready.Status != metav1.ConditionTrue && v1alpha1.Refused(ready.Reason) {
		message := fmt.Sprintf("the xPU refused the Function's last Port: %s: %s", ready.Reason,
			ready.Message)
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
		if a.refusals.CompareAndDelete(f, last) { // false if the xPU refused another Port since
			a.portsChanged()
		}
	})
}

// portsChanged notifies all that wait for a change of a Port or an XPU.
func (a *API) portsChanged() {
	a.changed.Notify()
	a.events.PortsChanged()
}
