// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Decision says which node a pod goes to and which devices it gets, or why no node takes it.
type Decision struct {
	Pod      *corev1.Pod
	Node     string          // "" if no node takes the pod
	Score    int64           // of the node, for alternatives in requests; higher is better
	Claims   []ClaimDecision // set if the pod has a node
	Fits     int             // how many nodes can take the pod
	Reasons  []Reason        // why no node can take the pod, for reasons independent of nodes
	Refusals []Refusal       // by the nodes that cannot take the pod
}

// ClaimDecision says which devices a pod gets through one claim.
type ClaimDecision struct {
	// name in the pod's spec.resourceClaims; "" for extended resources
	PodClaim string
	// ResourceClaimTemplate that makes the claim; "" if the claim exists
	Template string
	Claim    *resourceapi.ResourceClaim // with its allocation for the pod
	New      bool                       // the claim is allocated for this pod
	Uses     []Use                      // in the order of the allocation's results
}

// Use is the share of common resources that a device in use takes.
type Use struct {
	Counters []CounterUse
}

// CounterUse is the amount that a device takes of a counter that it shares with other devices of
// its pool.
type CounterUse struct {
	Set, Name string
	Value     resource.Quantity
}

// Refusal says why nodes cannot take a pod. The nodes are sorted, and all have the same reasons.
type Refusal struct {
	Nodes   []string `json:"nodes"`
	Reasons []Reason `json:"reasons"`
}

// Code identifies the kind of a reason. Codes do not change between releases.
type Code string

// Codes for a pod, independent of nodes.
const (
	PodGated        Code = "PodGated"        // the pod has scheduling gates
	ClaimMissing    Code = "ClaimMissing"    // a ResourceClaim does not exist
	ClaimDeleted    Code = "ClaimDeleted"    // a ResourceClaim is being deleted
	ClaimFull       Code = "ClaimFull"       // a ResourceClaim is used by as many pods as it may be
	TemplateMissing Code = "TemplateMissing" // a ResourceClaimTemplate does not exist
	ClassMissing    Code = "ClassMissing"    // a DeviceClass does not exist
	// An error in a claim, a class or a slice ends the attempt.
	Broken Code = "Broken"
)

// Codes for a node, independent of claims.
const (
	NodeUnschedulable Code = "NodeUnschedulable" // the node is cordoned
	// The node has a taint that the pod does not tolerate.
	NodeTainted Code = "NodeTainted"
	// the node does not match the pod's node selector or affinity
	NodeSelector Code = "NodeSelector"
	// The node has too little CPU, memory or another resource left.
	NodeResources Code = "NodeResources"
)

// Codes for claims on a node.
const (
	// The claim is allocated to devices that the node cannot reach.
	ClaimElsewhere Code = "ClaimElsewhere"
	NoDevices      Code = "NoDevices" // no ResourceSlice is for the node
	// Too few devices match a request.
	TooFewDevices Code = "TooFewDevices"
	// No choice of devices satisfies a constraint.
	ConstraintImpossible Code = "ConstraintImpossible"
	// Each request alone can be satisfied, but not all together.
	Conflict    Code = "Conflict"
	SearchEnded Code = "SearchEnded" // the allocator ran out of time
)

// Codes of the causes of [TooFewDevices].
const (
	PoolIncomplete Code = "PoolIncomplete" // ResourceSlices of the pool are missing
	PoolInvalid    Code = "PoolInvalid"    // ResourceSlices of the pool contradict each other
	Selector       Code = "Selector"       // a selector is false on devices
	InUse          Code = "InUse"          // devices are allocated to other claims
	DeviceTainted  Code = "DeviceTainted"  // devices have taints that the request does not tolerate
	CapacityShort  Code = "CapacityShort"  // devices have too little capacity left
	CountersShort  Code = "CountersShort"  // shared counters have too little left
)

