// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// virtualMachine is the kind that controls KubeVirt's pods (kubevirt.io/api/core/v1). During a live
// migration a VirtualMachineInstance has two pods.
var virtualMachine = schema.GroupKind{Group: "kubevirt.io", Kind: "VirtualMachineInstance"}

// ownsMAC reports whether no other Port of the network has the Port's MAC address. Otherwise it
// returns a refusal. The reason is Standby if the pods of both Ports belong to one virtual machine,
// which is being migrated. The Port then becomes the successor of the other Port, and its status
// has the same addresses. Without a refusal, an event will come that decides.
func (r *admissions) ownsMAC(
	ctx context.Context, port *v1alpha1.XPUPort,
) (owns bool, err error) {
	holder, predecessor, err := r.Allocator.Holder(ctx, port)
	if err != nil || holder == (types.NamespacedName{}) {
		return err == nil, err
	}

	conflict := addresses.Conflict(port, holder, port.Spec.Network)
	if predecessor == nil { // no event comes if it is never created
		return false, reconciling.RetryAfter(conflict, addressRetry)
	}

	if port.Status.Predecessor != holder.String() {
		if err := r.mayStandBy(ctx, port, predecessor, conflict); err != nil {
			return false, err
		}
	}
	if made, err := r.Allocator.MakeStandby(ctx, port, holder); !made {
		return false, err
	}

	port.Status.Predecessor = holder.String()
	port.Status.MTU, port.Status.Addresses = predecessor.Status.MTU, predecessor.Status.Addresses
	return false, reconciling.Refuse(v1alpha1.ReasonStandby,
		"pod %s of the same virtual machine has MAC address %s and XPUPort %s; this Port takes "+
			"its place, with the same addresses, once that pod has ended",
		predecessor.Spec.Pod.Name, port.Spec.MAC, holder)
}

// mayStandBy returns conflict if the Port must not replace the other one. It returns another
// refusal if the Port's xPU cannot serve it, because the virtual machine would move to a node
// where it cannot be reached.
func (r *admissions) mayStandBy(
	ctx context.Context, port, predecessor *v1alpha1.XPUPort, conflict error,
) error {
	if !sameAddresses(port, predecessor) {
		return conflict
	}

	same, err := r.sameVirtualMachine(ctx, port, predecessor)
	if err != nil {
		return err
	}
	if !same {
		return conflict
	}

	var xpu v1alpha1.XPU
	if err := r.Client.Get(ctx, client.ObjectKey{Name: port.Spec.XPU},
		&xpu); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPU %s: %w", port.Spec.XPU, err)
	}

	if ready := v1alpha1.ReadyOf(xpu.Status.Conditions); ready.Status != metav1.ConditionTrue {
		err := reconciling.Refuse(v1alpha1.ReasonXPUUnavailable,
			"XPU %s cannot serve the virtual machine: %s: %s", port.Spec.XPU,
			cmp.Or(ready.Reason, v1alpha1.ReasonNoXPU),
			cmp.Or(ready.Message, "nothing is known of it"))
		return reconciling.RetryAfter(err, addressRetry) // events of XPUs do not come here
	}

	return nil
}

// sameAddresses reports whether the predecessor's addresses are those that the Port asks for.
func sameAddresses(port, predecessor *v1alpha1.XPUPort) bool {
	if port.Spec.AssignAddresses != predecessor.Spec.AssignAddresses {
		return false
	}
	return port.Spec.AssignAddresses && len(port.Spec.Addresses) == 0 ||
		slices.Equal(port.Spec.Addresses, predecessor.Status.Addresses)
}

// sameVirtualMachine reports whether KubeVirt created the pods of both Ports for one virtual
// machine. Pods of two namespaces never belong together, because a user of one namespace must not
// get the addresses of the other.
func (r *admissions) sameVirtualMachine(ctx context.Context, a, b *v1alpha1.XPUPort) (bool, error) {
	if a.Spec.Pod == nil || b.Spec.Pod == nil || a.Spec.Pod.Namespace != b.Spec.Pod.Namespace ||
		a.Spec.Pod.Name == b.Spec.Pod.Name {
		return false, nil
	}

	of, err := r.virtualMachineOf(ctx, a)
	if err != nil || of == "" {
		return false, err
	}

	other, err := r.virtualMachineOf(ctx, b)
	return of == other, err
}

// virtualMachineOf returns the UID of the VirtualMachineInstance that controls the Port's pod. It
// is "" for other pods, and for a pod that is not on the Port's node. The owner proves it, because
// a node may name any pod in its Ports and create mirror pods with any label, but only its Node can
// own them.
func (r *admissions) virtualMachineOf(
	ctx context.Context, port *v1alpha1.XPUPort,
) (types.UID, error) {
	ref := port.Spec.Pod
	var pod corev1.Pod
	err := r.Live.Get(ctx, client.ObjectKey{Namespace: ref.Namespace, Name: ref.Name}, &pod)
	if client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("pod %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	if err != nil || pod.UID != cmp.Or(ref.UID, pod.UID) ||
		pod.Spec.NodeName != port.Spec.NodeName {
		return "", nil
	}

	owner := metav1.GetControllerOf(&pod)
	if owner == nil ||
		schema.FromAPIVersionAndKind(owner.APIVersion, owner.Kind).GroupKind() != virtualMachine {
		return "", nil
	}

	return owner.UID, nil
}
