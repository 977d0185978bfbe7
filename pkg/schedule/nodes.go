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

// nodeState is a node and the sum of its pods' requests.
type nodeState struct {
	*corev1.Node
	requested corev1.ResourceList
	pods      int64
}

// newNodeStates returns the nodes, sorted by name.
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

// nodeRequirements are what a pod requires of its node, apart from claims.
type nodeRequirements struct {
	pod      *corev1.Pod
	requests corev1.ResourceList
	affinity nodeaffinity.RequiredNodeAffinity
}

func nodeRequirementsOf(pod *corev1.Pod) nodeRequirements {
	return nodeRequirements{pod, requests(pod), nodeaffinity.GetRequiredNodeAffinity(pod)}
}

// rejectReasons returns why the node cannot take a pod, apart from claims. byDRA reports whether
// claims of the pod serve a resource.
func (n *nodeState) rejectReasons(
	req nodeRequirements, byDRA func(corev1.ResourceName) bool,
) []Reason {
	var reasons []Reason
	tolerations := req.pod.Spec.Tolerations
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
		n.Spec.Taints, tolerations, blocks, false); untolerated {
		reasons = append(reasons, Reason{Code: NodeTainted,
			Message: "the node has the taint " + taint.ToString() +
				", which the pod does not tolerate"})
	}

	if matches, err := req.affinity.Match(n.Node); err != nil || !matches {
		reasons = append(reasons, Reason{Code: NodeSelector,
			Message: "the node's labels do not match the pod's nodeSelector or node affinity"})
	}

	return append(reasons, n.insufficient(req.requests, byDRA)...)
}

func blocks(taint *corev1.Taint) bool {
	return taint.Effect == corev1.TaintEffectNoSchedule ||
		taint.Effect == corev1.TaintEffectNoExecute
}

// insufficient returns the resources that the node has too little of. A node without allocatable
// resources, as in a file without status, has enough of the resources that Kubernetes itself
// defines.
func (n *nodeState) insufficient(
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
