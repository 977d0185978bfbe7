// SPDX-License-Identifier: Apache-2.0

package dashboard

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect/explain"
)

// Pod is a pod that has a Function or asks for one. What it says is a summary. Package explain says
// what is wrong with one pod.
type Pod struct {
	Namespace  string         `json:"namespace"`
	Name       string         `json:"name"`
	Node       string         `json:"node,omitempty"`
	Status     explain.Status `json:"status"`
	Text       string         `json:"text,omitempty"` // what the pod waits for, or what is wrong
	Interfaces []Interface    `json:"interfaces"`
}

// Interface is a Function that a pod has, or is to have.
type Interface struct {
	Claim     string   `json:"claim,omitempty"`
	Resource  string   `json:"resource,omitempty"` // extended resource, if there is no claim
	Function  string   `json:"function,omitempty"`
	Pool      string   `json:"pool,omitempty"`
	Networks  []string `json:"networks,omitempty"`
	XPU       string   `json:"xpu,omitempty"`
	Addresses []string `json:"addresses,omitempty"`
}

// podFacts are what pods are judged by.
type podFacts struct {
	claims      map[types.NamespacedName]*resourceapi.ResourceClaim
	claimsKnown bool
	byClaim     map[types.UID][]*v1alpha1.XPUPort
	byPod       map[types.NamespacedName][]*v1alpha1.XPUPort
	// offered are the extended resources of DevicePools.
	offered map[string]bool
	// given are the interfaces of pods without XPUPorts, as agents report them, by the pod's UID.
	given map[types.UID][]Interface
}

