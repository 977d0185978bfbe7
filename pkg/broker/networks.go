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
)

// networks carries XPUNetworks to the infra cluster, each in a segment of the tenant's, and their
// status back. A tenant's XPUNetwork keeps its finalizer until the infra cluster has none that
// stands for it, which is when no XPUPort is in it.
type networks struct{ base }

func (r *networks) setup(mgr mcmanager.Manager) error {
	return newController(mgr, "network", r.Concurrency).
		For(&v1alpha1.XPUNetwork{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNetwork{}, originals)).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.ofTenant, whenTenantChanged())).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUTenant{},
			handler.TypedFuncs[*v1alpha1.XPUTenant, mcreconcile.Request]{
				UpdateFunc: segmentsGiven,
			})).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.at("XPUNetworks", r.look))
}

// segmentsGiven has networks looked at that were given a segment: one may have gone while the cache
// did not know of its segment yet.
func segmentsGiven(
	_ context.Context, e event.TypedUpdateEvent[*v1alpha1.XPUTenant],
	queue workqueue.TypedRateLimitingInterface[mcreconcile.Request],
) {
	for _, segment := range e.ObjectNew.Status.Networks {
		if segmentOf(e.ObjectOld, segment.Name) == nil {
			queue.Add(request(e.ObjectNew.Name, "", segment.Name))
		}
	}
}

func (r *networks) wake(ctx context.Context, tenant string) {
	r.wakeAll(ctx, tenant, &v1alpha1.XPUNetworkList{})
	var t v1alpha1.XPUTenant
	if err := r.infra.Get(ctx, client.ObjectKey{Name: tenant}, &t); err != nil {
		return // it has none, or the cache is not running
	}
	// a broker may have been killed between the end of a network and that of its segment
	for _, segment := range t.Status.Networks {
		r.wakeups.Add(0, request(tenant, "", segment.Name))
	}
}

// ofTenant are all XPUNetworks of a tenant, which may be given another segment, or are to go.
func (r *networks) ofTenant(ctx context.Context, tenant *v1alpha1.XPUTenant) []mcreconcile.Request {
	return r.there(ctx, tenant.Name, &v1alpha1.XPUNetworkList{})
}

// look is for an XPUNetwork of a tenant's cluster, by its name there.
func (r *networks) look(
	ctx context.Context, s *site, req mcreconcile.Request,
) (ctrl.Result, error) {
	var network, copied v1alpha1.XPUNetwork
	exists, err := found(ctx, s.client, req.NamespacedName, &network)
	if err != nil {
		return ctrl.Result{}, err
	}

	has, err := found(ctx, r.infra, client.ObjectKey{Name: scopedNetwork(s.Name, req.Name)},
		&copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case !exists:
		return r.orphan(ctx, s, req, &copied, has)
	case !network.DeletionTimestamp.IsZero(), s.leaving():
		return ctrl.Result{}, r.release(ctx, s, &network, &copied, has)
	}

	err = r.carry(ctx, s, &network, &copied, has)
	if p, ok := errors.AsType[*problem](err); ok {
		if p.reason == v1alpha1.ReasonQuotaExceeded && s.waitsFor == limitNone {
			s.waitsFor = limitSegments
		}
		return ctrl.Result{RequeueAfter: lastRetry}, r.refuse(ctx, s, &network, p)
	}

	return ctrl.Result{}, err
}

// orphan deletes what stands for an XPUNetwork that the tenant's cluster, not only the cache of it,
// does not have.
func (r *networks) orphan(
	ctx context.Context, s *site, req mcreconcile.Request, copied *v1alpha1.XPUNetwork, has bool,
) (ctrl.Result, error) {
	if !has && segmentOf(s.XPUTenant, req.Name) == nil {
		return ctrl.Result{}, nil
	}

	var network v1alpha1.XPUNetwork
	exists, err := found(ctx, s.live, req.NamespacedName, &network)
	if err != nil {
		return ctrl.Result{}, err
	}
	if exists {
		return behind, nil
	}

	_, err = r.retire(ctx, s, req.Name, copied, has)
	return ctrl.Result{}, err
}

// retire deletes what stands for a network, and gives its segment back once that is gone.
func (r *networks) retire(
	ctx context.Context, s *site, name string, copied *v1alpha1.XPUNetwork, has bool,
) (gone bool, err error) {
	if !has { // it may have been made a moment ago
		if has, err = found(ctx, r.live, client.ObjectKey{Name: scopedNetwork(s.Name, name)},
			copied); err != nil {
			return false, err
		}
	}

	if has {
		return false, remove(ctx, r.infra, copied)
	}

	return true, r.giveBack(ctx, s.XPUTenant, name)
}

