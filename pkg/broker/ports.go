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
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/eventnote"
)

// ports copies XPUPorts to the infra cluster and their status back. A tenant's XPUPort keeps its
// finalizer until its copy is gone, which is when its xPU has released the port.
type ports struct {
	syncer
	quota *quota
}

func (r *ports) setup(ctx context.Context, mgr mcmanager.Manager) error {
	ofTenant := func(ctx context.Context, tenant *v1alpha1.XPUTenant) []mcreconcile.Request {
		return r.requestsIn(ctx, tenant.Name, &v1alpha1.XPUPortList{})
	}

	// XPUPorts may have waited for their network.
	inNetwork := func(ctx context.Context, network *v1alpha1.XPUNetwork) []mcreconcile.Request {
		of, ok := originOf(network)
		if !ok {
			return nil
		}
		return r.requestsIn(ctx, of.ClusterName.String(), &v1alpha1.XPUPortList{},
			client.MatchingFields{portsByNetwork: of.Name})
	}

	// XPUPorts may have waited for the XPU to serve their node.
	atXPU := func(ctx context.Context, xpu *v1alpha1.XPU) []mcreconcile.Request {
		tenants, err := r.tenants(ctx)
		if err != nil {
			return nil // the cache is not running
		}

		owner := v1alpha1.TenantOf(xpu, tenants)
		if owner == nil {
			return nil
		}

		return r.requestsIn(ctx, owner.Name, &v1alpha1.XPUPortList{},
			client.MatchingFields{portsByXPU: xpu.Name})
	}

	for index, of := range map[string]func(*v1alpha1.XPUPort) []string{
		portsByNetwork: func(port *v1alpha1.XPUPort) []string { return port.Spec.AllNetworks() },
		portsByXPU:     func(port *v1alpha1.XPUPort) []string { return []string{port.Spec.XPU} },
	} {
		values := func(o client.Object) []string { return of(o.(*v1alpha1.XPUPort)) }
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
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUPort{}, originRequests)).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUPort{},
			quotaHandler[*v1alpha1.XPUPort](r.quota))).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, ofTenant, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.reconciler("XPUPorts", r.reconcile))
}

func (r *ports) enqueueAll(ctx context.Context, tenant string) {
	r.enqueueOrigins(ctx, tenant, &v1alpha1.XPUPortList{})
}

// reconcile copies one XPUPort of a tenant's cluster, named by the request.
func (r *ports) reconcile(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request,
) (ctrl.Result, error) {
	var port, copied v1alpha1.XPUPort
	exists, err := getIfExists(ctx, tc.client, req.NamespacedName, &port)
	if err != nil {
		return ctrl.Result{}, err
	}

	key := types.NamespacedName{
		Namespace: r.Namespace, Name: scopedPort(tc.Name, req.NamespacedName),
	}
	has, err := getIfExists(ctx, r.infra, key, &copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case !exists && !has:
		r.quota.cancelWait(tc.Name, req)
		// The quota may have counted a copy that was never created.
		r.wakeups.Add(0, r.quota.release(tc.Name, key.Name)...)
		return ctrl.Result{}, nil
	case !exists, has && !isCopyOf(&copied, &port):
		return r.orphan(ctx, tc, req, &copied)
	case !port.DeletionTimestamp.IsZero(), tc.isLeaving():
		return ctrl.Result{}, r.release(ctx, tc, &port, &copied, key, has)
	case !has:
		return r.copyToInfra(ctx, tc, &port, key)
	}

	return ctrl.Result{}, r.report(ctx, tc, &port, &copied)
}

