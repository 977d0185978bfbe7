// SPDX-License-Identifier: Apache-2.0

package dashboardtest

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Namespace has the programs of the project.
const Namespace = "xpu-system"

// start is the time at which the objects were made.
var start = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// Start returns the time at which the objects of [Objects] were made.
func Start() time.Time { return start }

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name + "-uid"),
		CreationTimestamp: metav1.NewTime(start)}
}

func ready(status metav1.ConditionStatus, reason, message string) []metav1.Condition {
	return []metav1.Condition{{Type: v1alpha1.ConditionReady, Status: status, Reason: reason,
		Message: message, LastTransitionTime: metav1.NewTime(start)}}
}

// VF returns the address of a VF of the one PF of each node.
func VF(i int) pci.Address {
	id := 8 + i
	return pci.Address(fmt.Sprintf("0000:3b:%02x.%d", id>>3, id&7))
}

const pf pci.Address = "0000:3b:00.0"

// Objects returns the objects of a cluster with nodes "node1" and so on that have VFs of pool
// "fast". Every fourth VF has a pod in network "blue" of namespace "shop". On each seventh node the
// first VF has a fault, and the last VF is in no pool.
func Objects(nodes, vfs int) []client.Object {
	objects := declarations(nodes, vfs)
	for n := 1; n <= nodes; n++ {
		node := fmt.Sprintf("node%d", n)
		objects = append(objects, xpuNode(node, vfs), slice(node, vfs, n%7 == 0), agentPod(node))
		for vf := 1; vf < vfs-1; vf += 4 {
			objects = append(objects, podWithClaim(node, vf)...)
		}
	}
	return objects
}

func declarations(nodes, vfs int) []client.Object {
	desired := int32(nodes)
	pool := &v1alpha1.DevicePool{ObjectMeta: named("", "fast"),
		Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA, Network: "blue",
			Provision: v1alpha1.ProvisionOnPrepare},
		Status: v1alpha1.DevicePoolStatus{NodeCount: desired,
			Functions: desired * int32(vfs-1), Healthy: desired * int32(vfs-1),
			Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonPublished, "published")}}
	blue := &v1alpha1.XPUNetwork{ObjectMeta: named("", "blue"),
		Spec: v1alpha1.XPUNetworkSpec{VLAN: 10, Subnets: []string{"10.10.0.0/16"}},
		Status: v1alpha1.XPUNetworkStatus{XPUs: 1, ReadyXPUs: 1,
			Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonUp, "up")}}
	xpu := &v1alpha1.XPU{ObjectMeta: named("", "xpu-1"),
		Spec: v1alpha1.XPUSpec{Endpoint: "10.77.0.101:50151"}}
	xpu.Status.Conditions = ready(metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable,
		"10.77.0.101:50151 refuses connections")

	agents := &appsv1.DaemonSet{ObjectMeta: named(Namespace, "xpu-agent"),
		Status: appsv1.DaemonSetStatus{DesiredNumberScheduled: desired, NumberReady: desired,
			UpdatedNumberScheduled: desired}}
	controller := &appsv1.Deployment{ObjectMeta: named(Namespace, "xpu-controller"),
		Spec:   appsv1.DeploymentSpec{Replicas: ptr.To[int32](2)},
		Status: appsv1.DeploymentStatus{Replicas: 2, ReadyReplicas: 2, UpdatedReplicas: 2}}
	lease := &coordinationv1.Lease{ObjectMeta: named(Namespace, "xpu-controller"),
		Spec: coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: start}}}
	return []client.Object{pool, blue, xpu, agents, controller, lease}
}

func xpuNode(name string, vfs int) client.Object {
	return &v1alpha1.XPUNode{ObjectMeta: named("", name), Status: v1alpha1.XPUNodeStatus{
		Agent: &v1alpha1.XPUNodeAgent{Version: "v0.1.0"}, Functions: int32(vfs + 1),
		PFs: []v1alpha1.XPUNodePF{{Address: string(pf), Name: "ens1f0", Driver: "mlx5_core",
			VFs: int32(vfs), TotalVFs: int32(vfs), VFOffset: 8, VFStride: 1}},
		Conditions: []metav1.Condition{{Type: v1alpha1.ConditionAgentReady,
			Status: metav1.ConditionTrue, Reason: "Running"}},
	}}
}

// slice returns the devices of a node, which are all VFs but the last.
func slice(node string, vfs int, hasFault bool) client.Object {
	s := &resourceapi.ResourceSlice{ObjectMeta: named("", node+"-slice"),
		Spec: resourceapi.ResourceSliceSpec{Driver: v1alpha1.GroupName, NodeName: &node,
			Pool: resourceapi.ResourcePool{
				Name: claim.PoolID{Node: node, PF: pf, DevicePool: "fast"}.String()}}}
	for i := range vfs - 1 {
		s.Spec.Devices = append(s.Spec.Devices,
			resourceapi.Device{Name: function.ID{Address: VF(i)}.DeviceName()})
	}
	if hasFault {
		s.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: v1alpha1.TaintFault,
			Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	return s
}

func agentPod(node string) client.Object {
	pod := &corev1.Pod{ObjectMeta: named(Namespace, "xpu-agent-"+node),
		Spec: corev1.PodSpec{NodeName: node}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	pod.Labels = map[string]string{"app.kubernetes.io/name": "xpu-agent"}
	return pod
}

// podWithClaim returns a pod that has a VF of a node, with its claim and XPUPort.
func podWithClaim(node string, vf int) []client.Object {
	name := fmt.Sprintf("web-%s-%d", node, vf)
	id := function.ID{Address: VF(vf)}
	pod := &corev1.Pod{ObjectMeta: named("shop", name),
		Spec: corev1.PodSpec{NodeName: node, ResourceClaims: []corev1.PodResourceClaim{
			{Name: "nic", ResourceClaimName: &name}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{
			{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}}

	c := &resourceapi.ResourceClaim{ObjectMeta: named("shop", name)}
	c.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "nic",
				Driver: v1alpha1.GroupName, Device: id.DeviceName(),
				Pool: claim.PoolID{Node: node, PF: pf, DevicePool: "fast"}.String()}}}}

	port := claim.NewPort("shop", id, "fast", v1alpha1.XPUPortSpec{NodeName: node, XPU: "xpu-1",
		Network: "blue", MAC: "02:00:00:00:00:01",
		Claim: v1alpha1.ClaimRef{Name: name, UID: c.UID, Request: "nic"}})
	port.Status = v1alpha1.XPUPortStatus{Addresses: []string{"10.10.0.2/16"},
		Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonUp, "up")}
	return []client.Object{pod, c, port}
}

// Pending returns a pod whose claim no node can satisfy.
func Pending(name, message string) []client.Object {
	pod := &corev1.Pod{ObjectMeta: named("shop", name),
		Spec: corev1.PodSpec{ResourceClaims: []corev1.PodResourceClaim{
			{Name: "nic", ResourceClaimName: &name}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: "Unschedulable",
				Message: message}}}}
	return []client.Object{pod, &resourceapi.ResourceClaim{ObjectMeta: named("shop", name)}}
}
