// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// devicePools sums up in a DevicePool's status what the nodes' agents found for it.
type devicePools struct{ base }

func (r *devicePools) setup(mgr ctrl.Manager) error {
	ofNetwork := func(ctx context.Context, network client.Object) []reconcile.Request {
		return reconciling.Requests(ctx, r.Client, &v1alpha1.DevicePoolList{},
			client.MatchingFields{poolsByNetwork: network.GetName()})
	}

	return reconciling.NewController(mgr, "devicepool", 1).
		For(&v1alpha1.DevicePool{}, reconciling.WhenSpecChanged).
		Watches(&v1alpha1.XPUNetwork{}, handler.EnqueueRequestsFromMapFunc(ofNetwork),
			reconciling.WhenMadeOrGone).
		Watches(&v1alpha1.XPUNode{}, handler.Funcs{
			CreateFunc: func(
				_ context.Context, e event.CreateEvent, queue model.Queue[reconcile.Request],
			) {
				r.changed(nil, e.Object, queue)
			},
			UpdateFunc: func(
				_ context.Context, e event.UpdateEvent, queue model.Queue[reconcile.Request],
			) {
				r.changed(e.ObjectOld, e.ObjectNew, queue)
			},
			DeleteFunc: func(
				_ context.Context, e event.DeleteEvent, queue model.Queue[reconcile.Request],
			) {
				r.changed(e.Object, nil, queue)
			},
		}).
		Complete(r.Guarded(reconcile.AsReconciler(r.Client, r)))
}

// changed enqueues the pools whose entries differ between two versions of an XPUNode. A pool is
// written once in PoolPause at most, because every agent watches DevicePools, and a thousand nodes
// may start at once.
func (r *devicePools) changed(before, after client.Object, queue model.Queue[reconcile.Request]) {
	was, is := poolsOf(before), poolsOf(after)
	for name, entry := range was {
		if now, stays := is[name]; !stays || !equality.Semantic.DeepEqual(entry, now) {
			queue.AddAfter(poolRequest(name), r.PoolPause)
		}
	}

	for name := range is {
		if _, had := was[name]; !had {
			queue.AddAfter(poolRequest(name), r.PoolPause)
		}
	}
}

// poolsOf returns the entries of an XPUNode by the name of the DevicePool. The XPUNode may be nil.
func poolsOf(o client.Object) map[string]v1alpha1.XPUNodePool {
	entries := map[string]v1alpha1.XPUNodePool{}
	if node, ok := o.(*v1alpha1.XPUNode); ok {
		for _, entry := range node.Status.Pools {
			entries[entry.Name] = entry
		}
	}
	return entries
}

func poolRequest(name string) reconcile.Request {
	return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
}

// Reconcile writes the status of the pool.
func (r *devicePools) Reconcile(
	ctx context.Context, pool *v1alpha1.DevicePool,
) (ctrl.Result, error) {
	before := pool.DeepCopy()
	entries, err := r.entries(ctx, pool.Name)
	if err != nil {
		return ctrl.Result{}, err
	}

	hasNetwork := true
	if name := pool.Spec.Network; name != "" {
		err := r.Client.Get(ctx, client.ObjectKey{Name: name}, &v1alpha1.XPUNetwork{})
		if client.IgnoreNotFound(err) != nil {
			return ctrl.Result{}, fmt.Errorf("XPUNetwork %s: %w", name, err)
		}
		hasNetwork = err == nil
	}

	sumUp(pool, entries, hasNetwork)
	if err := r.namePFs(ctx, pool); err != nil {
		return ctrl.Result{}, err
	}

	sumUpSupply(pool, entries)
	sumUpFallbacks(pool, entries)

	return ctrl.Result{}, reconciling.WriteStatus(ctx, r.Client, pool, before)
}

// poolEntry is a pool's entry in the XPUNode of a node.
type poolEntry struct {
	node string
	v1alpha1.XPUNodePool
}

