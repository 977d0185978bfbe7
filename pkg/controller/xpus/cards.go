// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/pkg/multimap"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// cards finds the node that has the card of each XPU. It joins the PFs that the OPI agent reports
// with the PFs of XPUNodes, and writes the result to the XPU's status.
type cards struct {
	reconciling.Cluster
	Options
	retries  workqueue.TypedRateLimiter[reconcile.Request]
	reported reportedPFs
}

// requestQueue is the controller's queue.
type requestQueue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func (r *cards) setup(mgr ctrl.Manager) error {
	c := reconciling.NewController(mgr, "card", r.Concurrency)
	if r.Infra {
		all := func(ctx context.Context, _ client.Object) []reconcile.Request {
			return reconciling.Requests(ctx, r.Client, &v1alpha1.XPUList{})
		}
		c.Watches(&v1alpha1.XPUTenant{}, handler.EnqueueRequestsFromMapFunc(all),
			reconciling.WhenSpecChanged)
	}

	return c.
		// Its own writes also count as changes, because a node may have come back before the cache
		// showed that the card was gone.
		For(&v1alpha1.XPU{},
			builder.WithPredicates(predicate.Or(servingChanged,
				predicate.LabelChangedPredicate{}))).
		Watches(&v1alpha1.XPUNode{}, handler.Funcs{
			CreateFunc: func(ctx context.Context, e event.CreateEvent, queue requestQueue) {
				r.nodeChanged(ctx, queue, e.Object)
			},
			UpdateFunc: func(ctx context.Context, e event.UpdateEvent, queue requestQueue) {
				if !equality.Semantic.DeepEqual(e.ObjectOld.(*v1alpha1.XPUNode).Status.PFs,
					e.ObjectNew.(*v1alpha1.XPUNode).Status.PFs) {
					r.nodeChanged(ctx, queue, e.ObjectOld, e.ObjectNew)
				}
			},
			DeleteFunc: func(ctx context.Context, e event.DeleteEvent, queue requestQueue) {
				r.nodeChanged(ctx, queue, e.Object)
			},
		}).
		WatchesRawSource(sessions.Source(r.Sessions, sessions.ConnectionChanged,
			sessions.RequestFor)).
		Complete(r.Guarded(r))
}

// nodeChanged enqueues the XPUs whose agents reported a PF that the node has or had, and the XPUs
// of the node whose agents know PFs by their numbers.
func (r *cards) nodeChanged(ctx context.Context, queue requestQueue, nodes ...client.Object) {
	for _, node := range nodes {
		for _, request := range r.numbering(ctx, node.GetName()) {
			queue.Add(request)
		}
		for _, key := range cardKeys(node.(*v1alpha1.XPUNode)) {
			for _, xpu := range r.reported.by(key) {
				queue.Add(reconcile.Request{NamespacedName: client.ObjectKey{Name: xpu}})
			}
		}
	}
}

// numbering returns the XPUs of a node whose agents know PFs by their numbers.
func (r *cards) numbering(ctx context.Context, node string) (requests []reconcile.Request) {
	var own v1alpha1.XPUList
	if err := r.Client.List(ctx, &own, client.MatchingFields{ByNode: node},
		client.UnsafeDisableDeepCopy); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "Cannot list the XPUs of a node", "node", node)
	}

	for i := range own.Items {
		if traits, known := traitsOf(&own.Items[i]); known && traits.Numbered {
			requests = append(requests, reconciling.RequestFor(&own.Items[i]))
		}
	}

	return requests
}

func (r *cards) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var xpu v1alpha1.XPU
	if err := r.Client.Get(ctx, req.NamespacedName, &xpu); err != nil {
		if client.IgnoreNotFound(err) == nil {
			r.reported.forget(req.Name)
		}
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}

	again, err := r.ask(ctx, &xpu)
	if err != nil { // the session finds out whether the agent answers at all
		ctrl.LoggerFrom(ctx).Info("The OPI agent does not say which PFs it serves", "error",
			err.Error())
		return ctrl.Result{RequeueAfter: r.retries.When(req)}, nil
	}

	r.retries.Forget(req)
	before := xpu.DeepCopy()
	if err := r.locate(ctx, &xpu); err != nil {
		return ctrl.Result{}, err
	}

	return again, reconciling.WriteStatus(ctx, r.Client, &xpu, before)
}

