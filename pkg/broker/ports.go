// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// ports carries XPUPorts to the infra cluster and their status back. A tenant's XPUPort keeps its
// finalizer until the infra cluster has none that stands for it, which is when its xPU has let go
// of the port.
type ports struct {
	base
	quota *quota
}

func (r *ports) setup(ctx context.Context, mgr mcmanager.Manager) error {
	ofTenant := func(ctx context.Context, tenant *v1alpha1.XPUTenant) []mcreconcile.Request {
		return r.there(ctx, tenant.Name, &v1alpha1.XPUPortList{})
	}

	// which they may have waited for
	inNetwork := func(ctx context.Context, network *v1alpha1.XPUNetwork) []mcreconcile.Request {
		of, ok := original(network)
		if !ok {
			return nil
		}
		return r.there(ctx, of.ClusterName.String(), &v1alpha1.XPUPortList{},
			client.MatchingFields{portsByNetwork: of.Name})
	}

	// which may not have been of their node
	atXPU := func(ctx context.Context, xpu *v1alpha1.XPU) []mcreconcile.Request {
		tenants, err := r.tenants(ctx)
		if err != nil {
			return nil // the cache is not running
		}

		owner := v1alpha1.TenantOf(xpu, tenants)
		if owner == nil {
			return nil
		}

		return r.there(ctx, owner.Name, &v1alpha1.XPUPortList{},
			client.MatchingFields{portsByXPU: xpu.Name})
	}

	for index, value := range map[string]func(*v1alpha1.XPUPort) string{
		portsByNetwork: func(port *v1alpha1.XPUPort) string { return port.Spec.Network },
		portsByXPU:     func(port *v1alpha1.XPUPort) string { return port.Spec.XPU },
	} {
		values := func(o client.Object) []string { return []string{value(o.(*v1alpha1.XPUPort))} }
		if err := mgr.GetFieldIndexer().IndexField(ctx, &v1alpha1.XPUPort{}, index,
			values); err != nil {
			return fmt.Errorf("index %s of XPUPorts: %w", index, err)
		}
	}

	return newController(mgr, "port", r.Concurrency).
		For(&v1alpha1.XPUPort{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNetwork{}, inNetwork,
			predicate.TypedFuncs[*v1alpha1.XPUNetwork]{
				UpdateFunc: func(event.TypedUpdateEvent[*v1alpha1.XPUNetwork]) bool {
					return false
				},
				DeleteFunc: func(event.TypedDeleteEvent[*v1alpha1.XPUNetwork]) bool {
					return false
				},
			})).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPU{}, atXPU, predicate.TypedFuncs[*v1alpha1.XPU]{
			UpdateFunc: func(e event.TypedUpdateEvent[*v1alpha1.XPU]) bool {
				return e.ObjectOld.Node() != e.ObjectNew.Node() ||
					!maps.Equal(e.ObjectOld.Labels, e.ObjectNew.Labels)
			},
			DeleteFunc: func(event.TypedDeleteEvent[*v1alpha1.XPU]) bool { return false },
		})).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUPort{}, originals)).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUPort{},
			counted[*v1alpha1.XPUPort](r.quota))).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, ofTenant, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.at("XPUPorts", r.look))
}

func (r *ports) wake(ctx context.Context, tenant string) {
	r.wakeAll(ctx, tenant, &v1alpha1.XPUPortList{})
}

// look is for an XPUPort of a tenant's cluster, by its name there.
func (r *ports) look(ctx context.Context, s *site, req mcreconcile.Request) (ctrl.Result, error) {
	var port, copied v1alpha1.XPUPort
	exists, err := found(ctx, s.client, req.NamespacedName, &port)
	if err != nil {
		return ctrl.Result{}, err
	}

	key := types.NamespacedName{
		Namespace: r.Namespace, Name: scopedPort(s.Name, req.NamespacedName),
	}
	has, err := found(ctx, r.infra, key, &copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case !exists && !has:
		r.quota.leave(s.Name, req)
		// it may have been counted and not been made
		r.wakeups.Add(0, r.quota.give(s.Name, key.Name)...)
		return ctrl.Result{}, nil
	case !exists, has && !isCopyOf(&copied, &port):
		return r.orphan(ctx, s, req, &copied)
	case !port.DeletionTimestamp.IsZero(), s.leaving():
		return ctrl.Result{}, r.release(ctx, s, &port, &copied, key, has)
	case !has:
		return r.carry(ctx, s, &port, key)
	}

	return ctrl.Result{}, r.report(ctx, s, &port, &copied)
}