// entries returns the entries of a pool, sorted by node.
func (r *devicePools) entries(ctx context.Context, pool string) ([]poolEntry, error) {
	var nodes v1alpha1.XPUNodeList
	if err := r.Client.List(ctx, &nodes, client.MatchingFields{xpuNodesByPool: pool},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUNodes: %w", err)
	}

	var entries []poolEntry
	for i := range nodes.Items {
		entries = append(entries, poolEntry{nodes.Items[i].Name, poolsOf(&nodes.Items[i])[pool]})
	}

	slices.SortFunc(entries, func(a, b poolEntry) int { return cmp.Compare(a.node, b.node) })
	return entries, nil
}

// mostExamples is how many nodes, Functions of other pools, and incomplete PFs a condition names at
// most.
const mostExamples = 3

// sumUp sets the counts and the condition Ready. The condition's generation is the oldest that an
// agent reports.
func sumUp(pool *v1alpha1.DevicePool, entries []poolEntry, hasNetwork bool) {
	generation := pool.Generation
	status := &pool.Status
	status.Functions, status.Healthy, status.NodeCount = 0, 0, 0
	var wrong, problems, overlaps []string
	for _, e := range entries {
		generation = min(generation, e.ObservedGeneration)
		status.Functions += e.Functions
		status.Healthy += e.Healthy
		if e.Functions > 0 {
			status.NodeCount++
		}

		if e.Error != "" {
			wrong = append(wrong, fmt.Sprintf("node %s: %s", e.node, e.Error))
		}

		for _, p := range e.Problems {
			problems = append(problems,
				fmt.Sprintf("node %s: %d Functions: %s", e.node, p.Functions, p.Message))
		}

		for _, o := range e.Overlapping {
			overlaps = append(overlaps, fmt.Sprintf("%s on node %s", o, e.node))
		}
	}

	message := fmt.Sprintf("%d Functions on %d nodes", status.Functions, status.NodeCount)
	if unhealthy := status.Functions - status.Healthy; unhealthy > 0 {
		message += fmt.Sprintf(", of which %d cannot be used now: %s", unhealthy,
			strings.Join(firstOf(problems), "; "))
	}

	if len(overlaps) > 0 {
		message += fmt.Sprintf("; at least %d more that the selectors match belong to other "+
			"pools: %s; narrow the selectors of "+
			"one pool", len(overlaps), strings.Join(firstOf(overlaps), ", "))
	}

	reason := v1alpha1.ReasonPublished
	switch {
	case len(wrong) > 0:
		reason = v1alpha1.ReasonInvalidConfig
		message += "; " + strings.Join(firstOf(wrong), "; ")
	case !hasNetwork:
		reason = v1alpha1.ReasonNetworkNotFound
		message += fmt.Sprintf("; XPUNetwork %s does not exist; create it, or name another one "+
			"in spec.network", pool.Spec.Network)
	case status.Functions == 0 && len(overlaps) > 0:
		reason = v1alpha1.ReasonOverlap
	case status.Functions == 0:
		reason = v1alpha1.ReasonNoFunctions
		message = "no node has a Function that a selector matches; " +
			"compare spec.selectors and spec.nodeSelector with the nodes' Functions"
	case status.Healthy == 0:
		reason = v1alpha1.ReasonUnhealthy
	case pool.Spec.Model == v1alpha1.ModelPorts && len(fallbacksOf(entries)) > 0:
		reason = v1alpha1.ReasonFeatureMissing
		message += "; see condition " + v1alpha1.ConditionSupported
	}

	meta.SetStatusCondition(&status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionReady, generation, reason, opi.Short(message)))
}

// namePFs adds the existing PFs to the message of a pool that has no Functions.
func (r *devicePools) namePFs(ctx context.Context, pool *v1alpha1.DevicePool) error {
	ready := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady)
	if ready == nil || ready.Reason != v1alpha1.ReasonNoFunctions {
		return nil
	}

	var nodes v1alpha1.XPUNodeList
	if err := r.Client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("list XPUNodes: %w", err)
	}

	var pfs []string
	for _, node := range nodes.Items {
		for _, pf := range node.Status.PFs {
			pfs = append(pfs,
				fmt.Sprintf("%s %s (%s, %s:%s)", node.Name, pf.Name, pf.Address, pf.Vendor,
					pf.Device))
		}
	}

	slices.Sort(pfs)
	found := "no agent has told of a PF: see whether xpu-agent runs on the nodes"
	if len(pfs) > 0 {
		found = "PFs of nodes are " + strings.Join(firstOf(pfs), ", ")
	}

	ready.Message = opi.Short(ready.Message + "; " + found)
	return nil
}