// ask asks a connected agent for its PFs. It does so at each new connection, because the agent may
// have another configuration, and once in each ResyncPeriod, because a change during a connection
// may be missed.
func (r *cards) ask(ctx context.Context, xpu *v1alpha1.XPU) (again ctrl.Result, err error) {
	agent := r.Sessions.Connection(xpu.Name).Agent
	if agent == nil {
		return again, nil
	}

	ctx, cancel := context.WithTimeout(ctx, r.AgentTimeout)
	defer cancel()

	pfs, err := agent.HostPFs(ctx)
	if err != nil {
		return again, err
	}

	r.reported.set(xpu.Name, pfs)
	return ctrl.Result{RequeueAfter: r.ResyncPeriod}, nil
}

// locate fills in the XPU's status.
func (r *cards) locate(ctx context.Context, xpu *v1alpha1.XPU) error {
	reported, known := r.reported.of(xpu.Name)
	if !known { // since the controller started: what was found before still holds
		xpu.Status.NodeName = xpu.Node()
		return nil
	}

	if traits, ok := traitsOf(xpu); ok && traits.Numbered && len(reported) == 0 {
		return r.locateNumbered(ctx, xpu)
	}

	var nodes []v1alpha1.XPUNode
	seen := sets.New[string]()
	for _, pf := range reported {
		for _, key := range keysOf(pf) {
			var found v1alpha1.XPUNodeList
			if err := r.Client.List(ctx, &found, client.MatchingFields{nodesByCard: key},
				client.UnsafeDisableDeepCopy); err != nil {
				return fmt.Errorf("XPUNodes with %s: %w", key, err)
			}

			for _, node := range found.Items {
				if !seen.Has(node.Name) {
					seen.Insert(node.Name)
					nodes = append(nodes, node)
				}
			}
		}
	}

	nodes, err := r.ofTenant(ctx, xpu, nodes)
	if err != nil {
		return err
	}

	card := locate(xpu, reported, nodes)
	if card.reason == v1alpha1.ReasonCardNotFound {
		if card, err = r.keep(ctx, xpu, card); err != nil {
			return err
		}
	}
	return r.setCard(ctx, xpu, card)
}

// keep returns where a card is that no node reports. It stays where it was found as long as its node
// has no XPUNode: an XPUNode can be deleted, also with its Node, and that does not say that the card
// is elsewhere.
func (r *cards) keep(
	ctx context.Context, xpu *v1alpha1.XPU, card location,
) (location, error) {
	was := location{node: xpu.Status.NodeName, serial: xpu.Status.Serial, pfs: xpu.Status.PFs}
	if len(was.pfs) == 0 || was.serial != card.serial || card.node != "" && card.node != was.node {
		return card, nil
	}

	var node v1alpha1.XPUNode
	err := r.Client.Get(ctx, client.ObjectKey{Name: was.node}, &node)
	if client.IgnoreNotFound(err) != nil {
		return card, fmt.Errorf("XPUNode %s: %w", was.node, err)
	}
	if err == nil { // it says what its node has
		return card, nil
	}
	return was.because(v1alpha1.ReasonCardNotFound, "there is no XPUNode %s, whose node had the card "+
		"and keeps it until another one reports it; see whether xpu-agent runs there, and delete the "+
		"XPU if the card is gone", was.node), nil
}

// locateNumbered fills in the status of an XPU whose agent knows the PFs of its host by their
// numbers, and does not report them.
func (r *cards) locateNumbered(ctx context.Context, xpu *v1alpha1.XPU) error {
	var node v1alpha1.XPUNode
	err := r.Client.Get(ctx, client.ObjectKey{Name: xpu.Spec.NodeName}, &node)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPUNode %s: %w", xpu.Spec.NodeName, err)
	}

	nodes, err := r.ofTenant(ctx, xpu, []v1alpha1.XPUNode{node})
	if err != nil {
		return err
	}

	card := unreported(xpu)
	if len(nodes) > 0 && xpu.Spec.NodeName != "" {
		card.pfs = numbered(nodes[0].Status.PFs, xpu.Spec.PFs)
	}
	return r.setCard(ctx, xpu, card)
}

