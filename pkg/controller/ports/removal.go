// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// quickTimeout is how long the deletion of a Port may take before its condition reports it.
const quickTimeout = 2 * time.Second

// remove has the agent delete the Port, and reports whether it is gone. Its errors have the same
// meaning as the errors of ensure.
func (r *reconciler) remove(ctx context.Context, port *v1alpha1.XPUPort) (gone bool, err error) {
	before, err := r.siblings.preferred(ctx, port)
	if err != nil {
		return false, err
	}

	xpu, err := r.xpuOf(ctx, port)
	switch {
	case err != nil:
		return false, err
	case before != nil && before.Spec.XPU == port.Spec.XPU:
		r.handOver(ctx, port, before, xpu)
		return true, nil
	case xpu == nil, xpu.Spec.Abandon && r.Sessions.Connection(xpu.Name).Lost():
		r.Events.Eventf(port, nil, corev1.EventTypeWarning, v1alpha1.ReasonAbandoned, "Release",
			"XPU %s was abandoned or deleted, so nobody asks its OPI agent whether the Port is "+
				"gone", port.Spec.XPU)
		return true, nil
	case xpus.AtAnotherNode(port, xpu) && port.Status.BridgePort == "":
		return true, nil // the XPU never had it; what it has by this id is its own node's
	}

	agent, err := r.agent(port.Spec.XPU)
	if away, ok := errors.AsType[*reconciling.Refusal](err); ok {
		if isGivenUp(port, xpu) {
			r.giveUp(port, away.Message)
			return true, nil
		}
		return false, reconciling.Refuse(v1alpha1.ReasonReleasing,
			"%s; the Function is free again once it says that the Port is gone", away.Message)
	}
	if agent == nil {
		return false, nil
	}

	id, err := xpus.PortID(port, xpu)
	if err != nil {
		return true, nil // such a Port was never made
	}

	timeout := r.AgentTimeout
	if isReady(port) { // its condition does not say yet that it goes, which most Ports do at once
		timeout = min(timeout, quickTimeout)
	}

	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()

	err = r.deletePort(bounded, agent, port, xpu, id)
	switch {
	case err == nil:
		return true, nil
	case isGivenUp(port, xpu):
		r.giveUp(port, reconciling.OneLine(err))
		return true, nil
	}

	return false, r.notReleased(port, err)
}

// notReleased is the refusal of a Port that is being deleted and that the agent still has. No event
// comes when the agent could delete it, so that the pauses between calls grow.
func (r *reconciler) notReleased(port *v1alpha1.XPUPort, err error) error {
	reason, format := v1alpha1.ReasonReleasing, "XPU %s still has the Port: %s"
	if errors.Is(err, opi.ErrUnknown) {
		reason = v1alpha1.ReasonUnknown
		format = "XPU %s may still have the Port, so the Function is kept from other pods: %s; " +
			"look at what the OPI agent has there, and delete the port of this id"
	}

	refusal := reconciling.Refuse(reason, format+"; if it never can, give the Function up: add "+
		"%s to spec.abandonedFunctions of the XPU",
		port.Spec.XPU, reconciling.OneLine(err), claim.FunctionOf(port.Spec.Function))
	return reconciling.RetryAfter(refusal, r.retries.When(reconciling.RequestFor(port)))
}

// deletePort has the agent delete the port. If the card is in another node now, it first checks
// that the port with this id is not the port of a Function there. If the agent does not report its
// ports, the XPUPorts of that node decide.
func (r *reconciler) deletePort(
	ctx context.Context, agent *opi.Session, port *v1alpha1.XPUPort, xpu *v1alpha1.XPU, id string,
) error {
	if xpu != nil && xpus.AtAnotherNode(port, xpu) {
		has, invalid := r.AgentPorts.Of(port, xpu)
		got, err := agent.GetPort(ctx, id)
		if errors.Is(err, opi.ErrNotFound) || err == nil && (invalid != nil || !got.Equal(has)) {
			return nil
		}
		if errors.Is(err, opi.ErrUnsupported) {
			taken, err := r.isTaken(ctx, xpu, id)
			if taken || err != nil {
				return err
			}
		} else if err != nil {
			return err
		}
	}
	return agent.DeletePort(ctx, id)
}

// isTaken reports whether an XPUPort of the node that has the card now has the port with this id.
func (r *reconciler) isTaken(ctx context.Context, xpu *v1alpha1.XPU, id string) (bool, error) {
	all, err := r.Ports.By(ctx, model.ByXPU, xpu.Name)
	if err != nil {
		return false, err
	}

	return slices.ContainsFunc(all, func(other *v1alpha1.XPUPort) bool {
		itsID, err := xpus.PortID(other, xpu)
		return err == nil && itsID == id && !xpus.AtAnotherNode(other, xpu)
	}), nil
}

// handOver leaves the agent's port to another Port of the Function. It deletes the agent's port if
// the other Port asks for different properties, because otherwise the Function would stay in a
// network that the other Port does not join.
func (r *reconciler) handOver(
	ctx context.Context, port, other *v1alpha1.XPUPort, xpu *v1alpha1.XPU,
) {
	has, err := r.AgentPorts.Of(port, xpu)
	wants, invalid := r.AgentPorts.Of(other, xpu)
	if err != nil || invalid == nil && has.Equal(wants) {
		return
	}

	agent, err := r.agent(port.Spec.XPU)
	if err != nil || agent == nil {
		return // once it is back, the other Port has its own made in its place
	}

	bounded, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()

	got, err := agent.GetPort(bounded, has.ID)
	if errors.Is(err, opi.ErrUnsupported) || err == nil && got.Equal(has) {
		err = agent.DeletePort(bounded, has.ID)
	}

	if err != nil {
		ctrl.LoggerFrom(ctx).Info("cannot delete the port before another takes its place", "error",
			err.Error())
	}
}

// isReleased reports whether a Port is being deleted that no xPU serves any more.
func isReleased(port client.Object) bool {
	return !port.GetDeletionTimestamp().IsZero() &&
		!controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort)
}

// letGo removes all finalizers of a Port that no xPU serves any more, except for the finalizers of
// the garbage collector. The finalizer of another program would keep the Function from all pods.
func letGo(ctx context.Context, c client.Client, port *v1alpha1.XPUPort) error {
	before := port.DeepCopy()
	ofCollector := []string{metav1.FinalizerDeleteDependents, metav1.FinalizerOrphanDependents}
	var strangers []string
	port.Finalizers = slices.DeleteFunc(slices.Clone(port.Finalizers), func(f string) bool {
		if f != v1alpha1.FinalizerPort && !slices.Contains(ofCollector, f) {
			strangers = append(strangers, f)
		}
		return !slices.Contains(ofCollector, f)
	})

	if len(port.Finalizers) == len(before.Finalizers) {
		return nil
	}

	if err := c.Patch(ctx, port, reconciling.Since(before)); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("finalizers of XPUPort %s: %w", client.ObjectKeyFromObject(port), err)
	}

	if len(strangers) > 0 {
		ctrl.LoggerFrom(ctx).Info("removed finalizers of others, which kept the Function of an "+
			"XPUPort from being used",
			"finalizers", strangers)
	}

	return nil
}