// sumUpSupply sets the condition Supplied: whether all PFs have the VFs and SFs that numVFs and sfs
// ask for in this generation of the spec. A PF that failed gives the reason, before a PF that is
// still being changed.
func sumUpSupply(pool *v1alpha1.DevicePool, entries []poolEntry) {
	if pool.Spec.NumVFs == nil && pool.Spec.SFs == nil {
		meta.RemoveStatusCondition(&pool.Status.Conditions, v1alpha1.ConditionSupplied)
		return
	}

	reason := v1alpha1.ReasonMaking
	invalid := false
	var short, behind []string
	for _, e := range entries {
		if e.ObservedGeneration < pool.Generation {
			behind = append(behind, e.node)
			continue
		}

		invalid = invalid || e.Error != ""
		for _, s := range e.Shortages {
			if reason == v1alpha1.ReasonMaking {
				reason = s.Reason
			}
			short = append(short, fmt.Sprintf("node %s: %s", e.node, s.Message))
		}
	}

	short = firstOf(short)
	if len(behind) > 0 {
		short = append(short,
			fmt.Sprintf("generation %d of the spec has not been seen to yet on nodes %s: if that "+
				"stays, "+
				"see whether their agents run", pool.Generation,
				strings.Join(firstOf(behind), ", ")))
	}

	message := strings.Join(short, "; ")
	switch {
	case invalid:
		reason, message = v1alpha1.ReasonInvalidConfig, "see condition Ready"
	case len(entries) == 0:
		reason = v1alpha1.ReasonNoPF
		message = "no node has a PF that spec.selectors name; compare pfNames and rootDevices " +
			"with the nodes' PFs"
	case len(short) == 0:
		reason, message = v1alpha1.ReasonAllMade, "every PF that spec.selectors name has what is "+
			"asked for"
	}

	meta.SetStatusCondition(&pool.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionSupplied, pool.Generation, reason, message))
}

// sumUpFallbacks sets the condition Supported of a pool that needs feature gates of Kubernetes.
func sumUpFallbacks(pool *v1alpha1.DevicePool, entries []poolEntry) {
	if !needsFeatures(pool.Spec) {
		meta.RemoveStatusCondition(&pool.Status.Conditions, v1alpha1.ConditionSupported)
		return
	}

	reason, message := v1alpha1.ReasonSupported, "the cluster has the feature gates that the "+
		"pool needs"
	if missing := fallbacksOf(entries); len(missing) > 0 {
		reason, message = v1alpha1.ReasonFeatureMissing, strings.Join(firstOf(missing), "; ")
	}

	meta.SetStatusCondition(&pool.Status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionSupported, pool.Generation, reason, opi.Short(message)))
}

// needsFeatures reports whether a pool needs more than Kubernetes 1.34 does by default.
func needsFeatures(spec v1alpha1.DevicePoolSpec) bool {
	return spec.Publish == v1alpha1.PublishDRA &&
		(spec.MaxAllocated != nil || spec.Model != "" && spec.Model != v1alpha1.ModelFunctions ||
			spec.Provision == v1alpha1.ProvisionBeforeBind ||
			spec.Provision == v1alpha1.ProvisionAhead)
}

// fallbacksOf returns what the cluster cannot do according to its nodes, each once, with the first
// node that reports it.
func fallbacksOf(entries []poolEntry) (list []string) {
	seen := map[v1alpha1.Fallback]bool{}
	for _, e := range entries {
		for _, f := range e.Fallbacks {
			if !seen[f] {
				seen[f] = true
				list = append(list,
					fmt.Sprintf("node %s: %s; turn on feature gate %s in kube-apiserver and "+
						"kube-scheduler, which is on by "+
						"default from Kubernetes 1.36 on", e.node, f.Message, f.Feature))
			}
		}
	}

	return list
}

// firstOf shortens a list to mostExamples, and adds how many more there are.
func firstOf(list []string) []string {
	if len(list) <= mostExamples {
		return list
	}
	return append(list[:mostExamples:mostExamples],
		fmt.Sprintf("and %d more", len(list)-mostExamples))
}