// setCard fills in the XPU's status, unless another XPU has the card already.
func (r *cards) setCard(ctx context.Context, xpu *v1alpha1.XPU, card location) error {
	if rival, err := r.rival(ctx, xpu, card); err != nil {
		return err
	} else if rival != "" {
		card = location{node: xpu.Spec.NodeName, reason: v1alpha1.ReasonConflict,
			message: fmt.Sprintf("the OPI agent says that it serves "+
				"%s of node %s, which XPU %s has; see which of the two agents has the card",
				card.pfs[0].Address, card.node, rival)}
	}

	xpu.Status.NodeName, xpu.Status.Serial, xpu.Status.PFs = card.node, card.serial, card.pfs
	if card.reason == "" {
		meta.RemoveStatusCondition(&xpu.Status.Conditions, v1alpha1.ConditionCard)
		return nil
	}

	meta.SetStatusCondition(&xpu.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionCard, xpu.Generation, card.reason, card.message))
	return nil
}

// ofTenant leaves out the nodes of clusters that the XPU does not serve, because their reports
// about cards must not count.
func (r *cards) ofTenant(
	ctx context.Context, xpu *v1alpha1.XPU, nodes []v1alpha1.XPUNode,
) ([]v1alpha1.XPUNode, error) {
	if !r.Infra {
		return nodes, nil
	}

	var tenants v1alpha1.XPUTenantList
	if err := r.Client.List(ctx, &tenants, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUTenants: %w", err)
	}

	var name string // of no tenant
	if tenant := v1alpha1.TenantOf(xpu, tenants.Items); tenant != nil {
		name = tenant.Name
	}

	return slices.DeleteFunc(nodes, func(n v1alpha1.XPUNode) bool {
		return n.Labels[v1alpha1.LabelTenant] != name
	}), nil
}

// rival returns the XPU that has one of the PFs already, "" if there is none. An agent's report
// alone does not take a card from another XPU.
func (r *cards) rival(ctx context.Context, xpu *v1alpha1.XPU, card location) (string, error) {
	var others v1alpha1.XPUList
	if err := r.Client.List(ctx, &others, client.MatchingFields{ByNode: card.node},
		client.UnsafeDisableDeepCopy); err != nil {
		return "", fmt.Errorf("XPUs of node %s: %w", card.node, err)
	}

	for i := range others.Items {
		other := &others.Items[i]
		for _, pf := range card.pfs {
			has := other.PF(pf.Address) != nil
			named := len(other.Spec.PFs) > 0 && other.Serves(pf.Address)
			if xpu.PF(pf.Address) != nil { // an XPU that only names the PF does not take it away
				has, named = has && reconciling.Older(other, xpu), false
			}
			if other.Name != xpu.Name && (has || named) {
				return other.Name, nil
			}
		}
	}

	return "", nil
}

// reportedPFs holds the PFs that agents reported by XPU, and the XPUs by the keys of their PFs.
// Safe for concurrent use.
type reportedPFs struct {
	mu    sync.Mutex
	byXPU map[string][]opi.HostPF
	byKey multimap.Sets[string, string]
}

func (t *reportedPFs) of(xpu string) (pfs []opi.HostPF, known bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pfs, known = t.byXPU[xpu]
	return pfs, known
}

// by returns the XPUs whose agents reported a PF with this key.
func (t *reportedPFs) by(key string) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(t.byKey.All(key))
}

func (t *reportedPFs) set(xpu string, pfs []opi.HostPF) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.drop(xpu)
	if t.byXPU == nil {
		t.byXPU = map[string][]opi.HostPF{}
	}

	t.byXPU[xpu] = pfs
	for _, pf := range pfs {
		for _, key := range keysOf(pf) {
			t.byKey.Add(key, xpu)
		}
	}
}

func (t *reportedPFs) forget(xpu string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop(xpu)
}

// drop needs the lock.
func (t *reportedPFs) drop(xpu string) {
	for _, pf := range t.byXPU[xpu] {
		for _, key := range keysOf(pf) {
			t.byKey.Remove(key, xpu)
		}
	}
	delete(t.byXPU, xpu)
}
