// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"
	"slices"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// networks copies XPUNetworks to the infra cluster, each in a segment of the tenant, and their
// status back. A tenant's XPUNetwork keeps its finalizer until its copy is gone, which is when no
// XPUPort uses the copy.
type networks struct{ syncer }

func (r *networks) setup(mgr mcmanager.Manager) error {
	return newController(mgr, "network", r.Concurrency).
		For(&v1alpha1.XPUNetwork{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNetwork{}, originRequests)).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.requestsOf, whenTenantChanged())).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUTenant{},
			handler.TypedFuncs[*v1alpha1.XPUTenant, mcreconcile.Request]{
				UpdateFunc: enqueueNewSegments,
			})).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.reconciler("XPUNetworks", r.reconcile))
}

// enqueueNewSegments enqueues networks that were just given a segment. Such a network may have been
// deleted before the cache had its segment.
func enqueueNewSegments(
	_ context.Context, e event.TypedUpdateEvent[*v1alpha1.XPUTenant],
	queue workqueue.TypedRateLimitingInterface[mcreconcile.Request],
) {
	for _, segment := range e.ObjectNew.Status.Networks {
		if segmentOf(e.ObjectOld, segment.Name) == nil {
			queue.Add(request(e.ObjectNew.Name, "", segment.Name))
		}
	}
}

func (r *networks) enqueueAll(ctx context.Context, tenant string) {
	r.enqueueOrigins(ctx, tenant, &v1alpha1.XPUNetworkList{})
	var t v1alpha1.XPUTenant
	if err := r.infra.Get(ctx, client.ObjectKey{Name: tenant}, &t); err != nil {
		return // there is no XPUTenant, or the cache is not running
	}
	// A broker may have been killed after it deleted a copy and before it freed the segment.
	for _, segment := range t.Status.Networks {
		r.wakeups.Add(0, request(tenant, "", segment.Name))
	}
}

// requestsOf returns requests for all XPUNetworks of a tenant, which may have other ranges now or
// be leaving.
func (r *networks) requestsOf(
	ctx context.Context, tenant *v1alpha1.XPUTenant,
) []mcreconcile.Request {
	return r.requestsIn(ctx, tenant.Name, &v1alpha1.XPUNetworkList{})
}

// reconcile copies one XPUNetwork of a tenant's cluster, named by the request.
func (r *networks) reconcile(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request,
) (ctrl.Result, error) {
	var network, copied v1alpha1.XPUNetwork
	exists, err := getIfExists(ctx, tc.client, req.NamespacedName, &network)
	if err != nil {
		return ctrl.Result{}, err
	}

	has, err := getIfExists(ctx, r.infra, client.ObjectKey{Name: scopedNetwork(tc.Name, req.Name)},
		&copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case !exists:
		return r.orphan(ctx, tc, req, &copied, has)
	case !network.DeletionTimestamp.IsZero(), tc.isLeaving():
		return ctrl.Result{}, r.release(ctx, tc, &network, &copied, has)
	}

	err = r.copyToInfra(ctx, tc, &network, &copied, has)
	if p, ok := errors.AsType[*problem](err); ok {
		if p.reason == v1alpha1.ReasonQuotaExceeded && tc.waitsFor == limitNone {
			tc.waitsFor = limitSegments
		}
		return ctrl.Result{RequeueAfter: reconciling.LastRetry}, r.refuse(ctx, tc, &network, p)
	}

	return ctrl.Result{}, err
}

// orphan deletes the copy of an XPUNetwork that no longer exists. It asks the tenant's API server,
// because the cache may be stale.
func (r *networks) orphan(
	ctx context.Context, tc *tenantCluster, req mcreconcile.Request,
	copied *v1alpha1.XPUNetwork, has bool,
) (ctrl.Result, error) {
	if !has && segmentOf(tc.XPUTenant, req.Name) == nil {
		return ctrl.Result{}, nil
	}

	var network v1alpha1.XPUNetwork
	exists, err := getIfExists(ctx, tc.live, req.NamespacedName, &network)
	if err != nil {
		return ctrl.Result{}, err
	}
	if exists {
		return cacheStale, nil
	}

	_, err = r.retire(ctx, tc, req.Name, copied, has)
	return ctrl.Result{}, err
}

// retire deletes the copy of a network. Once the copy is gone, it frees the segment.
func (r *networks) retire(
	ctx context.Context, tc *tenantCluster, name string, copied *v1alpha1.XPUNetwork, has bool,
) (gone bool, err error) {
	if !has { // the cache may not have a copy made a moment ago
		if has, err = getIfExists(ctx, r.live, client.ObjectKey{Name: scopedNetwork(tc.Name, name)},
			copied); err != nil {
			return false, err
		}
	}

	if has {
		return false, remove(ctx, r.infra, copied)
	}

	return true, r.releaseSegment(ctx, tc.XPUTenant, name)
}

