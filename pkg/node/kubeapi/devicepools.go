package kubeapi

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// DevicePools returns all DevicePools.
func (a *API) DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error) {
	var list v1alpha1.DevicePoolList
	if err := a.cache.List(ctx, &list, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	return list.Items, nil
}

// NodeLabels returns the labels of the agent's node.
func (a *API) NodeLabels(ctx context.Context) (map[string]string, error) {
	node := nodeMetadata()
	if err := a.cache.Get(ctx, types.NamespacedName{Name: a.node}, node); err != nil {
		return nil, fmt.Errorf("node %s: %w", a.node, err)
	}
	return node.Labels, nil
}

// WriteNodeStatus replaces this node's entry in DevicePool.status.nodes; nil takes it away. Every node's agent has a
// field manager of its own, so that it owns its entry and no other.
func (a *API) WriteNodeStatus(ctx context.Context, devicePool string, entry *v1alpha1.DevicePoolNodeStatus) error {
	nodes := []any{} // not nil: the API server would make the status null when this was all of it, and refuse that
	if entry != nil {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(entry)
		if err != nil {
			return err
		}
		nodes = append(nodes, fields)
	}
	object := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.SchemeGroupVersion.String(),
		"kind":       "DevicePool",
		"metadata":   map[string]any{"name": devicePool},
		"status":     map[string]any{"nodes": nodes},
	}}
	return a.writer.Status().Apply(ctx, client.ApplyConfigurationFromUnstructured(object),
		client.FieldOwner("xpu-agent/"+a.node), client.ForceOwnership)
}
