package controller

import (
	"cmp"
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// labelVirtualMachine is on every pod that KubeVirt makes for a VirtualMachineInstance, whose UID is its value: CreatedByLabel of
// kubevirt.io/api. During a live migration two pods have the same.
const labelVirtualMachine = "kubevirt.io/created-by"

// standBy returns a *problem with the reason Standby if the Port's MAC address is that of another Port of the network, and both are of
// pods of one virtual machine: it is being migrated. The Port is promised the address book's entries of the other one, which its
// status shows.
func (r *admission) standBy(ctx context.Context, port *v1alpha1.XPUPort) error {
	holder := r.allocator.holder(port)
	if port.Spec.Pod == nil || holder == (types.NamespacedName{}) {
		return nil
	}
	var predecessor v1alpha1.XPUPort
	err := r.client.Get(ctx, holder, &predecessor)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return fmt.Errorf("XPUPort %s: %w", holder, err)
	case err != nil && port.Status.Predecessor == holder.String():
		return &problem{retry: firstRetry} // the allocator is about to hear that it has gone
	case err != nil || predecessor.Spec.Pod == nil:
		return nil
	}
	if port.Status.Predecessor != holder.String() {
		same, err := r.sameVirtualMachine(ctx, port, &predecessor)
		if err != nil || !same {
			return err
		}
	}
	if !r.allocator.promise(port, holder) {
		return &problem{retry: firstRetry}
	}
	port.Status.Predecessor = holder.String()
	port.Status.MTU, port.Status.Addresses = predecessor.Status.MTU, predecessor.Status.Addresses
	p := problemf(v1alpha1.ReasonStandby, "pod %s of the same virtual machine has MAC address %s and XPUPort %s; this Port takes its place, "+
		"with the same addresses, once that pod has ended", predecessor.Spec.Pod.Name, port.Spec.MAC, holder)
	p.retry = lastRetry
	return p
}

// sameVirtualMachine says whether KubeVirt made the pods of both Ports for one virtual machine. Pods of two namespaces never are: who
// may make pods in one must not get the addresses of the other.
func (r *admission) sameVirtualMachine(ctx context.Context, a, b *v1alpha1.XPUPort) (bool, error) {
	if a.Spec.Pod.Namespace != b.Spec.Pod.Namespace || a.Spec.Pod.Name == b.Spec.Pod.Name {
		return false, nil
	}
	of, err := r.virtualMachineOf(ctx, a)
	if err != nil || of == "" {
		return false, err
	}
	other, err := r.virtualMachineOf(ctx, b)
	return of == other, err
}

// virtualMachineOf is the UID of the VirtualMachineInstance that the Port's pod was made for; "" for other pods, and for one that is
// not on the Port's node, as a node names the pods of its Ports.
func (r *admission) virtualMachineOf(ctx context.Context, port *v1alpha1.XPUPort) (string, error) {
	ref := port.Spec.Pod
	var pod corev1.Pod
	err := r.live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &pod)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("pod %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	if err != nil || pod.UID != cmp.Or(ref.UID, pod.UID) || pod.Spec.NodeName != port.Spec.NodeName {
		return "", nil
	}
	return pod.Labels[labelVirtualMachine], nil
}

// successors are the Ports that stand by for a Port.
func (r *base) successors(ctx context.Context, o client.Object) []reconcile.Request {
	gone := o.(*v1alpha1.XPUPort)
	same, err := listPorts(ctx, r.client, client.MatchingFields{portsByMAC: portKeys[portsByMAC](gone)})
	if err != nil {
		return nil // the cache is not running
	}
	var requests []reconcile.Request
	for i := range same {
		if same[i].Status.Predecessor == requestFor(gone).String() {
			requests = append(requests, requestFor(&same[i]))
		}
	}
	return requests
}
