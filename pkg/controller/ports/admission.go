// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"cmp"
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/networks"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/pools"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/queue"
)

// AdmissionOptions configure the admission of XPUPorts.
type AdmissionOptions struct {
	// Namespace contains the XPUPorts of node agents.
	Namespace string

	// Ports are the XPUPorts to be admitted.
	Ports *model.Ports
	// Allocator assigns addresses.
	Allocator *addresses.Allocator
	// Catalog finds out whether a network can be used.
	Catalog networks.Catalog
	// BrokerAway says why no broker carries admitted XPUPorts to an infra cluster, "" if one does.
	// It is nil in a single cluster.
	BrokerAway func() string

	// ProvisionTimeout is [Options.ProvisionTimeout].
	ProvisionTimeout time.Duration
	// AheadGrace is how long a Port that was made ahead may exist before its DevicePool is known.
	AheadGrace time.Duration
	// Concurrency is how many XPUPorts are admitted at once.
	Concurrency int
}

// SetupAdmissions adds the reconciler that admits XPUPorts to the manager. wake has it look at
// XPUPorts again.
func SetupAdmissions(
	mgr ctrl.Manager, cluster reconciling.Cluster, o AdmissionOptions,
) (wake func(ports ...reconcile.Request), err error) {
	r := &admissions{
		Cluster: cluster, AdmissionOptions: o,
		siblings: siblings{ports: o.Ports, namespace: o.Namespace},
		deadline: deadline(o.ProvisionTimeout),
	}
	wake = func(ports ...reconcile.Request) { r.wakeups.Add(0, ports...) }
	return wake, r.setup(mgr)
}

// admissions decides which XPUPorts may join their networks, and assigns their addresses. It
// reports the decision in the condition Admitted. An XPUPort of a claim was admitted when it was
// created. In a tenant cluster, the broker carries admitted XPUPorts to the infra cluster. In a
// single cluster, [Setup] has OPI agents serve them.
type admissions struct {
	reconciling.Cluster
	AdmissionOptions
	siblings siblings
	deadline deadline
	wakeups  queue.Wakeups[reconcile.Request]
}

func (r *admissions) setup(mgr ctrl.Manager) error {
	enqueue := handler.EnqueueRequestsFromMapFunc
	onNetwork := func(ctx context.Context, network client.Object) []reconcile.Request {
		return r.Ports.RequestsBy(ctx, model.ByNetwork, network.GetName())
	}
	onPool := func(ctx context.Context, pool client.Object) []reconcile.Request {
		return r.Ports.RequestsBy(ctx, model.ByPool, pool.GetName()) // made ahead for it
	}

	return reconciling.NewController(mgr, "admission", r.Concurrency).
		WatchesRawSource(model.Source(r.Ports, r.portChanged)).
		Watches(&v1alpha1.XPUNetwork{}, enqueue(onNetwork), reconciling.WhenSpecChanged).
		Watches(&v1alpha1.DevicePool{}, enqueue(onPool), reconciling.WhenSpecChanged).
		WatchesRawSource(r.wakeups.Source()).
		Complete(r.Guarded(r))
}

// portChanged also enqueues a Port that the broker has released.
func (r *admissions) portChanged(
	ctx context.Context, change model.Change, queue model.Queue[reconcile.Request],
) {
	r.siblings.portChanged(ctx, change, queue)
	if !change.Gone() && isReleased(change.New) {
		queue.Add(reconciling.RequestFor(change.New))
	}
}

func (r *admissions) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	found, err := r.Ports.Get(ctx, req.NamespacedName)
	if found == nil || err != nil {
		return ctrl.Result{}, err
	}

	port := found.DeepCopy()
	if !port.DeletionTimestamp.IsZero() {
		if r.BrokerAway != nil && isReleased(port) {
			return ctrl.Result{}, letGo(ctx, r.Client, port)
		}
		return ctrl.Result{}, nil
	}

	before := port.DeepCopy()
	admitted, err := r.admit(ctx, port)
	if admitted && r.BrokerAway != nil && port.Status.BridgePort == "" {
		if why := r.BrokerAway(); why != "" {
			err = reconciling.Refuse(v1alpha1.ReasonBrokerAway, "%s", why)
		}
	}

	switch {
	case err != nil:
		return r.Conclude(ctx, port, before, &port.Status.Conditions, "",
			r.deadline.apply(port, err))
	case !admitted:
		return ctrl.Result{}, nil // an event comes
	}

	return ctrl.Result{}, reconciling.WriteStatus(ctx, r.Client, port, before)
}

// isAdmitted reports whether a Port may be served. A Port that is up has joined its network and
// stays.
func isAdmitted(port *v1alpha1.XPUPort) bool {
	return v1alpha1.IsAdmitted(port) || port.Status.BridgePort != ""
}

// admit sets the condition Admitted of a Port, and its addresses. A refusal says why the Port may
// not join the network. admitted is false without an error if an event will come that decides.
func (r *admissions) admit(
	ctx context.Context, port *v1alpha1.XPUPort,
) (admitted bool, err error) {
	other, err := r.siblings.preferred(ctx, port)
	if err != nil {
		return false, err
	}

	if port.Spec.Ahead {
		if stays, err := r.checkAhead(ctx, port, other); !stays {
			return false, err
		}
	}

	if isAdmitted(port) {
		return true, nil
	}
	if other != nil {
		return false, addresses.Busy(other)
	}

	network, err := r.networkOf(ctx, port)
	if err != nil {
		return false, err
	}

	addresses, known, err := r.addressesOf(ctx, port, network)
	if err != nil || !known {
		return false, err
	}

	port.Status.MTU, port.Status.Addresses = ptr.Deref(network.Spec.MTU, 0), addresses
	meta.SetStatusCondition(&port.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionAdmitted, Status: metav1.ConditionTrue,
		ObservedGeneration: port.Generation,
		Reason:             v1alpha1.ReasonAdmitted, Message: "the network lets it join",
	})

	return true, nil
}

