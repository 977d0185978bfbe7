package kubeapi

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// portsByFunction is the index of the Ports in memory by their Function.
const portsByFunction = "function"

func functionOf(port client.Object) []string {
	return []string{claim.FunctionOf(port.(*v1alpha1.XPUPort).Spec.Function).String()}
}

// Subscribe returns a channel that receives a value after every change of a Port or an XPU of the node, until ctx ends.
func (a *API) Subscribe(ctx context.Context) <-chan struct{} { return a.changed.Subscribe(ctx) }

// Ports are the Ports of the node, in all namespaces. The caller must not change them.
func (a *API) Ports(ctx context.Context) ([]v1alpha1.XPUPort, error) {
	var list v1alpha1.XPUPortList
	if err := a.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUPorts of node %s: %w", a.node, err)
	}
	return list.Items, nil
}

// PortsOf are the Ports of a Function: there can be one in each namespace. The caller must not change them.
func (a *API) PortsOf(ctx context.Context, f function.ID) ([]v1alpha1.XPUPort, error) {
	var list v1alpha1.XPUPortList
	err := a.cache.List(ctx, &list, client.MatchingFields{portsByFunction: f.String()}, client.UnsafeDisableDeepCopy)
	if err != nil {
		return nil, fmt.Errorf("list XPUPorts of Function %s: %w", f, err)
	}
	return list.Items, nil
}

// CreatePort creates a Port that goes when the node goes.
func (a *API) CreatePort(ctx context.Context, port *v1alpha1.XPUPort) error {
	node := nodeMetadata()
	if err := a.cache.Get(ctx, types.NamespacedName{Name: a.node}, node); err != nil {
		return fmt.Errorf("node %s: %w", a.node, err)
	}
	port.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: corev1.SchemeGroupVersion.String(), Kind: "Node", Name: node.Name, UID: node.UID},
	}
	return a.writer.Create(ctx, port)
}

// DeletePort asks for a Port to be taken away, whichever has the name, or only the one with the uid. An error that is
// NotFound says that there is none any more; after nil there is, until the xPU says that it does not serve it.
func (a *API) DeletePort(ctx context.Context, key types.NamespacedName, uid types.UID) error {
	port := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Namespace: key.Namespace, Name: key.Name}}
	var options []client.DeleteOption
	if uid != "" {
		options = append(options, client.Preconditions{UID: &uid})
	}
	return a.writer.Delete(ctx, port, options...)
}

// PortExists asks the API server itself, as what is in memory can be late.
func (a *API) PortExists(ctx context.Context, key types.NamespacedName) (bool, error) {
	err := a.writer.Get(ctx, key, &v1alpha1.XPUPort{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}
