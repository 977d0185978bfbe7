package broker

import (
	"context"

	"k8s.io/apimachinery/pkg/api/equality"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	mcmanager "sigs.k8s.io/multicluster-runtime/pkg/manager"
	mcreconcile "sigs.k8s.io/multicluster-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// nodes tells the infra cluster which PFs the tenant's nodes have, by which it finds the nodes of its cards.
type nodes struct{ base }

func (r *nodes) setup(mgr mcmanager.Manager) error {
	return newController(mgr, "node", r.Concurrency).
		For(&v1alpha1.XPUNode{}).
		WatchesRawSource(fromInfra(mgr, &v1alpha1.XPUNode{}, originals)).
		WatchesRawSource(r.wakeups.Source()).
		WatchesRawSource(r.turns.Source()).
		Complete(r.at(r.look))
}

func (r *nodes) wake(ctx context.Context, tenant string) {
	r.wakeAll(ctx, tenant, &v1alpha1.XPUNodeList{})
}

// look is for an XPUNode of a tenant's cluster, by its name there.
func (r *nodes) look(ctx context.Context, s *site, req mcreconcile.Request) (ctrl.Result, error) {
	var node, copied v1alpha1.XPUNode
	exists, err := found(ctx, s.client, req.NamespacedName, &node)
	if err != nil {
		return ctrl.Result{}, err
	}
	has, err := found(ctx, r.infra, client.ObjectKey{Name: scoped(s.Name, req.Name)}, &copied)
	switch {
	case err != nil:
		return ctrl.Result{}, err
	case s.leaving():
		return ctrl.Result{}, nil
	case exists:
		return ctrl.Result{}, r.carry(ctx, s, &node, &copied)
	case !has:
		return ctrl.Result{}, nil
	}
	if exists, err = found(ctx, s.live, req.NamespacedName, &node); err != nil || exists {
		return behind, err
	}
	return ctrl.Result{}, remove(ctx, r.infra, &copied)
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