// orphan deletes the copy of an XPUPort that no longer exists. It asks the tenant's API server,
// because the cache may be stale.
func (r *ports) orphan(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request, copied *v1alpha1.XPUPort,
) (ctrl.Result, error) {
	var port v1alpha1.XPUPort
	exists, err := getIfExists(ctx, tc.live, req.NamespacedName, &port)
	if err != nil {
		return ctrl.Result{}, err
	}
	if exists && isCopyOf(copied, &port) {
		return cacheStale, nil
	}

	ctrl.LoggerFrom(ctx).Info("deleting an XPUPort whose tenant has none", "port",
		client.ObjectKeyFromObject(copied))
	return ctrl.Result{}, remove(ctx, r.infra, copied)
}

// release deletes the copy of an XPUPort, and then removes the XPUPort's finalizer.
func (r *ports) release(
	ctx context.Context, tc *tenantCluster, port, copied *v1alpha1.XPUPort,
	key types.NamespacedName, has bool,
) error {
	if !controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort) && !has {
		return nil
	}

	if !has { // the cache may not have a copy made a moment ago
		var err error
		if has, err = getIfExists(ctx, r.live, key, copied); err != nil {
			return err
		}
	}

	if has {
		if tc.isLeaving() && tc.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
			return nil
		}
		if err := remove(ctx, r.infra, copied); err != nil {
			return err
		}
		return r.report(ctx, tc, port, copied)
	}

	if tc.isLeaving() && port.DeletionTimestamp.IsZero() {
		if err := r.refuse(ctx, tc, port, leavingProblem()); err != nil {
			return err
		}
	}

	return tc.changeFinalizer(ctx, port, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerPort)
}

