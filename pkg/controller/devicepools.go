package controller

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// devicePools sums up what the nodes' agents found for each DevicePool, and takes away what those of deleted Nodes
// left.
type devicePools struct {
	client client.Client
	live   client.Reader // not cached
}

func (r *devicePools) setup(mgr ctrl.Manager) error {
	deleted := predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
	return ctrl.NewControllerManagedBy(mgr).
		Named("devicepool").
		For(&v1alpha1.DevicePool{}).
		WatchesMetadata(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(
			func(ctx context.Context, _ client.Object) []reconcile.Request {
				return requestsFor(ctx, r.client, &v1alpha1.DevicePoolList{})
			}), builder.WithPredicates(deleted)).
		WithOptions(controller.Options{RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
}

func (r *devicePools) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pool v1alpha1.DevicePool
	if err := r.client.Get(ctx, req.NamespacedName, &pool); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	before := pool.DeepCopy()
	if err := r.prune(ctx, &pool); err != nil {
		return ctrl.Result{}, err
	}
	sumUp(&pool)
	sumUpSupply(&pool)
	if equality.Semantic.DeepEqual(pool.Status, before.Status) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, patchStatus(ctx, r.client, &pool, before)
}

// nodeMetadata is a Node without spec and status.
func nodeMetadata() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}}
}

// prune takes away the entries of Nodes that do not exist: their agents do it no more. A Node that the cache does not
// have may just be newer than it.
func (r *devicePools) prune(ctx context.Context, pool *v1alpha1.DevicePool) error {
	var left []v1alpha1.DevicePoolNodeStatus
	for _, entry := range pool.Status.Nodes {
		key := client.ObjectKey{Name: entry.Name}
		err := r.client.Get(ctx, key, nodeMetadata())
		if apierrors.IsNotFound(err) {
			err = r.live.Get(ctx, key, nodeMetadata())
		}
		switch {
		case apierrors.IsNotFound(err):
			continue
		case err != nil:
			return fmt.Errorf("node %s: %w", entry.Name, err)
		}
		left = append(left, entry)
	}
	pool.Status.Nodes = left
	return nil
}

// shownOverlaps is how many Functions of another pool the condition names.
const shownOverlaps = 3

// sumUp says whether the pool is offered. Each agent tells of the spec that it saw, so the sum is about the oldest of
// these.
func sumUp(pool *v1alpha1.DevicePool) {
	var functions int32
	generation := pool.Generation
	nodes, overlaps := 0, 0
	var shown []string
	problem := ""
	for _, node := range pool.Status.Nodes {
		generation = min(generation, node.ObservedGeneration)
		functions += node.Functions
		if node.Functions > 0 {
			nodes++
		}
		if node.Problem != "" && problem == "" {
			problem = fmt.Sprintf("node %s: %s", node.Name, node.Problem)
		}
		overlaps += len(node.Overlapping)
		for _, o := range node.Overlapping[:min(len(node.Overlapping), shownOverlaps-len(shown))] {
			shown = append(shown, fmt.Sprintf("%s on node %s", o, node.Name))
		}
	}
	pool.Status.Functions = functions
	published := fmt.Sprintf("%d Functions on %d nodes", functions, nodes)
	switch {
	case problem != "":
		setReady(&pool.Status.Conditions, generation, metav1.ConditionFalse, v1alpha1.ReasonInvalidConfig, published+"; "+problem)
	case overlaps > 0:
		setReady(&pool.Status.Conditions, generation, metav1.ConditionFalse, v1alpha1.ReasonOverlap,
			fmt.Sprintf("%s; at least %d more that the selectors match belong to other pools: %s; narrow the selectors of one pool", published, overlaps, strings.Join(shown, ", ")))
	case functions == 0:
		setReady(&pool.Status.Conditions, generation, metav1.ConditionFalse, v1alpha1.ReasonNoFunctions,
			"no node has a Function that a selector matches; compare spec.selectors and spec.nodeSelector with the nodes' Functions")
	default:
		setReady(&pool.Status.Conditions, generation, metav1.ConditionTrue, v1alpha1.ReasonPublished, published)
	}
}

// shownShortages is how many PFs the condition names, and shownBehind how many nodes that are to look at the spec.
const (
	shownShortages = 3
	shownBehind    = 3
)

// sumUpSupply says whether all PFs have what numVFs and sfs ask for.
func sumUpSupply(pool *v1alpha1.DevicePool) {
	if pool.Spec.NumVFs == nil && pool.Spec.SFs == nil {
		meta.RemoveStatusCondition(&pool.Status.Conditions, v1alpha1.ConditionSupplied)
		return
	}
	status, reason, message := supplied(pool.Status.Nodes, pool.Generation)
	meta.SetStatusCondition(&pool.Status.Conditions, metav1.Condition{
		Type: v1alpha1.ConditionSupplied, Status: status, Reason: reason, Message: message,
		ObservedGeneration: pool.Generation,
	})
}

// supplied is the condition for this generation of the spec. What nodes said of an older one does not count. Its reason
// is that of the first PF that lacks something by itself, rather than of one that is just being changed.
func supplied(
	nodes []v1alpha1.DevicePoolNodeStatus, generation int64,
) (status metav1.ConditionStatus, reason, message string) {
	reason = v1alpha1.ReasonMaking
	var short, behind []string
	for _, node := range nodes {
		if node.ObservedGeneration < generation {
			behind = append(behind, node.Name)
			continue
		}
		if node.Problem != "" {
			return metav1.ConditionFalse, v1alpha1.ReasonInvalidConfig, "see condition Ready"
		}
		for _, s := range node.Shortages {
			if reason == v1alpha1.ReasonMaking {
				reason = s.Reason
			}
			short = append(short, fmt.Sprintf("node %s: %s", node.Name, s.Message))
		}
	}
	short = firstOf(short, shownShortages)
	if len(behind) > 0 {
		short = append(short, fmt.Sprintf("generation %d of the spec has not been seen to yet on nodes %s: if that stays, "+
			"see whether their agents run", generation, strings.Join(firstOf(behind, shownBehind), ", ")))
	}
	switch {
	case len(nodes) == 0:
		return metav1.ConditionFalse, v1alpha1.ReasonNoPF,
			"no node has a PF that spec.selectors name; compare pfNames and rootDevices with the nodes' PFs"
	case len(short) == 0:
		return metav1.ConditionTrue, v1alpha1.ReasonAllMade, "every PF that spec.selectors name has what is asked for"
	}
	return metav1.ConditionFalse, reason, strings.Join(short, "; ")
}

// firstOf shortens a list to its first n words, and says how many more there are.
func firstOf(list []string, n int) []string {
	if len(list) <= n {
		return list
	}
	return append(list[:n:n], fmt.Sprintf("and %d more", len(list)-n))
}