// orphan deletes what stands for an XPUPort that the tenant's cluster, not only the cache of it,
// does not have.
func (r *ports) orphan(
	ctx context.Context, s *site, req mcreconcile.Request, copied *v1alpha1.XPUPort,
) (ctrl.Result, error) {
	var port v1alpha1.XPUPort
	exists, err := found(ctx, s.live, req.NamespacedName, &port)
	if err != nil {
		return ctrl.Result{}, err
	}
	if exists && isCopyOf(copied, &port) {
		return behind, nil
	}

	ctrl.LoggerFrom(ctx).Info("deleting an XPUPort whose tenant has none", "port",
		client.ObjectKeyFromObject(copied))
	return ctrl.Result{}, remove(ctx, r.infra, copied)
}

// release has the infra cluster let go of the port, and then the tenant's XPUPort go.
func (r *ports) release(
	ctx context.Context, s *site, port, copied *v1alpha1.XPUPort,
	key types.NamespacedName, has bool,
) error {
	if !controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort) && !has {
		return nil
	}

	if !has { // it may have been made a moment ago
		var err error
		if has, err = found(ctx, r.live, key, copied); err != nil {
			return err
		}
	}

	if has {
		if s.leaving() && s.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
			return nil
		}
		if err := remove(ctx, r.infra, copied); err != nil {
			return err
		}
		return r.report(ctx, s, port, copied)
	}

	if s.leaving() && port.DeletionTimestamp.IsZero() {
		if err := r.refuse(ctx, s, port, leavingProblem()); err != nil {
			return err
		}
	}

	return changeFinalizer(ctx, s.client, port, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerPort)
}

// carry makes what stands for the XPUPort, if the tenant may have it.
func (r *ports) carry(
	ctx context.Context, s *site, port *v1alpha1.XPUPort, key types.NamespacedName,
) (ctrl.Result, error) {
	if !v1alpha1.IsAdmitted(port) {
		return ctrl.Result{}, nil
	}

	err := r.allow(ctx, s, port, key.Name)
	if p, ok := errors.AsType[*problem](err); ok {
		return ctrl.Result{RequeueAfter: lastRetry}, r.refuse(ctx, s, port, p)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	// It is made with the finalizer, and lost it if the tenant left and comes back.
	if err := changeFinalizer(ctx, s.client, port, controllerutil.AddFinalizer,
		v1alpha1.FinalizerPort); err != nil {
		return ctrl.Result{}, err
	}

	copied := &v1alpha1.XPUPort{
		ObjectMeta: copyMeta(s.Name, port, key.Namespace, key.Name), Spec: *port.Spec.DeepCopy(),
	}
	copied.Spec.NodeName = scoped(s.Name, port.Spec.NodeName)
	copied.Spec.Network = scopedNetwork(s.Name, port.Spec.Network)
	copied.Labels[v1alpha1.LabelNetwork] = copied.Spec.Network
	if len(copied.Spec.Addresses) == 0 {
		copied.Spec.Addresses = port.Status.Addresses // those that the tenant's cluster gave it
	}

	copied.Finalizers = []string{v1alpha1.FinalizerPort}
	err = taken(apply(ctx, r.infra, copied, "status"))
	if p, ok := errors.AsType[*problem](err); ok {
		return ctrl.Result{RequeueAfter: lastRetry}, r.refuse(ctx, s, port, p)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	// of a time when it could not be carried over
	if port.Status.BridgePort == "" && v1alpha1.ReadyOf(port.Status.Conditions).Reason != "" {
		return ctrl.Result{}, r.refuse(ctx, s, port,
			problemf(v1alpha1.ReasonProvisioning, "the infra cluster has it now"))
	}

	return ctrl.Result{}, nil
}

// allow returns a *problem if the tenant may not have the XPUPort, and otherwise counts it.
func (r *ports) allow(ctx context.Context, s *site, port *v1alpha1.XPUPort, name string) error {
	if err := s.tooLarge(port, r.Limits.ObjectBytes); err != nil {
		return err
	}

	var xpu v1alpha1.XPU
	exists, err := found(ctx, r.infra, client.ObjectKey{Name: port.Spec.XPU}, &xpu)
	if err != nil {
		return err
	}

	mine := false
	if exists {
		if mine, err = r.isOf(ctx, s, &xpu); err != nil {
			return err
		}
	}

	if !mine {
		return problemf(v1alpha1.ReasonForbidden, "XPU %s does not serve this cluster; ask the "+
			"administrator of the infra cluster to add it "+
			"to spec.xpus of XPUTenant %s", port.Spec.XPU, s.Name)
	}

	if xpu.Node() != scoped(s.Name, port.Spec.NodeName) {
		return problemf(v1alpha1.ReasonNoXPU, "XPU %s is not known to be of node %s", port.Spec.XPU,
			port.Spec.NodeName)
	}
	if err := r.checkNetwork(ctx, s, port.Spec.Network); err != nil {
		return err
	}

	most := maxPorts(s.XPUTenant, r.Limits)
	if !r.quota.take(s.Name, name, most, request(s.Name, port.Namespace, port.Name)) {
		s.waitsFor = limitPorts
		return problemf(v1alpha1.ReasonQuotaExceeded,
			"this cluster has %d XPUPorts, as many as it may have; give some back, or ask the "+
				"administrator of the infra cluster for more", most)
	}

	return nil
}

// checkNetwork returns a *problem if the infra cluster does not have the network yet.
func (r *ports) checkNetwork(ctx context.Context, s *site, name string) error {
	var copied, network v1alpha1.XPUNetwork
	if has, err := found(ctx, r.infra, client.ObjectKey{Name: scopedNetwork(s.Name, name)},
		&copied); err != nil || has {
		return err
	}

	exists, err := found(ctx, s.client, client.ObjectKey{Name: name}, &network)
	if err != nil {
		return err
	}
	if !exists {
		return problemf(v1alpha1.ReasonNetworkNotFound, "XPUNetwork %s does not exist", name)
	}

	return problemf(v1alpha1.ReasonNetworkNotReady,
		"the infra cluster does not have XPUNetwork %s yet: %s", name,
		cmp.Or(v1alpha1.ReadyOf(network.Status.Conditions).Message, "it is being carried over"))
}

// isOf says whether the XPU is the tenant's.
func (b *base) isOf(ctx context.Context, s *site, xpu *v1alpha1.XPU) (bool, error) {
	tenants, err := b.tenants(ctx)
	if err != nil {
		return false, err
	}
	owner := v1alpha1.TenantOf(xpu, tenants)
	return owner != nil && owner.UID == s.UID, nil
}

// refuse says in the tenant's XPUPort why it is not served.
func (r *ports) refuse(ctx context.Context, s *site, port *v1alpha1.XPUPort, p *problem) error {
	condition := dated(notReady(port, p.reason, p.message), port.Status.Conditions)
	if has(port.Status.Conditions, condition) {
		return nil
	}

	if v1alpha1.ReadyOf(port.Status.Conditions).Reason != p.reason &&
		p.reason != v1alpha1.ReasonProvisioning {
		s.member.GetEventRecorder("xpu-broker").Eventf(port, nil, corev1.EventTypeWarning, p.reason,
			"Provision", "%s", p.message)
	}

	return applyStatus(ctx, s.client, &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: port.Namespace, Name: port.Name},
		Status: v1alpha1.XPUPortStatus{
			BridgePort: port.Status.BridgePort, Conditions: []metav1.Condition{condition},
		},
	})
}