func (r *networks) release(
	ctx context.Context, s *site, network, copied *v1alpha1.XPUNetwork, has bool,
) error {
	if !controllerutil.ContainsFinalizer(network, v1alpha1.FinalizerNetwork) && !has {
		return nil
	}
	if has && s.leaving() && s.Spec.DeletionPolicy == v1alpha1.DeletionRetain {
		return nil
	}

	gone, err := r.retire(ctx, s, network.Name, copied, has)
	if err != nil {
		return err
	}
	if !gone {
		return r.report(ctx, s, network, copied)
	}

	if network.DeletionTimestamp.IsZero() {
		if err := r.refuse(ctx, s, network, leavingProblem()); err != nil {
			return err
		}
	}

	return changeFinalizer(ctx, s.client, network, controllerutil.RemoveFinalizer,
		v1alpha1.FinalizerNetwork)
}

// carry gives the network a segment, has what stands for it be as it is wanted, and says what
// became of that.
func (r *networks) carry(
	ctx context.Context, s *site, network, copied *v1alpha1.XPUNetwork, has bool,
) error {
	if err := s.tooLarge(network, r.Limits.ObjectBytes); err != nil {
		return err
	}

	if len(network.Name) > validation.LabelValueMaxLength {
		return problemf(v1alpha1.ReasonInvalidConfig,
			"its name has %d characters, and the infra cluster takes %d; make another one",
			len(network.Name), validation.LabelValueMaxLength)
	}

	if err := changeFinalizer(ctx, s.client, network, controllerutil.AddFinalizer,
		v1alpha1.FinalizerNetwork); err != nil {
		return err
	}

	segment := segmentOf(s.XPUTenant, network.Name)
	if segment == nil {
		var err error
		if segment, err = r.allocate(ctx, s.XPUTenant, network.Name); err != nil {
			return err
		}
	}

	want := &v1alpha1.XPUNetwork{
		ObjectMeta: copyMeta(s.Name, network, "", scopedNetwork(s.Name, network.Name)),
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: segment.VLAN, VNI: segment.VNI, MTU: network.Spec.MTU,
			SourceFilter: network.Spec.SourceFilter,
			// of the infra cluster
			AllowedNamespaces: v1alpha1.AllowedNamespaces{From: v1alpha1.NamespacesFromNone},
		},
	}

	same := has && equality.Semantic.DeepEqual(copied.Spec, want.Spec) && isCopyOf(copied, network)
	if !same {
		if err := taken(apply(ctx, r.infra, want, "status")); err != nil {
			return err
		}
	}

	if !has {
		return nil
	}

	return r.report(ctx, s, network, copied)
}

// refuse says in the tenant's XPUNetwork why it is not carried over.
func (r *networks) refuse(
	ctx context.Context, s *site, network *v1alpha1.XPUNetwork, p *problem,
) error {
	condition := dated(notReady(network, p.reason, p.message), network.Status.Conditions)
	if has(network.Status.Conditions, condition) {
		return nil
	}
	return applyStatus(ctx, s.client, &v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: network.Name},
		Status:     v1alpha1.XPUNetworkStatus{Conditions: []metav1.Condition{condition}},
	})
}

// report says in the tenant's XPUNetwork what became of the one in the infra cluster.
func (r *networks) report(
	ctx context.Context, s *site, network, copied *v1alpha1.XPUNetwork,
) error {
	condition := readyOf(s.Name, copied.Status.Conditions, network)
	if condition == nil {
		return nil
	}

	told := v1alpha1.XPUNetworkStatus{XPUs: copied.Status.XPUs, ReadyXPUs: copied.Status.ReadyXPUs}
	for _, failure := range copied.Status.Failures {
		told.Failures = append(told.Failures, v1alpha1.XPUNetworkFailure{
			XPU: failure.XPU, Message: localText(s.Name, failure.Message),
		})
	}

	there := network.Status
	same := there.XPUs == told.XPUs && there.ReadyXPUs == told.ReadyXPUs &&
		slices.Equal(there.Failures, told.Failures)
	if same && has(there.Conditions, *condition) {
		return nil
	}

	meta.SetStatusCondition(&told.Conditions, *condition)
	return applyStatus(ctx, s.client,
		&v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: network.Name}, Status: told})
}
