// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// admission says whether an XPUPort may join its network, and which addresses it has there.
type admission struct {
	base
	allocator *allocator
}

// admit returns the addresses of a Port, or a *problem if it may not join the network.
func (r *admission) admit(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork,
) ([]string, error) {
	if err := r.checkMaker(port); err != nil {
		return nil, err
	}

	if port.Status.BridgePort == "" && !port.Spec.Ahead { // who has joined stays
		err := r.base.admit(ctx, network, namespaceOf(port))
		if p, ok := errors.AsType[*problem](err); ok {
			p.retry = lastRetry // for the labels of the namespace
		}
		if err != nil {
			return nil, err
		}
	}

	return r.addressesOf(ctx, port, network)
}

// checkMaker returns a *problem for a Port that does not count: see [base.counts].
func (r *admission) checkMaker(port *v1alpha1.XPUPort) error {
	if r.counts(port) {
		return nil
	}
	return problemf(v1alpha1.ReasonForbidden,
		"an XPUPort without a claim is made by the xpu-agent of its node, in namespace "+
			"%s; delete this one, and ask for a Function by a ResourceClaim or an extended "+
			"resource",
		r.Namespace)
}

// aheadGrace is how long a Port that is made ahead may be there before its DevicePool is known.
const aheadGrace = 10 * time.Second

// endAhead deletes a Port that was made ahead.
func (r *admission) endAhead(ctx context.Context, port *v1alpha1.XPUPort, why string) error {
	err := r.client.Delete(ctx, port.DeepCopy(), client.Preconditions{UID: &port.UID})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete XPUPort %s/%s, which was made ahead: %w", port.Namespace,
			port.Name, err)
	}
	ctrl.LoggerFrom(ctx).Info("deleting XPUPort that was made ahead", "why", why)
	return &problem{} // its deletion comes as an event
}

// admitAhead returns a *problem if a Port may not be made ahead, such as because of another one of
// its Function. Its pool must name the network: whether a pod may join is asked when it comes. Its
// MAC address must be that of the Function, so that nobody takes another's.
func (r *admission) admitAhead(ctx context.Context, port, other *v1alpha1.XPUPort) error {
	if other != nil {
		return r.endAhead(ctx, port, "XPUPort "+client.ObjectKeyFromObject(other).String()+
			" takes its place")
	}

	f := claim.FunctionOf(port.Spec.Function)
	if mac := string(claim.DerivedMAC("", port.Spec.NodeName, f)); port.Spec.MAC != mac {
		return problemf(v1alpha1.ReasonForbidden,
			"MAC address %s is not that of Function %s of node %s, which is %s", port.Spec.MAC, f,
			port.Spec.NodeName, mac)
	}

	pool := port.Labels[v1alpha1.LabelPool]
	wanted, err := r.makesAhead(ctx, pool, port.Spec.Network)
	switch {
	case err != nil:
		return err
	case wanted:
		return nil
	case time.Since(port.CreationTimestamp.Time) > aheadGrace:
		return r.endAhead(ctx, port, "its DevicePool does not ask for it")
	}

	p := problemf(v1alpha1.ReasonForbidden,
		"DevicePool %s does not have Ports made ahead in XPUNetwork %s", pool, port.Spec.Network)
	p.retry = aheadGrace
	return p
}

// addressesOf returns the addresses of the Port. One that a node's agent made gets them now, if it
// is to have some, and is refused if it has another Port's MAC address, or waits for that Port to
// go if both are of one virtual machine. A claim's Port was made with its addresses.
func (r *admission) addressesOf(
	ctx context.Context, port *v1alpha1.XPUPort, network *v1alpha1.XPUNetwork,
) ([]string, error) {
	switch {
	case port.Spec.Claim.Name != "":
		return port.Spec.Addresses, r.allocator.checkOwn(ctx, port)
	case port.Spec.Ahead:
		return nil, nil // nobody uses it
	case port.Status.BridgePort != "": // it stays what it is, whatever became of the network's spec
		return port.Status.Addresses, nil
	}

	if err := r.standBy(ctx, port); err != nil {
		return nil, err
	}

	addresses, err := r.allocator.adopt(ctx, port, network)
	if p, ok := errors.AsType[*problem](err); ok {
		p.retry = cmp.Or(p.retry, addressRetry)
	}

	return addresses, err
}

// addressRetry is the pause before a Port looks again for addresses that others have.
const addressRetry = 2 * time.Second

// namespaceOf is the namespace of the pod that the Port is for, "" if no pod is known yet: at
// Allocate.
func namespaceOf(port *v1alpha1.XPUPort) string {
	if port.Spec.Claim.Name != "" {
		return port.Namespace
	}
	return ptr.Deref(port.Spec.Pod, v1alpha1.PodRef{}).Namespace
}