// copyToInfra creates the copy of an admitted XPUPort, if the tenant may have it.
func (r *ports) copyToInfra(
	ctx context.Context, tc *tenantCluster, port *v1alpha1.XPUPort, key types.NamespacedName,
) (ctrl.Result, error) {
	if !v1alpha1.IsAdmitted(port) {
		return ctrl.Result{}, nil
	}

	err := r.allow(ctx, tc, port, key.Name)
	if p, ok := errors.AsType[*problem](err); ok {
		return ctrl.Result{RequeueAfter: reconciling.LastRetry}, r.refuse(ctx, tc, port, p)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	// An XPUPort is created with the finalizer. It is missing if the tenant left and has come back.
	if err := tc.changeFinalizer(ctx, port, controllerutil.AddFinalizer,
		v1alpha1.FinalizerPort); err != nil {
		return ctrl.Result{}, err
	}

	copied := &v1alpha1.XPUPort{
		ObjectMeta: copyMeta(tc.Name, port, key.Namespace, key.Name), Spec: *port.Spec.DeepCopy(),
	}
	copied.Spec.NodeName = scoped(tc.Name, port.Spec.NodeName)
	if port.Spec.IsTrunk() {
		for i, network := range port.Spec.Networks {
			copied.Spec.Networks[i].Name = scopedNetwork(tc.Name, network.Name)
		}
	} else {
		copied.Spec.Network = scopedNetwork(tc.Name, port.Spec.Network)
		copied.Labels[v1alpha1.LabelNetwork] = copied.Spec.Network
	}
	if !port.Spec.IsTrunk() && len(copied.Spec.Addresses) == 0 {
		copied.Spec.Addresses = port.Status.Addresses // those that the tenant's cluster assigned
	}

	copied.Finalizers = []string{v1alpha1.FinalizerPort}
	err = asProblem(apply(ctx, r.infra, copied, "status"))
	if p, ok := errors.AsType[*problem](err); ok {
		return ctrl.Result{RequeueAfter: reconciling.LastRetry}, r.refuse(ctx, tc, port, p)
	}
	if err != nil {
		return ctrl.Result{}, err
	}
	// The condition dates from before the copy was possible.
	if port.Status.BridgePort == "" && v1alpha1.ReadyOf(port.Status.Conditions).Reason != "" {
		return ctrl.Result{}, r.refuse(ctx, tc, port,
			problemf(v1alpha1.ReasonProvisioning, "the infra cluster has it now"))
	}

	return ctrl.Result{}, nil
}

// allow reserves quota for the XPUPort. It returns a *problem if the tenant may not have it.
func (r *ports) allow(
	ctx context.Context, tc *tenantCluster, port *v1alpha1.XPUPort, name string,
) error {
	if err := tc.tooLarge(port, r.Limits.ObjectBytes); err != nil {
		return err
	}

	var xpu v1alpha1.XPU
	exists, err := getIfExists(ctx, r.infra, client.ObjectKey{Name: port.Spec.XPU}, &xpu)
	if err != nil {
		return err
	}

	mine := false
	if exists {
		if mine, err = r.isOwnedBy(ctx, tc, &xpu); err != nil {
			return err
		}
	}

	if !mine {
		return problemf(v1alpha1.ReasonForbidden, "XPU %s does not serve this cluster; ask the "+
			"administrator of the infra cluster to add it "+
			"to spec.xpus of XPUTenant %s", port.Spec.XPU, tc.Name)
	}

	if xpu.Node() != scoped(tc.Name, port.Spec.NodeName) {
		return problemf(v1alpha1.ReasonNoXPU, "XPU %s is not known to be of node %s", port.Spec.XPU,
			port.Spec.NodeName)
	}
	for _, network := range port.Spec.AllNetworks() {
		if err := r.checkNetwork(ctx, tc, network); err != nil {
			return err
		}
	}

	return r.reserve(tc, port, name)
}

// reserve reserves quota for the XPUPort. It returns a *problem that names the limit if there is no
// room.
func (r *ports) reserve(tc *tenantCluster, port *v1alpha1.XPUPort, name string) error {
	most, cost := portsAllowance(tc.XPUTenant, r.Limits), v1alpha1.CostOf(port)
	tc.waitsFor = r.quota.reserve(tc.Name, name, cost, most, limitPorts,
		request(tc.Name, port.Namespace, port.Name))
	if tc.waitsFor == limitNone {
		return nil
	}

	used := r.quota.used(tc.Name)
	switch {
	case tc.waitsFor == limitPorts:
		return problemf(v1alpha1.ReasonQuotaExceeded,
			"this cluster has %d XPUPorts, as many as it may have; give some back, or ask the "+
				"administrator of the infra cluster for more", most.count)
	case tc.waitsFor == limitGuaranteed:
		return problemf(v1alpha1.ReasonQuotaExceeded,
			"%d Mbit/s are to be guaranteed, and this cluster has %d of the %d that may be; give "+
				"some back, or ask the administrator of the infra cluster for more",
			cost.Guaranteed, used.Guaranteed, *most.guaranteed)
	case cost.Unlimited > 0:
		return problemf(v1alpha1.ReasonQuotaExceeded,
			"this cluster may have %d Mbit/s, and the interface has no maximum; set vf.maxTxRate",
			*most.maximum)
	case used.Unlimited > 0:
		return problemf(v1alpha1.ReasonQuotaExceeded,
			"this cluster may have %d Mbit/s, and %d of its XPUPorts have no maximum; set "+
				"vf.maxTxRate for them, and make their pods anew", *most.maximum, used.Unlimited)
	}

	return problemf(v1alpha1.ReasonQuotaExceeded,
		"the interface may send %d Mbit/s, and this cluster has %d of the %d that it may have; give "+
			"some back, or ask the administrator of the infra cluster for more",
		cost.Maximum, used.Maximum, *most.maximum)
}

// checkNetwork returns a *problem if the infra cluster does not have the network yet.
func (r *ports) checkNetwork(ctx context.Context, tc *tenantCluster, name string) error {
	var copied, network v1alpha1.XPUNetwork
	if has, err := getIfExists(ctx, r.infra, client.ObjectKey{Name: scopedNetwork(tc.Name, name)},
		&copied); err != nil || has {
		return err
	}

	exists, err := getIfExists(ctx, tc.client, client.ObjectKey{Name: name}, &network)
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

// isOwnedBy reports whether the tenant owns the XPU.
func (b *syncer) isOwnedBy(
	ctx context.Context, tc *tenantCluster, xpu *v1alpha1.XPU,
) (bool, error) {
	tenants, err := b.tenants(ctx)
	if err != nil {
		return false, err
	}
	owner := v1alpha1.TenantOf(xpu, tenants)
	return owner != nil && owner.UID == tc.UID, nil
}

// refuse reports in the tenant's XPUPort why it is not served.
func (r *ports) refuse(
	ctx context.Context, tc *tenantCluster, port *v1alpha1.XPUPort, p *problem,
) error {
	condition := withTransitionTime(notReady(port, p.reason, p.message), port.Status.Conditions)
	if hasCondition(port.Status.Conditions, condition) {
		return nil
	}

	if v1alpha1.ReadyOf(port.Status.Conditions).Reason != p.reason &&
		p.reason != v1alpha1.ReasonProvisioning {
		tc.warn(port, p.reason, p.message)
	}

	return applyStatus(ctx, tc.client, &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: port.Namespace, Name: port.Name},
		Status: v1alpha1.XPUPortStatus{
			BridgePort: port.Status.BridgePort, Conditions: []metav1.Condition{condition},
		},
	})
}

