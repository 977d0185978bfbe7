package controller

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// devicePools sums up what the nodes' agents found for each DevicePool, and removes what agents of deleted Nodes left.
type devicePools struct{ base }

func (r *devicePools) setup(mgr ctrl.Manager) error {
	all := func(ctx context.Context, _ client.Object) []reconcile.Request {
		return r.requests(ctx, &v1alpha1.DevicePoolList{})
	}
	return newController(mgr, "devicepool", 1).
		For(&v1alpha1.DevicePool{}).
		WatchesMetadata(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(all), whenGone).
		Complete(withConflicts(reconcile.AsReconciler(r.client, r)))
}

// Reconcile writes the status of the pool.
func (r *devicePools) Reconcile(ctx context.Context, pool *v1alpha1.DevicePool) (ctrl.Result, error) {
	before := pool.DeepCopy()
	if err := r.prune(ctx, pool); err != nil {
		return ctrl.Result{}, err
	}
	sumUp(pool)
	sumUpSupply(pool)
	return ctrl.Result{}, r.writeStatus(ctx, pool, before)
}

// nodeMetadata is a Node without spec and status.
func nodeMetadata() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}}
}

// prune removes the entries of Nodes that do not exist. A Node that the cache does not have may be newer than the cache.
func (r *devicePools) prune(ctx context.Context, pool *v1alpha1.DevicePool) error {
	var left []v1alpha1.DevicePoolNodeStatus
	for _, entry := range pool.Status.Nodes {
		key := client.ObjectKey{Name: entry.Name}
		err := r.client.Get(ctx, key, nodeMetadata())
		if apierrors.IsNotFound(err) {
			err = r.live.Get(ctx, key, nodeMetadata())
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("node %s: %w", entry.Name, err)
		}
		if err == nil {
			left = append(left, entry)
		}
	}
	pool.Status.Nodes = left
	return nil
}

// shown bounds how many Functions of other pools, PFs that lack something, and nodes that are behind a condition names.
const shown = 3

// sumUp sets the condition Ready. Its generation is the oldest of those that the agents report on.
func sumUp(pool *v1alpha1.DevicePool) {
	generation := pool.Generation
	pool.Status.Functions = 0
	nodes, overlaps := 0, 0
	var examples []string
	problem := ""
	for _, node := range pool.Status.Nodes {
		generation = min(generation, node.ObservedGeneration)
		pool.Status.Functions += node.Functions
		if node.Functions > 0 {
			nodes++
		}
		if node.Problem != "" && problem == "" {
			problem = fmt.Sprintf("node %s: %s", node.Name, node.Problem)
		}
		overlaps += len(node.Overlapping)
		for _, o := range node.Overlapping[:min(len(node.Overlapping), shown-len(examples))] {
			examples = append(examples, fmt.Sprintf("%s on node %s", o, node.Name))
		}
	}
	reason, message := v1alpha1.ReasonPublished, fmt.Sprintf("%d Functions on %d nodes", pool.Status.Functions, nodes)
	switch {
	case problem != "":
		reason = v1alpha1.ReasonInvalidConfig
		message += "; " + problem
	case overlaps > 0:
		reason = v1alpha1.ReasonOverlap
		message += fmt.Sprintf("; at least %d more that the selectors match belong to other pools: %s; "+
			"narrow the selectors of one pool", overlaps, strings.Join(examples, ", "))
	case pool.Status.Functions == 0:
		reason = v1alpha1.ReasonNoFunctions
		message = "no node has a Function that a selector matches; " +
			"compare spec.selectors and spec.nodeSelector with the nodes' Functions"
	}
	meta.SetStatusCondition(&pool.Status.Conditions, newCondition(v1alpha1.ConditionReady, generation, reason, message))
}

// sumUpSupply sets the condition Supplied: whether all PFs have what numVFs and sfs of this generation of the spec ask for.
// The reason is that of the first PF that lacks something by itself, rather than of one that is being changed.
func sumUpSupply(pool *v1alpha1.DevicePool) {
	if pool.Spec.NumVFs == nil && pool.Spec.SFs == nil {
		meta.RemoveStatusCondition(&pool.Status.Conditions, v1alpha1.ConditionSupplied)
		return
	}
	reason := v1alpha1.ReasonMaking
	invalid := false
	var short, behind []string
	for _, node := range pool.Status.Nodes {
		if node.ObservedGeneration < pool.Generation {
			behind = append(behind, node.Name)
			continue
		}
		invalid = invalid || node.Problem != ""
		for _, s := range node.Shortages {
			if reason == v1alpha1.ReasonMaking {
				reason = s.Reason
			}
			short = append(short, fmt.Sprintf("node %s: %s", node.Name, s.Message))
		}
	}
	short = firstOf(short)
	if len(behind) > 0 {
		short = append(short, fmt.Sprintf("generation %d of the spec has not been seen to yet on nodes %s: if that stays, "+
			"see whether their agents run", pool.Generation, strings.Join(firstOf(behind), ", ")))
	}
	message := strings.Join(short, "; ")
	switch {
	case invalid:
		reason, message = v1alpha1.ReasonInvalidConfig, "see condition Ready"
	case len(pool.Status.Nodes) == 0:
		reason = v1alpha1.ReasonNoPF
		message = "no node has a PF that spec.selectors name; compare pfNames and rootDevices with the nodes' PFs"
	case len(short) == 0:
		reason, message = v1alpha1.ReasonAllMade, "every PF that spec.selectors name has what is asked for"
	}
	meta.SetStatusCondition(&pool.Status.Conditions, newCondition(v1alpha1.ConditionSupplied, pool.Generation, reason, message))
}

// firstOf shortens a list to what is shown, and says how many more there are.
func firstOf(list []string) []string {
	if len(list) <= shown {
		return list
	}
	return append(list[:shown:shown], fmt.Sprintf("and %d more", len(list)-shown))
}
