package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
)

// annotationAllocation tells the allocations of one claim apart. It is the allocation's time stamp, RFC 3339, empty if it
// has none.
const annotationAllocation = v1alpha1.GroupName + "/allocation"

// portBuilder works out what Port an allocated device needs.
type portBuilder struct{ reader client.Reader }

// network is the name of the network that the device joins, empty if it joins none and needs no Port.
func (b portBuilder) network(ctx context.Context, device *claim.Device) (string, error) {
	if device.ConfigErr != nil {
		return "", problemf(v1alpha1.ReasonInvalidConfig, "request %s: %s", device.Request, oneLine(device.ConfigErr))
	}
	if device.Config.Network != "" {
		return device.Config.Network, nil
	}
	var pool v1alpha1.DevicePool
	err := b.reader.Get(ctx, client.ObjectKey{Name: device.ID.DevicePool}, &pool)
	if apierrors.IsNotFound(err) {
		return "", problemf(v1alpha1.ReasonNetworkNotFound, "request %s: DevicePool %s, which would name the network, does not exist; create it, or set network in the InterfaceConfig", device.Request, device.ID.DevicePool)
	}
	if err != nil {
		return "", fmt.Errorf("DevicePool %s: %w", device.ID.DevicePool, err)
	}
	return pool.Spec.Network, nil
}

// segment is the network by name, if the device may join it.
func (b portBuilder) segment(ctx context.Context, device *claim.Device, name string) (*v1alpha1.XPUNetwork, error) {
	network, err := usableNetwork(ctx, b.reader, name)
	var p *problem
	if errors.As(err, &p) {
		return nil, problemf(p.reason, "request %s: %s", device.Request, p.message)
	}
	if err != nil {
		return nil, err
	}
	if !network.DeletionTimestamp.IsZero() {
		return nil, problemf(v1alpha1.ReasonNetworkNotFound, "request %s: XPUNetwork %s is being deleted; name another one in the InterfaceConfig or the DevicePool", device.Request, name)
	}
	return network, nil
}

// xpu is the XPU that serves the PF of the device.
func (b portBuilder) xpu(ctx context.Context, device *claim.Device) (string, error) {
	var xpus v1alpha1.XPUList
	if err := b.reader.List(ctx, &xpus, client.MatchingFields{xpusByNode: device.ID.Node}); err != nil {
		return "", fmt.Errorf("list XPUs of node %s: %w", device.ID.Node, err)
	}
	chosen := claim.XPUOf(xpus.Items, device.ID.PF)
	if chosen == nil {
		return "", problemf(v1alpha1.ReasonNoXPU, "request %s: no XPU has nodeName %s and PF %s; create one, or add the PF to its spec.pfs", device.Request, device.ID.Node, device.ID.PF)
	}
	return chosen.Name, nil
}

// port is the Port that the device needs, without addresses.
func (b portBuilder) port(ctx context.Context, c *resourceapi.ResourceClaim, device *claim.Device, network *v1alpha1.XPUNetwork) (*v1alpha1.XPUPort, error) {
	xpu, err := b.xpu(ctx, device)
	if err != nil {
		return nil, err
	}
	port := &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:   c.Namespace,
			Name:        claim.PortName(device.ID.Node, device.Function),
			Labels:      map[string]string{v1alpha1.LabelPool: device.ID.DevicePool, v1alpha1.LabelNetwork: network.Name},
			Annotations: map[string]string{annotationAllocation: allocationStamp(c)},
			Finalizers:  []string{v1alpha1.FinalizerPort},
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(c, resourceapi.SchemeGroupVersion.WithKind("ResourceClaim")),
			},
		},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: device.ID.Node,
			Function: claim.FunctionRef(device.Function),
			XPU:      xpu,
			Network:  network.Name,
			MAC:      string(device.Interface.MAC),
			MTU:      smallerMTU(int32(device.Interface.MTU), ptr.Deref(network.Spec.MTU, 0)),
			Claim:    v1alpha1.ClaimRef{Name: c.Name, UID: c.UID, Request: device.Request},
		},
	}
	// The controller ownerReference must not hold up the claim's deletion.
	port.OwnerReferences[0].BlockOwnerDeletion = nil
	if port.Spec.MAC == "" {
		port.Spec.MAC = string(claim.DerivedMAC(c.UID, port.Spec.NodeName, device.Function))
	}
	return port, nil
}

// allocationStamp tells this allocation of the claim from earlier ones.
func allocationStamp(c *resourceapi.ResourceClaim) string {
	if c.Status.Allocation == nil || c.Status.Allocation.AllocationTimestamp == nil {
		return ""
	}
	return c.Status.Allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
}

// smallerMTU is the smaller of two MTUs of which 0 means any.
func smallerMTU(a, b int32) int32 {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// oneLine makes a joined error fit a condition's message.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

func list[T fmt.Stringer](items []T) string {
	texts := make([]string, len(items))
	for i, item := range items {
		texts[i] = item.String()
	}
	return strings.Join(texts, ", ")
}
