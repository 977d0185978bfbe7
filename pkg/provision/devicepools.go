package provision

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// devicePools sums up what the nodes' agents found for each DevicePool.
type devicePools struct {
	client client.Client
}

func (r *devicePools) setup(mgr ctrl.Manager) error {
	return ctrl.NewControllerManagedBy(mgr).
		Named("devicepool").
		For(&v1alpha1.DevicePool{}).
		WithOptions(controller.Options{RateLimiter: retryLimiter[reconcile.Request]()}).
		Complete(withConflicts(r))
}

func (r *devicePools) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var pool v1alpha1.DevicePool
	if err := r.client.Get(ctx, req.NamespacedName, &pool); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	before := pool.DeepCopy()
	sumUp(&pool)
	if equality.Semantic.DeepEqual(pool.Status, before.Status) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, patchStatus(ctx, r.client, &pool, before)
}

// shownOverlaps is how many Functions of another pool the condition names.
const shownOverlaps = 3

func sumUp(pool *v1alpha1.DevicePool) {
	var functions int32
	nodes, overlaps := 0, 0
	var shown []string
	problem := ""
	for _, node := range pool.Status.Nodes {
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
		setReady(&pool.Status.Conditions, pool.Generation, metav1.ConditionFalse, v1alpha1.ReasonInvalidConfig, published+"; "+problem)
	case overlaps > 0:
		setReady(&pool.Status.Conditions, pool.Generation, metav1.ConditionFalse, v1alpha1.ReasonOverlap,
			fmt.Sprintf("%s; at least %d more that the selectors match belong to other pools: %s; narrow the selectors of one pool", published, overlaps, strings.Join(shown, ", ")))
	case functions == 0:
		setReady(&pool.Status.Conditions, pool.Generation, metav1.ConditionFalse, v1alpha1.ReasonNoFunctions,
			"no node has a Function that a selector matches; compare spec.selectors and spec.nodeSelector with the nodes' Functions")
	default:
		setReady(&pool.Status.Conditions, pool.Generation, metav1.ConditionTrue, v1alpha1.ReasonPublished, published)
	}
}