func (r *networks) release(
	ctx context.Context, tc *tenantCluster, network, copied *v1alpha1.XPUNetwork, has bool,
) error {
	if !controllerutil.ContainsFinalizer(network, v1alpha1.FinalizerNetwork) && !has {
		return nil
	}
	if has && tc.isLeaving() && tc.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
		return nil
	}

	gone, err := r.retire(ctx, tc, network.Name, copied, has)
	if err != nil {
		return err
	}
	if !gone {
		return r.report(ctx, tc, network, copied)
	}

	if network.DeletionTimestamp.IsZero() {
		if err := r.refuse(ctx, tc, network, leavingProblem()); err != nil {
			return err
		}
	}

	return tc.changeFinalizer(ctx, network, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerNetwork)
}

// copyToInfra gives the network a segment, creates or updates its copy, and reports the copy's
// status.
func (r *networks) copyToInfra(
	ctx context.Context, tc *tenantCluster, network, copied *v1alpha1.XPUNetwork, has bool,
) error {
	if err := tc.tooLarge(network, r.Limits.ObjectBytes); err != nil {
		return err
	}

	if len(network.Name) > validation.LabelValueMaxLength {
		return problemf(v1alpha1.ReasonInvalidConfig,
			"its name has %d characters, and the infra cluster takes %d; make another one",
			len(network.Name), validation.LabelValueMaxLength)
	}

	if err := tc.changeFinalizer(ctx, network, controllerutil.AddFinalizer,
		v1alpha1.FinalizerNetwork); err != nil {
		return err
	}

	segment := segmentOf(tc.XPUTenant, network.Name)
	if segment == nil {
		var err error
		if segment, err = r.allocateSegment(ctx, tc.XPUTenant, network.Name); err != nil {
			return err
		}
	}

	want := &v1alpha1.XPUNetwork{
		ObjectMeta: copyMeta(tc.Name, network, "", scopedNetwork(tc.Name, network.Name)),
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: segment.VLAN, VNI: segment.VNI, MTU: network.Spec.MTU,
			SourceFilter: network.Spec.SourceFilter,
			// No namespace of the infra cluster may use the copy.
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromNone},
		},
	}

	if routed := network.Spec.Routed; routed != nil {
		// The xPUs are the gateway, so they need its addresses. A tenant's VRF is its own, whatever
		// the tenant calls it.
		want.Spec.Routed = &v1alpha1.RoutedNetwork{VRF: scopedVRF(tc.Name, routed.VRF)}
		want.Spec.Subnets, want.Spec.Gateways = network.Spec.Subnets, network.Spec.Gateways
	}

	same := has && equality.Semantic.DeepEqual(copied.Spec, want.Spec) && isCopyOf(copied, network)
	if !same {
		if err := asProblem(apply(ctx, r.infra, want, "status")); err != nil {
			return err
		}
	}

	if !has {
		return nil
	}

	return r.report(ctx, tc, network, copied)
}

// refuse reports in the tenant's XPUNetwork why it is not copied.
func (r *networks) refuse(
	ctx context.Context, tc *tenantCluster, network *v1alpha1.XPUNetwork, p *problem,
) error {
	condition := withTransitionTime(notReady(network, p.reason, p.message),
		network.Status.Conditions)
	if hasCondition(network.Status.Conditions, condition) {
		return nil
	}
	return applyStatus(ctx, tc.client, &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: network.Name},
		Status:     v1alpha1.XPUNetworkStatus{Conditions: []metav1.Condition{condition}},
	})
}

// report copies the status of the copy to the tenant's XPUNetwork.
func (r *networks) report(
	ctx context.Context, tc *tenantCluster, network, copied *v1alpha1.XPUNetwork,
) error {
	condition := readyForTenant(tc.Name, copied.Status.Conditions, network)
	if condition == nil {
		return nil
	}

	status := v1alpha1.XPUNetworkStatus{XPUs: copied.Status.XPUs,
		ReadyXPUs: copied.Status.ReadyXPUs}
	for _, failure := range copied.Status.Failures {
		status.Failures = append(status.Failures, v1alpha1.XPUNetworkFailure{
			XPU: failure.XPU, Message: unscopedText(tc.Name, failure.Message),
		})
	}

	current := network.Status
	same := current.XPUs == status.XPUs && current.ReadyXPUs == status.ReadyXPUs &&
		slices.Equal(current.Failures, status.Failures)
	if same && hasCondition(current.Conditions, *condition) {
		return nil
	}

	meta.SetStatusCondition(&status.Conditions, *condition)
	return applyStatus(ctx, tc.client,
		&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: network.Name}, Status: status})
}