func newPodFacts(all *objects) *podFacts {
	f := &podFacts{
		claims:      map[types.NamespacedName]*resourceapi.ResourceClaim{},
		claimsKnown: all.claimsErr == nil,
		byClaim:     map[types.UID][]*v1alpha1.XPUPort{},
		byPod:       map[types.NamespacedName][]*v1alpha1.XPUPort{},
		offered:     map[string]bool{},
	}

	for i := range all.claims.Items {
		c := &all.claims.Items[i]
		f.claims[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = c
	}

	for i := range all.ports.Items {
		p := &all.ports.Items[i]
		if p.Spec.Claim.UID != "" {
			f.byClaim[p.Spec.Claim.UID] = append(f.byClaim[p.Spec.Claim.UID], p)
		}
		if p.Spec.Pod != nil {
			key := types.NamespacedName{Namespace: p.Spec.Pod.Namespace, Name: p.Spec.Pod.Name}
			f.byPod[key] = append(f.byPod[key], p)
		}
	}

	for i := range all.pools.Items {
		if p := &all.pools.Items[i]; p.Spec.Publish == v1alpha1.PublishDevicePlugin {
			f.offered[resourceOf(p)] = true
		}
	}
	return f
}

// resourceOf returns the extended resource of a pool of the device plugin.
func resourceOf(p *v1alpha1.DevicePool) string {
	var spec v1alpha1.DevicePluginSpec
	if p.Spec.DevicePlugin != nil {
		spec = *p.Spec.DevicePlugin
	}
	return cmp.Or(spec.ResourcePrefix, v1alpha1.GroupName) + "/" + cmp.Or(spec.ResourceName, p.Name)
}

// extendedResources returns the names of resources that are not Kubernetes' own.
func extendedResources(pod *corev1.Pod) []string {
	var names []string
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for resource := range c.Resources.Limits {
			prefix, _, isExtended := strings.Cut(string(resource), "/")
			if isExtended && !strings.HasSuffix(prefix, "kubernetes.io") {
				names = append(names, string(resource))
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// judgement collects what is found about a pod.
type judgement struct {
	pod                     *corev1.Pod
	interfaces              []Interface
	failed, waits, unknowns []string
}

// judge returns the summary of a pod, or nil if the pod asks for no Function.
func (f *podFacts) judge(pod *corev1.Pod) *Pod {
	j := &judgement{pod: pod, interfaces: []Interface{}}
	f.addClaims(j)
	f.addResources(j)
	if len(j.interfaces) == 0 && len(j.unknowns) == 0 {
		return nil
	}

	out := &Pod{Namespace: pod.Namespace, Name: pod.Name, Node: pod.Spec.NodeName,
		Interfaces: j.interfaces}
	out.Status, out.Text = j.summary()
	return out
}

func (j *judgement) summary() (explain.Status, string) {
	ended := j.pod.Status.Phase == corev1.PodSucceeded || j.pod.Status.Phase == corev1.PodFailed
	switch {
	case j.pod.DeletionTimestamp != nil:
		return explain.Skipped, "the pod is ending"
	case ended:
		return explain.Skipped, "the pod has ended"
	}

	j.containers()
	switch {
	case len(j.failed) > 0:
		return explain.Failed, strings.Join(j.failed, "; ")
	case len(j.unknowns) > 0:
		return explain.Unknown, strings.Join(j.unknowns, "; ")
	case len(j.waits) > 0:
		return explain.Waiting, strings.Join(j.waits, "; ")
	}

	if c := podCondition(j.pod, corev1.PodReady); c == nil || c.Status != corev1.ConditionTrue {
		return explain.Waiting, "the containers have not all started yet"
	}
	return explain.Done, ""
}

// containers notes what containers wait for.
func (j *judgement) containers() {
	for _, c := range slices.Concat(j.pod.Status.InitContainerStatuses,
		j.pod.Status.ContainerStatuses) {
		waiting := c.State.Waiting
		if waiting == nil || waiting.Reason == "" {
			continue
		}

		text := strings.TrimSuffix(fmt.Sprintf("container %s: %s: %s", c.Name, waiting.Reason,
			waiting.Message), ": ")
		if waiting.Reason == "ContainerCreating" || waiting.Reason == "PodInitializing" {
			j.waits = append(j.waits, text)
		} else {
			j.failed = append(j.failed, text)
		}
	}
}

func (f *podFacts) addClaims(j *judgement) {
	pod := j.pod
	for i := range pod.Spec.ResourceClaims {
		wanted := &pod.Spec.ResourceClaims[i]
		name, _, err := resourceclaim.Name(pod, wanted)
		switch {
		case !f.claimsKnown:
			j.unknowns = append(j.unknowns, "ResourceClaims cannot be read")
		case err != nil:
			j.interfaces = append(j.interfaces, Interface{Claim: wanted.Name})
			j.waits = append(j.waits, "the ResourceClaim "+wanted.Name+" has not been made yet")
		case name != nil:
			f.addClaim(j, *name)
		}
	}

	if made := pod.Status.ExtendedResourceClaimStatus; made != nil && f.claimsKnown {
		f.addClaim(j, made.ResourceClaimName)
	}
}

func (f *podFacts) addClaim(j *judgement, name string) {
	c := f.claims[types.NamespacedName{Namespace: j.pod.Namespace, Name: name}]
	switch {
	case c == nil:
		j.interfaces = append(j.interfaces, Interface{Claim: name})
		j.failed = append(j.failed, "ResourceClaim "+name+" does not exist: create it")
		return
	case c.Status.Allocation == nil:
		j.interfaces = append(j.interfaces, Interface{Claim: name})
		if p := podCondition(j.pod, corev1.PodScheduled); p != nil &&
			p.Status == corev1.ConditionFalse {
			j.failed = append(j.failed, "claim "+name+" is not Allocated: "+p.Message)
		} else {
			j.waits = append(j.waits, "claim "+name+" is not Allocated yet")
		}
		return
	}

	devices, err := claim.Devices(c)
	if err != nil {
		j.interfaces = append(j.interfaces, Interface{Claim: name})
		j.failed = append(j.failed, err.Error())
		return
	}
	for _, device := range devices {
		f.addDevice(j, c, device)
	}
}

func (f *podFacts) addDevice(
	j *judgement, c *resourceapi.ResourceClaim, device claim.Device,
) {
	i := Interface{Claim: c.Name, Pool: device.ID.DevicePool}
	if device.Function != (function.ID{}) {
		i.Function = device.Function.String()
	}
	if device.ConfigErr != nil {
		j.failed = append(j.failed, device.ConfigErr.Error())
	}

	for _, port := range f.byClaim[c.UID] {
		if claim.FunctionOf(port.Spec.Function) == device.Function {
			j.addPort(&i, port)
		}
	}

	for _, status := range c.Status.Devices {
		if status.Driver != v1alpha1.GroupName || status.Pool != device.Pool ||
			status.Device != device.Name {
			continue
		}
		if status.NetworkData != nil && len(i.Addresses) == 0 {
			i.Addresses = status.NetworkData.IPs
		}
		for _, condition := range status.Conditions {
			if condition.Type == v1alpha1.ConditionReady &&
				condition.Status == metav1.ConditionFalse {
				j.failed = append(j.failed, condition.Reason+": "+condition.Message)
			}
		}
	}
	j.interfaces = append(j.interfaces, i)
}

// addPort adds the xPU's side of an interface.
func (j *judgement) addPort(i *Interface, port *v1alpha1.XPUPort) {
	i.Networks, i.XPU = port.Spec.AllNetworks(), port.Spec.XPU
	i.Addresses = slices.Clone(port.Status.Addresses)
	for _, network := range port.Status.Networks {
		i.Addresses = append(i.Addresses, network.Addresses...)
	}

	c := v1alpha1.ReadyOf(port.Status.Conditions)
	text := strings.TrimSuffix("XPUPort "+port.Name+": "+
		cmp.Or(c.Reason, "not looked at yet")+": "+c.Message, ": ")
	switch {
	case c.Status == metav1.ConditionTrue, c.Reason == v1alpha1.ReasonStandby:
	case v1alpha1.Refused(c.Reason):
		j.failed = append(j.failed, text)
	default:
		j.waits = append(j.waits, text)
	}
}

// addResources adds the interfaces for extended resources.
func (f *podFacts) addResources(j *judgement) {
	key := types.NamespacedName{Namespace: j.pod.Namespace, Name: j.pod.Name}
	ports := slices.DeleteFunc(slices.Clone(f.byPod[key]), func(p *v1alpha1.XPUPort) bool {
		return p.Spec.Pod.UID != "" && p.Spec.Pod.UID != j.pod.UID
	})
	given := f.given[j.pod.UID]

	for _, name := range extendedResources(j.pod) {
		prefix, _, _ := strings.Cut(name, "/")
		isGiven := slices.ContainsFunc(given, func(i Interface) bool { return i.Resource == name })
		if prefix == v1alpha1.GroupName && j.pod.Status.ExtendedResourceClaimStatus == nil ||
			f.offered[name] {
			f.addResource(j, name, ports, isGiven)
		}
	}
	j.interfaces = append(j.interfaces, given...)
}

func (f *podFacts) addResource(
	j *judgement, name string, ports []*v1alpha1.XPUPort, isGiven bool,
) {
	if isGiven {
		return
	}

	for _, port := range ports {
		i := Interface{Resource: name, Pool: port.Labels[v1alpha1.LabelPool],
			Function: claim.FunctionOf(port.Spec.Function).String()}
		j.addPort(&i, port)
		j.interfaces = append(j.interfaces, i)
	}
	if len(ports) > 0 {
		return
	}

	// Only the kubelet and the agent know the Function.
	j.interfaces = append(j.interfaces, Interface{Resource: name})
	if p := podCondition(j.pod, corev1.PodScheduled); p != nil && p.Status == corev1.ConditionFalse {
		j.failed = append(j.failed, p.Message)
	}
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == kind
	})
	if i < 0 {
		return nil
	}
	return &pod.Status.Conditions[i]
}