// networkOf returns the Port's network, or a refusal if the Port may not join it.
func (r *admissions) networkOf(
	ctx context.Context, port *v1alpha1.XPUPort,
) (*v1alpha1.XPUNetwork, error) {
	network, err := r.Catalog.Usable(ctx, port.Spec.Network)
	if err == nil {
		err = r.checkMaker(port)
	}
	if err == nil && !port.Spec.Ahead {
		err = r.Catalog.Admit(ctx, network, model.NamespaceOf(port))
	}
	return network, err
}

// checkMaker returns a refusal for a Port that is not genuine: see [siblings.isGenuine].
func (r *admissions) checkMaker(port *v1alpha1.XPUPort) error {
	if r.siblings.isGenuine(port) {
		return nil
	}
	return reconciling.Refuse(v1alpha1.ReasonForbidden,
		"an XPUPort without a claim is made by the xpu-agent of its node, in namespace %s; delete "+
			"this one, and ask for a Function by a ResourceClaim or an extended resource",
		r.Namespace)
}

// endAhead deletes a Port that was made ahead.
func (r *admissions) endAhead(ctx context.Context, port *v1alpha1.XPUPort, why string) error {
	err := r.Client.Delete(ctx, port.DeepCopy(), client.Preconditions{UID: &port.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s/%s, which was made ahead: %w", port.Namespace,
			port.Name, err)
	}
	ctrl.LoggerFrom(ctx).Info("deleting XPUPort that was made ahead", "why", why)
	return nil
}

// checkAhead reports whether a Port that was made ahead stays. It deletes a Port that is not
// wanted, for example because its Function has another Port. A refusal says why the Port may not be
// made ahead. Its pool must name the network. Whether a pod may join the network is decided when
// there is a pod. The MAC address must be derived from the Function, because otherwise a node could
// claim the MAC address of another pod.
func (r *admissions) checkAhead(
	ctx context.Context, port, other *v1alpha1.XPUPort,
) (stays bool, err error) {
	if other != nil {
		return false, r.endAhead(ctx, port, "XPUPort "+client.ObjectKeyFromObject(other).String()+
			" takes its place")
	}

	f := claim.FunctionOf(port.Spec.Function)
	mac, err := r.macAhead(ctx, port, f)
	if err != nil {
		return false, err
	}
	if port.Spec.MAC != mac {
		return false, reconciling.Refuse(v1alpha1.ReasonForbidden,
			"MAC address %s does not belong to Function %s of node %s, which has %s", port.Spec.MAC, f,
			port.Spec.NodeName, mac)
	}

	pool := port.Labels[v1alpha1.LabelPool]
	wanted, err := pools.MakesAhead(ctx, r.Client, pool, port.Spec.Network)
	switch {
	case err != nil || wanted:
		return wanted, err
	case time.Since(port.CreationTimestamp.Time) > r.AheadGrace:
		return false, r.endAhead(ctx, port, "its DevicePool does not ask for it")
	}

	err = reconciling.Refuse(v1alpha1.ReasonForbidden,
		"DevicePool %s does not have Ports made ahead in XPUNetwork %s", pool, port.Spec.Network)
	return false, reconciling.RetryAfter(err, r.AheadGrace) // the Port is deleted then
}

// macAhead returns the MAC address that a Port of the Function must have that is made ahead.
func (r *admissions) macAhead(
	ctx context.Context, port *v1alpha1.XPUPort, f function.ID,
) (string, error) {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, client.ObjectKey{Name: port.Spec.XPU}, &xpu)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("XPU %s: %w", port.Spec.XPU, err)
	}

	own := ""
	if err == nil {
		if own, err = xpus.OwnMAC(ctx, r.Client, &xpu, port.Spec.NodeName, f); err != nil {
			return "", err
		}
	}
	return cmp.Or(own, string(claim.DerivedMAC("", port.Spec.NodeName, f))), nil
}

// addressesOf returns the addresses that a Port without a claim gets, if any. The Port is refused
// if another Port has its MAC address. If the pods of both belong to one virtual machine, it waits
// until the other Port is gone. known is false without an error if an event will come that decides.
func (r *admissions) addressesOf(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork,
) (given []string, known bool, err error) {
	if port.Spec.Ahead {
		return nil, true, nil // no pod uses it
	}
	if owns, err := r.ownsMAC(ctx, port); !owns {
		return nil, false, err
	}

	limits, err := addresses.LimitsOf(ctx, r.Client, model.NamespaceOf(port))
	if err != nil {
		return nil, false, err
	}
	given, known, err = r.Allocator.Adopt(ctx, port, network, limits)
	// No event comes when another Port gives its addresses back.
	return given, known, reconciling.RetryAfter(err, addressRetry)
}

// addressRetry is the pause before a Port tries again to get addresses that other Ports have.
const addressRetry = 2 * time.Second
