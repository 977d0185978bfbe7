// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"errors"

	"k8s.io/apimachinery/pkg/api/equality"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/source"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// nodes tells the infra cluster which PFs the tenant's nodes have, by which it finds the nodes of
// its cards.
type nodes struct {
	base
	quota *quota
}

func (r *nodes) setup(mgr mcmanager.Manager) error {
	return newController(mgr, "node", r.Concurrency).
		For(&v1alpha1.XPUNode{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNode{}, originals)).
		WatchesRawSource(source.TypedKind(mgr.GetLocalManager().GetCache(), &v1alpha1.XPUNode{},
			counted[*v1alpha1.XPUNode](r.quota))).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUTenant{}, r.ofTenant, whenTenantChanged())).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.at("XPUNodes", r.look))
}

func (r *nodes) wake(ctx context.Context, tenant string) {
	r.wakeAll(ctx, tenant, &v1alpha1.XPUNodeList{})
}

// ofTenant are all XPUNodes of a tenant, which may have more of them now.
func (r *nodes) ofTenant(ctx context.Context, tenant *v1alpha1.XPUTenant) []mcreconcile.Request {
	return r.there(ctx, tenant.Name, &v1alpha1.XPUNodeList{})
}

// look is for an XPUNode of a tenant's cluster, by its name there.
func (r *nodes) look(ctx context.Context, s *site, req mcreconcile.Request) (ctrl.Result, error) {
	var node, copied v1alpha1.XPUNode
	exists, err := found(ctx, s.client, req.NamespacedName, &node)
	if err != nil {
		return ctrl.Result{}, err
	}

	name := scoped(s.Name, req.Name)
	has, err := found(ctx, r.infra, client.ObjectKey{Name: name}, &copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case s.leaving():
		return ctrl.Result{}, nil
	case exists:
		err := r.allow(s, &node, name, req)
		// which the XPUTenant says: an XPUNode has no conditions
		if _, ok := errors.AsType[*problem](err); ok {
			return ctrl.Result{RequeueAfter: lastRetry}, nil
		}
		return ctrl.Result{}, r.carry(ctx, s, &node, &copied)
	case !has:
		r.quota.leave(s.Name, req)
		// it may have been counted and not been made
		r.wakeups.Add(0, r.quota.give(s.Name, name)...)
		return ctrl.Result{}, nil
	}

	if exists, err = found(ctx, s.live, req.NamespacedName, &node); err != nil || exists {
		return behind, err
	}

	return ctrl.Result{}, remove(ctx, r.infra, &copied)
}

// allow returns a *problem if the tenant may not have the XPUNode, and otherwise counts it.
func (r *nodes) allow(s *site, node *v1alpha1.XPUNode, name string, req mcreconcile.Request) error {
	if err := s.tooLarge(node, r.Limits.ObjectBytes); err != nil {
		return err
	}
	if most := maxNodes(s.XPUTenant, r.Limits); !r.quota.take(s.Name, name, most, req) {
		s.waitsFor = limitNodes
		return problemf(v1alpha1.ReasonQuotaExceeded, "the tenant has %d XPUNodes", most)
	}
	return nil
}

// carry makes what stands for the node be as it is wanted.
func (r *nodes) carry(ctx context.Context, s *site, node, copied *v1alpha1.XPUNode) error {
	want := &v1alpha1.XPUNode{
		ObjectMeta: copyMeta(s.Name, node, "", scoped(s.Name, node.Name)),
		Status:     v1alpha1.XPUNodeStatus{Functions: node.Status.Functions, PFs: node.Status.PFs},
	}
	if equality.Semantic.DeepEqual(want.Status, copied.Status) && isCopyOf(copied, node) {
		return nil
	}
	return apply(ctx, r.infra, want)
}