// networksForTenant returns the status of the copy's tagged networks with their names in the
// tenant's cluster. The tags come from the infra cluster, because its xPUs write them into the
// frames. Networks that the tenant's XPUPort does not name are left out.
func networksForTenant(
	tenant string, port, copied *v1alpha1.XPUPort,
) (networks []v1alpha1.XPUPortNetworkStatus) {
	for _, network := range port.Spec.Networks {
		scoped := scopedNetwork(tenant, network.Name)
		for _, status := range copied.Status.Networks {
			if status.Name == scoped {
				own := *status.DeepCopy()
				own.Name = network.Name
				networks = append(networks, own)
			}
		}
	}
	return networks
}

// report copies the status of the copy to the tenant's XPUPort.
func (r *ports) report(
	ctx context.Context, tc *tenantCluster, port, copied *v1alpha1.XPUPort,
) error {
	condition := readyForTenant(tc.Name, copied.Status.Conditions, port)
	if condition == nil {
		return nil
	}

	// The spec never changes. Only deletion raises the generation, and that is not worth a write.
	condition.ObservedGeneration = cmp.Or(
		v1alpha1.ReadyOf(port.Status.Conditions).ObservedGeneration, condition.ObservedGeneration,
	)
	status, current := copied.Status.DeepCopy(), port.Status.DeepCopy()
	if port.Spec.Claim.Name == "" { // set when the XPUPort was admitted
		status.Addresses, status.MTU, status.Pod, status.Predecessor = nil, 0, "", ""
		current.Addresses, current.MTU, current.Pod, current.Predecessor = nil, 0, "", ""
	}

	status.Networks = networksForTenant(tc.Name, port, copied)
	status.Conditions = []metav1.Condition{*condition}
	current.Conditions = slices.DeleteFunc(current.Conditions, func(c metav1.Condition) bool {
		return c.Type != condition.Type
	})
	if equality.Semantic.DeepEqual(status, current) {
		return nil
	}

	if p := v1alpha1.ReadyOf(port.Status.Conditions).Reason; p != condition.Reason &&
		condition.Status == metav1.ConditionFalse {
		tc.warn(port, condition.Reason, condition.Message)
	}

	return applyStatus(ctx, tc.client, &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: port.Namespace, Name: port.Name}, Status: *status,
	})
}

// warn sends an event about an XPUPort of the tenant.
func (tc *tenantCluster) warn(port *v1alpha1.XPUPort, reason, message string) {
	recorder := eventnote.Recorder{EventRecorder: tc.member.GetEventRecorder("xpu-broker")}
	recorder.Eventf(port, nil, corev1.EventTypeWarning, reason, "Provision", "%s", message)
}