// Reason says why a pod cannot run on a node, or on any node.
type Reason struct {
	Code    Code    `json:"code"`
	Claim   string  `json:"claim,omitempty"`   // name of the claim
	Request string  `json:"request,omitempty"` // name of the request, or REQUEST/SUBREQUEST
	Message string  `json:"message"`           // for people; it may change between releases
	Causes  []Cause `json:"causes,omitempty"`
}

// Cause is a part of a reason: a problem of some devices or of a pool.
type Cause struct {
	Code    Code   `json:"code"`
	Devices int    `json:"devices,omitempty"` // how many are affected
	Message string `json:"message"`
}

func (a Reason) equal(b Reason) bool {
	return a.Code == b.Code && a.Claim == b.Claim && a.Request == b.Request &&
		a.Message == b.Message && slices.Equal(a.Causes, b.Causes)
}

// refusals groups nodes that refuse for the same reasons, in the order of the nodes.
func refusals(nodes []*nodeState, answers []answer) []Refusal {
	var grouped []Refusal
	for i, a := range answers {
		if len(a.reasons) == 0 {
			continue
		}

		same := slices.IndexFunc(grouped, func(r Refusal) bool {
			return slices.EqualFunc(r.Reasons, a.reasons, Reason.equal)
		})
		if same < 0 {
			same = len(grouped)
			grouped = append(grouped, Refusal{Reasons: a.reasons})
		}

		grouped[same].Nodes = append(grouped[same].Nodes, nodes[i].Name)
	}

	return grouped
}

func gated(pod *corev1.Pod) Reason {
	var names []string
	for _, gate := range pod.Spec.SchedulingGates {
		names = append(names, gate.Name)
	}
	return Reason{
		Code: PodGated, Message: "the pod waits for whoever has to remove its scheduling gates: " +
			strings.Join(names, ", "),
	}
}

func claimMissing(pod *corev1.Pod, claim string) *Reason {
	return &Reason{Code: ClaimMissing, Claim: claim,
		Message: fmt.Sprintf("there is no ResourceClaim %s in namespace %s: create it", claim,
			pod.Namespace)}
}

func templateMissing(pod *corev1.Pod, template string) *Reason {
	return &Reason{Code: TemplateMissing,
		Message: fmt.Sprintf("there is no ResourceClaimTemplate %s in namespace %s: create it",
			template, pod.Namespace)}
}

func claimDeleted(claim *resourceapi.ResourceClaim) Reason {
	return Reason{
		Code: ClaimDeleted, Claim: claim.Name,
		Message: "the claim is being deleted: wait, then create it again",
	}
}

func claimFull(claim *resourceapi.ResourceClaim) Reason {
	return Reason{Code: ClaimFull, Claim: claim.Name,
		Message: fmt.Sprintf("the claim is reserved for %d pods, and cannot be for more",
			len(claim.Status.ReservedFor))}
}

func classMissing(claim *resourceapi.ResourceClaim, request, class string) Reason {
	return Reason{Code: ClassMissing, Claim: claim.Name, Request: request,
		Message: fmt.Sprintf("there is no DeviceClass %s: create it, or name another in the claim",
			class)}
}

func claimElsewhere(claim *resourceapi.ResourceClaim) Reason {
	var devices []string
	for _, result := range claim.Status.Allocation.Devices.Results {
		devices = append(devices, result.Driver+"/"+result.Pool+"/"+result.Device)
	}
	return Reason{Code: ClaimElsewhere, Claim: claim.Name,
		Message: "the claim has devices that other nodes have: " + some(devices)}
}

func broken(node *nodeState, err error) Reason {
	return Reason{Code: Broken, Message: fmt.Sprintf("on node %s: %v", node.Name, err)}
}

func searchEnded() Reason {
	return Reason{Code: SearchEnded,
		Message: fmt.Sprintf("the allocator found no solution within %s, which is where the "+
			"scheduler gives up: "+
			"ask for fewer devices, or for fewer of them under one constraint", searchTimeout)}
}

// some lists up to three names.
func some(names []string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
