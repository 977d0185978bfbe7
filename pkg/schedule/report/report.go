// SPDX-License-Identifier: Apache-2.0

// Package report is the output of xpuctl schedule: JSON or YAML for programs ([Schedule]), text for
// people ([Schedule.Text]), and the objects as the scheduler leaves them ([Objects]).
package report

import (
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule"
)

// GroupVersionKind returns the type of a Schedule.
func GroupVersionKind() schema.GroupVersionKind {
	return schema.GroupVersionKind{
		Group: "xpuctl.opiproject.org", Version: "v1alpha1", Kind: "Schedule",
	}
}

// Schedule lists which nodes pods go to, which devices they get, and why some stay pending. The
// same input gives the same Schedule. Fields may be added; existing fields keep their names and
// meaning within a version.
type Schedule struct {
	metav1.TypeMeta `json:",inline"`
	// Kubernetes is the version whose scheduler is reproduced, for example 1.37.
	Kubernetes string `json:"kubernetes"`
	// UnknownKubernetes is the version that was asked for, for example v1.38.0, if it is newer than
	// this program knows. Its scheduler may decide otherwise than the one that is reproduced.
	UnknownKubernetes string `json:"unknownKubernetes,omitempty"`
	// Pods in the order in which they were scheduled.
	Pods []Pod `json:"pods"`
}

// Pod is the result for one pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Node takes the pod. It is empty if the pod stays pending.
	Node string `json:"node,omitempty"`
	// Fits is how many nodes can take the pod.
	Fits int `json:"fits"`
	// Claims of a pod that has a node.
	Claims []Claim `json:"claims,omitempty"`
	// Reasons why no node can take the pod, independent of nodes.
	Reasons []schedule.Reason `json:"reasons,omitempty"`
	// Refusals by the nodes that cannot take the pod.
	Refusals []schedule.Refusal `json:"refusals,omitempty"`
}

// Claim lists the devices that a pod gets through one claim.
type Claim struct {
	// PodClaim is the name in the pod's spec.resourceClaims. It is empty for the claim that the
	// scheduler makes for extended resources.
	PodClaim string `json:"podClaim,omitempty"`
	// Name of the ResourceClaim. A claim that a template will make has no name yet, and is called
	// POD-CLAIM here.
	Name string `json:"name"`
	// Template is the ResourceClaimTemplate that makes the claim.
	Template string `json:"template,omitempty"`
	// Shared is set if the claim was already allocated for another pod.
	Shared bool `json:"shared,omitempty"`
	// Devices in the order of the claim's requests.
	Devices []Device `json:"devices"`
}

// Device is an allocated device.
type Device struct {
	// Request of the claim, or REQUEST/SUBREQUEST.
	Request string `json:"request"`
	Driver  string `json:"driver"`
	Pool    string `json:"pool"`
	Device  string `json:"device"`
	// AdminAccess is set if the device is only observed, and may be used by others.
	AdminAccess bool `json:"adminAccess,omitempty"`
	// ConsumedCapacity of a device that several claims can share, as quantities by name.
	ConsumedCapacity map[string]string `json:"consumedCapacity,omitempty"`
	// ConsumedCounters are the amounts that the device takes of counters that it shares with other
	// devices.
	ConsumedCounters []Counter `json:"consumedCounters,omitempty"`
	// BindingConditions must be true before the pod is bound.
	BindingConditions []string `json:"bindingConditions,omitempty"`
}

// Counter is the amount that a device takes of a counter.
type Counter struct {
	CounterSet string `json:"counterSet"`
	Name       string `json:"name"`
	Value      string `json:"value"` // a quantity
}

// New returns an empty Schedule for the scheduler of a version of Kubernetes.
func New(features schedule.Features) *Schedule {
	apiVersion, kind := GroupVersionKind().ToAPIVersionAndKind()
	return &Schedule{TypeMeta: metav1.TypeMeta{APIVersion: apiVersion, Kind: kind},
		Kubernetes: features.Kubernetes, UnknownKubernetes: features.Unknown, Pods: []Pod{}}
}

// Add adds a decision.
func (s *Schedule) Add(decision *schedule.Decision) {
	s.Pods = append(s.Pods, newPod(decision))
}

func newPod(decision *schedule.Decision) Pod {
	pod := Pod{
		Namespace: decision.Pod.Namespace, Name: decision.Pod.Name, Node: decision.Node,
		Fits:    decision.Fits,
		Reasons: decision.Reasons, Refusals: decision.Refusals,
	}

	for _, c := range decision.Claims {
		pod.Claims = append(pod.Claims, newClaim(c))
	}

	return pod
}

// Pending returns the pods that no node takes.
func (s *Schedule) Pending() []Pod {
	var pending []Pod
	for _, pod := range s.Pods {
		if pod.Node == "" {
			pending = append(pending, pod)
		}
	}
	return pending
}

func newClaim(decision schedule.ClaimDecision) Claim {
	claim := Claim{PodClaim: decision.PodClaim, Name: decision.Claim.Name,
		Template: decision.Template, Shared: !decision.New, Devices: []Device{}}
	for i, result := range decision.Claim.Status.Allocation.Devices.Results {
		claim.Devices = append(claim.Devices, newDevice(result, decision.Uses[i]))
	}
	return claim
}

func newDevice(result resourceapi.DeviceRequestAllocationResult, use schedule.Use) Device {
	device := Device{
		Request: result.Request, Driver: result.Driver, Pool: result.Pool, Device: result.Device,
		AdminAccess:       ptr.Deref(result.AdminAccess, false),
		BindingConditions: result.BindingConditions,
	}

	for name, quantity := range result.ConsumedCapacity {
		if device.ConsumedCapacity == nil {
			device.ConsumedCapacity = map[string]string{}
		}
		device.ConsumedCapacity[string(name)] = quantity.String()
	}

	if !device.AdminAccess {
		for _, c := range use.Counters {
			device.ConsumedCounters = append(device.ConsumedCounters,
				Counter{c.Set, c.Name, c.Value.String()})
		}
	}

	return device
}