// report says in the tenant's XPUPort what became of the one in the infra cluster.
func (r *ports) report(ctx context.Context, s *site, port, copied *v1alpha1.XPUPort) error {
	condition := readyOf(s.Name, copied.Status.Conditions, port)
	if condition == nil {
		return nil
	}

	// The spec never changes; the deletion, which counts as another generation, is not worth a
	// write.
	condition.ObservedGeneration = cmp.Or(
		v1alpha1.ReadyOf(port.Status.Conditions).ObservedGeneration, condition.ObservedGeneration,
	)
	told, there := copied.Status.DeepCopy(), port.Status.DeepCopy()
	if port.Spec.Claim.Name == "" { // it got these when it was admitted
		told.Addresses, told.MTU, told.Pod, told.Predecessor = nil, 0, "", ""
		there.Addresses, there.MTU, there.Pod, there.Predecessor = nil, 0, "", ""
	}

	told.Conditions = []metav1.Condition{*condition}
	there.Conditions = slices.DeleteFunc(there.Conditions, func(c metav1.Condition) bool {
		return c.Type != condition.Type
	})
	if equality.Semantic.DeepEqual(told, there) {
		return nil
	}

	if p := v1alpha1.ReadyOf(port.Status.Conditions).Reason; p != condition.Reason &&
		condition.Status == metav1.ConditionFalse {
		s.member.GetEventRecorder("xpu-broker").Eventf(port, nil, corev1.EventTypeWarning,
			condition.Reason, "Provision", "%s", condition.Message)
	}

	return applyStatus(ctx, s.client, &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: port.Namespace, Name: port.Name}, Status: *told,
	})
}
