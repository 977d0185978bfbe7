// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulingcorev1 "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/snapshot"
)

// nodeState is a node and what its pods request.
type nodeState struct {
	*corev1.Node
	requested corev1.ResourceList
	pods      int64
}

// newNodeStates returns the nodes, by name.
func newNodeStates(from *snapshot.Snapshot) []*nodeState {
	byName := map[string]*nodeState{}
	for _, node := range from.Nodes {
		byName[node.Name] = &nodeState{Node: node, requested: corev1.ResourceList{}}
	}

	for _, pod := range from.Pods {
		if node, has := byName[pod.Spec.NodeName]; has {
			node.add(pod)
		}
	}

	return slices.SortedFunc(maps.Values(byName), func(a, b *nodeState) int {
		return cmp.Compare(a.Name, b.Name)
	})
}

func (n *nodeState) add(pod *corev1.Pod) {
	n.pods++
	for name, quantity := range requests(pod) {
		sum := n.requested[name]
		sum.Add(quantity)
		n.requested[name] = sum
	}
}

// wishes are what a pod wants of its node itself.
type wishes struct {
	pod      *corev1.Pod
	requests corev1.ResourceList
	affinity nodeaffinity.RequiredNodeAffinity
}

func wishesOf(pod *corev1.Pod) wishes {
	return wishes{pod, requests(pod), nodeaffinity.GetRequiredNodeAffinity(pod)}
}

// refuses returns the node's own reasons to refuse a pod. byDRA says of a resource that claims of
// the pod serve it.
func (n *nodeState) refuses(w wishes, byDRA func(corev1.ResourceName) bool) []Reason {
	var reasons []Reason
	tolerations := w.pod.Spec.Tolerations
	unschedulable := corev1.Taint{
		Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule,
	}
	if n.Spec.Unschedulable &&
		!schedulingcorev1.TolerationsTolerateTaint(klog.Background(), tolerations,
			&unschedulable, false) {
		reasons = append(reasons,
			Reason{Code: NodeUnschedulable,
				Message: "the node is cordoned: spec.unschedulable is set"})
	}

	if taint, untolerated := schedulingcorev1.FindMatchingUntoleratedTaint(klog.Background(),
		n.Spec.Taints, tolerations, keepsAway, false); untolerated {
		reasons = append(reasons, Reason{Code: NodeTainted,
			Message: "the node has the taint " + taint.ToString() +
				", which the pod does not tolerate"})
	}

	if matches, err := w.affinity.Match(n.Node); err != nil || !matches {
		reasons = append(reasons, Reason{Code: NodeSelector,
			Message: "the node's labels do not match the pod's nodeSelector or node affinity"})
	}

	return append(reasons, n.short(w.requests, byDRA)...)
}

func keepsAway(taint *corev1.Taint) bool {
	return taint.Effect == corev1.TaintEffectNoSchedule ||
		taint.Effect == corev1.TaintEffectNoExecute
}

// short returns which resources the node has too little of. A node that tells nothing of what it
// has, as in a file without status, has enough of what Kubernetes itself counts.
func (n *nodeState) short(
	requests corev1.ResourceList, byDRA func(corev1.ResourceName) bool,
) []Reason {
	var reasons []Reason
	silent := len(n.Status.Allocatable) == 0
	if most := n.Status.Allocatable.Pods().Value(); !silent && n.pods >= most {
		reasons = append(reasons,
			Reason{Code: NodeResources, Message: "the node has as many pods as it may"})
	}

	for _, name := range slices.Sorted(maps.Keys(requests)) {
		asked := requests[name]
		if asked.IsZero() || silent && !isExtended(name) || byDRA(name) {
			continue
		}

		left := n.Status.Allocatable[name].DeepCopy()
		left.Sub(n.requested[name])

		if asked.Cmp(left) > 0 {
			reasons = append(reasons, Reason{Code: NodeResources, Message: fmt.Sprintf(
				"the node is short of %s: %s requested, %s left", name, asked.String(),
				left.String())})
		}
	}

	return reasons
}
