// SPDX-License-Identifier: Apache-2.0

// Package nodes reports in XPUNodes whether the agents that write them run. The kubelets and
// Kubernetes' node controller keep the readiness of the agents' pods current, so that agents need
// no heartbeat of their own.
package nodes

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// Options configure the reconciler of XPUNodes.
type Options struct {
	// Namespace has the pods of the agents.
	Namespace string
	// Grace is how long no pod of an agent may be ready on a node before the agent counts as away.
	// A restart or an update takes less.
	Grace time.Duration
}

// PodLabels are the labels of the pods of agents.
func PodLabels() client.MatchingLabels {
	return client.MatchingLabels{"app.kubernetes.io/name": "xpu-agent"}
}

// byNode is the index of pods by the name of their node.
const byNode = "node"

// AddIndexes adds the index of the cache that this package reads.
func AddIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	node := func(p *corev1.Pod) []string { return []string{p.Spec.NodeName} }
	return reconciling.AddIndex(ctx, indexer, &corev1.Pod{}, byNode, node)
}

// TrimPod leaves out of a pod what this package does not read. It is a transform of a cache.
func TrimPod(o any) (any, error) {
	pod, isPod := o.(*corev1.Pod)
	if !isPod {
		return o, nil
	}

	kept := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Labels: pod.Labels,
			ResourceVersion: pod.ResourceVersion, DeletionTimestamp: pod.DeletionTimestamp,
		},
		Spec: corev1.PodSpec{NodeName: pod.Spec.NodeName},
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			kept.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	return kept, nil
}

// Setup adds the reconciler of XPUNodes to the manager.
func Setup(mgr ctrl.Manager, cluster reconciling.Cluster, o Options) error {
	r := &reconciler{Cluster: cluster, Options: o}
	ofPod := func(_ context.Context, o client.Object) []reconcile.Request {
		node := o.(*corev1.Pod).Spec.NodeName
		if node == "" {
			return nil
		}
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: node}}}
	}

	return reconciling.NewController(mgr, "xpunode", 1).
		For(&v1alpha1.XPUNode{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(ofPod)).
		Complete(r.Guarded(r))
}

// reconciler sets the condition AgentReady of XPUNodes.
type reconciler struct {
	reconciling.Cluster
	Options

	missed reconciling.Durations[string] // by node: it has no ready agent
}

// Reconcile writes the condition of an XPUNode that exists.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var node v1alpha1.XPUNode
	err := r.Client.Get(ctx, req.NamespacedName, &node)
	if apierrors.IsNotFound(err) {
		r.missed.Reset(req.Name)
		return ctrl.Result{}, nil
	}
	if err != nil {
		return ctrl.Result{}, fmt.Errorf("XPUNode %s: %w", req.Name, err)
	}
	return r.report(ctx, &node)
}

// report writes the condition. It says nothing about an agent that does not run in a pod of the
// namespace, or that does not say so, as older agents do not.
func (r *reconciler) report(ctx context.Context, node *v1alpha1.XPUNode) (ctrl.Result, error) {
	if node.Status.Agent == nil || node.Status.Agent.Namespace != r.Namespace {
		before := node.DeepCopy()
		if meta.RemoveStatusCondition(&node.Status.Conditions, v1alpha1.ConditionAgentReady) {
			return ctrl.Result{}, r.write(ctx, node, before) // of an agent that said so
		}
		return ctrl.Result{}, nil
	}

	runs, err := r.agentRuns(ctx, node.Name)
	if err != nil {
		return ctrl.Result{}, err
	}

	left := r.left(node.Name, runs)
	if left > 0 {
		return ctrl.Result{RequeueAfter: left}, nil
	}

	condition := reconciling.NewCondition(v1alpha1.ConditionAgentReady, 0, v1alpha1.ReasonRunning,
		"a pod of xpu-agent is ready on the node")
	if !runs {
		condition = reconciling.NewCondition(v1alpha1.ConditionAgentReady, 0,
			v1alpha1.ReasonAgentAway, fmt.Sprintf("no pod of xpu-agent is ready on the node: what this "+
				"XPUNode says is old, and no Function of the node is attached or given back; see: "+
				"kubectl -n %s get pods -o wide --field-selector spec.nodeName=%s", r.Namespace,
				node.Name))
	}

	before := node.DeepCopy()
	if !meta.SetStatusCondition(&node.Status.Conditions, condition) {
		return ctrl.Result{}, nil
	}
	return ctrl.Result{}, r.write(ctx, node, before)
}

// agentRuns reports whether a pod of an agent is ready on the node.
func (r *reconciler) agentRuns(ctx context.Context, node string) (bool, error) {
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(r.Namespace),
		client.MatchingFields{byNode: node}, client.UnsafeDisableDeepCopy); err != nil {
		return false, fmt.Errorf("list pods of xpu-agent on node %s: %w", node, err)
	}

	for _, pod := range pods.Items {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return true, nil
			}
		}
	}
	return false, nil
}

// left returns how long the agent has before it counts as away, and 0 if it runs.
func (r *reconciler) left(node string, runs bool) time.Duration {
	if runs {
		r.missed.Reset(node)
		return 0
	}
	return max(r.Grace-r.missed.Elapsed(node), 0)
}

// write writes the condition beside the others, which the agent writes.
func (r *reconciler) write(ctx context.Context, node, before *v1alpha1.XPUNode) error {
	err := r.Client.Patch(ctx, node, reconciling.Since(before))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("condition %s of XPUNode %s: %w", v1alpha1.ConditionAgentReady, node.Name,
			err)
	}
	return nil
}
