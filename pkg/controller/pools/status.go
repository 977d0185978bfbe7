// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// poolEntry is a pool's entry in the XPUNode of a node.
type poolEntry struct {
	node string
	away bool // whether the agent that wrote it is away, so that it is old
	v1alpha1.XPUNodePool
}

func (e poolEntry) equal(other poolEntry) bool {
	return e.node == other.node && e.away == other.away &&
		equality.Semantic.DeepEqual(e.XPUNodePool, other.XPUNodePool)
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
	var wrong, problems, overlaps, away []string
	for _, e := range entries {
		generation = min(generation, e.ObservedGeneration)
		status.Functions += e.Functions
		if e.away {
			away = append(away, e.node)
			problems = append(problems, fmt.Sprintf("node %s: no xpu-agent runs there", e.node))
		} else {
			status.Healthy += e.Healthy
		}
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
		message = noFunctions(pool.Spec)
	case len(away) == len(entries):
		reason = v1alpha1.ReasonAgentAway
	case status.Healthy == 0:
		reason = v1alpha1.ReasonUnhealthy
	case pool.Spec.Model == v1alpha1.ModelPorts && lacks(entries, v1alpha1.FeatureSharedCapacity):
		reason = v1alpha1.ReasonFeatureMissing
		message += "; see condition " + v1alpha1.ConditionSupported
	}

	meta.SetStatusCondition(&status.Conditions,
		reconciling.NewCondition(v1alpha1.ConditionReady, generation, reason, opi.Short(message)))
}

// noFunctions says that no node has a Function for the pool, and where to look.
func noFunctions(spec v1alpha1.DevicePoolSpec) string {
	if len(spec.NodeSelector) == 0 {
		return "no node has a Function that a selector matches; compare spec.selectors with the " +
			"nodes' Functions"
	}

	wanted := labels.SelectorFromSet(spec.NodeSelector)
	return fmt.Sprintf("no node with the labels %s of spec.nodeSelector has a Function that a selector "+
		"matches; see whether there are such nodes, by kubectl get nodes -l %[1]s", wanted)
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
		reconciling.NewCondition(v1alpha1.ConditionSupported, pool.Generation, reason,
			opi.Short(message)))
}

// needsFeatures reports whether a pool needs more than Kubernetes 1.34 does by default.
func needsFeatures(spec v1alpha1.DevicePoolSpec) bool {
	return spec.Publish == v1alpha1.PublishDRA &&
		(spec.MaxAllocated != nil || spec.Model != "" && spec.Model != v1alpha1.ModelFunctions ||
			spec.Provision == v1alpha1.ProvisionBeforeBind ||
			spec.Provision == v1alpha1.ProvisionAhead || spec.DataDirect || spec.ListNUMANodes ||
			spec.EvictLostAfter != nil || spec.LinkDown == v1alpha1.LinkDownNone)
}

// lacks reports whether a node found that the cluster lacks the feature.
func lacks(entries []poolEntry, feature string) bool {
	return slices.ContainsFunc(entries, func(e poolEntry) bool {
		return slices.ContainsFunc(e.Fallbacks, func(f v1alpha1.Fallback) bool {
			return f.Feature == feature
		})
	})
}

// fallbacksOf returns what the cluster cannot do according to its nodes, each once, with the first
// node that reports it.
func fallbacksOf(entries []poolEntry) (list []string) {
	seen := map[v1alpha1.Fallback]bool{}
	for _, e := range entries {
		for _, f := range e.Fallbacks {
			if !seen[f] {
				seen[f] = true
				list = append(list, fmt.Sprintf("node %s: %s%s", e.node, f.Message, remedy(f)))
			}
		}
	}

	return list
}

// remedy returns what an administrator does about a fallback, to be appended to its message. It is
// "" if the feature gate is on, because the message says then what to do.
func remedy(f v1alpha1.Fallback) string {
	if f.GateOn {
		return ""
	}
	since := "which is on by default from Kubernetes 1.36 on"
	if f.Feature == v1alpha1.FeatureLists {
		since = "which is off by default"
	}
	return fmt.Sprintf("; turn on feature gate %s in kube-apiserver and kube-scheduler, %s", f.Feature,
		since)
}

// firstOf shortens a list to mostExamples, and adds how many more there are.
func firstOf(list []string) []string {
	if len(list) <= mostExamples {
		return list
	}
	return append(list[:mostExamples:mostExamples],
		fmt.Sprintf("and %d more", len(list)-mostExamples))
}
