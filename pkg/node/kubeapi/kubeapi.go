// SPDX-License-Identifier: Apache-2.0

// Package kubeapi reads and writes the objects of one node at the API server.
package kubeapi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kubecache"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// API is the API server as the agent of one node sees it. Reads of DevicePools, XPUs, XPUPorts, the
// Node and its XPUNode come from a cache.
type API struct {
	node   string
	cache  cache.Cache
	writer client.Client

	events Events
	synced chan struct{} // closed when everything has been read once

	changed notify.Signal // notified when a Port or an XPU changes
	// the [refusal] of the last Port by [function.ID]; no entry if the Port was not refused
	refusals sync.Map
}

// Events has the functions that API calls after changes. They must not block.
type Events struct {
	// DeclarationsChanged is called after a change of a DevicePool's spec, the node's labels or the
	// node's XPUNode.
	DeclarationsChanged func()
	// PortsChanged is called after a change of a Port or an XPU of this node, including whether an
	// XPU's OPI agent can be reached; and when there is another Node object of the node's name, so
	// that what belongs to the one before is made again.
	PortsChanged func()
}

// New returns an API for the named node. [API.Run] starts its watches.
func New(config *rest.Config, node string, events Events) (*API, error) {
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)); err != nil {
		return nil, err
	}

	mapper := restMapper()
	c, err := cache.New(config, cache.Options{
		Scheme: scheme,
		Mapper: mapper,
		ByObject: map[client.Object]cache.ByObject{
			&v1alpha1.DevicePool{}: {},
			&v1alpha1.XPU{}:        {Field: fields.OneTermEqualSelector("status.nodeName", node)},
			&v1alpha1.XPUPort{}:    {Field: fields.OneTermEqualSelector("spec.nodeName", node)},
			nodeMetadata():         {Field: fields.OneTermEqualSelector("metadata.name", node)},
			&v1alpha1.XPUNode{}:    {Field: fields.OneTermEqualSelector("metadata.name", node)},
		},
		DefaultTransform:            kubecache.Trim,
		ReaderFailOnMissingInformer: true,
	})

	if err != nil {
		return nil, fmt.Errorf("watch the API server: %w", err)
	}

	writer, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("client for the API server: %w", err)
	}

	return &API{
		node: node, cache: c, writer: writer, events: events, synced: make(chan struct{}),
	}, nil
}

// restMapper returns a mapper for the kinds that an agent needs. It does not ask the API server,
// which may be out of reach when the agent starts.
func restMapper() meta.RESTMapper {
	mapper := meta.NewDefaultRESTMapper(nil)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("DevicePool"), meta.RESTScopeRoot)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPU"), meta.RESTScopeRoot)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPUNode"), meta.RESTScopeRoot)
	mapper.Add(v1alpha1.SchemeGroupVersion.WithKind("XPUPort"), meta.RESTScopeNamespace)
	mapper.Add(corev1.SchemeGroupVersion.WithKind("Node"), meta.RESTScopeRoot)
	return mapper
}

// nodeMetadata returns a Node without spec and status, which an agent does not need.
func nodeMetadata() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}}
}

// Run watches the objects until ctx ends.
func (a *API) Run(ctx context.Context) error {
	if err := a.cache.IndexField(ctx, &v1alpha1.XPUPort{}, portsByFunction,
		functionOf); err != nil {
		return fmt.Errorf("watch XPUPorts: %w", err)
	}

	var read []toolscache.DoneChecker
	for object, handler := range map[client.Object]toolscache.ResourceEventHandler{
		&v1alpha1.DevicePool{}: a.poolHandler(),
		// also called when another client changed it, so that the agent corrects it
		&v1alpha1.XPUNode{}: onChange(a.events.DeclarationsChanged),
		nodeMetadata():      a.nodeHandler(),
		&v1alpha1.XPU{}:     onChange(a.portsChanged),
		&v1alpha1.XPUPort{}: a.portHandler(),
	} {
		informer, err := a.cache.GetInformer(ctx, object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watch %T: %w", object, err)
		}

		registration, err := informer.AddEventHandler(handler)
		if err != nil {
			return fmt.Errorf("watch %T: %w", object, err)
		}
		read = append(read, registration.HasSyncedChecker())
	}

	go func() {
		// The cache's own WaitForCacheSync polls every 100 ms, which would double the time that an
		// agent takes to start.
		if toolscache.WaitFor(ctx, "", read...) {
			close(a.synced)
		}
	}()

	return a.cache.Start(ctx)
}

// poolHandler ignores changes of the status, because the status sums up all nodes.
func (a *API) poolHandler() toolscache.ResourceEventHandlerFuncs {
	handler := onChange(a.events.DeclarationsChanged)
	handler.UpdateFunc = func(before, after any) {
		was, is := before.(*v1alpha1.DevicePool), after.(*v1alpha1.DevicePool)
		if was.UID != is.UID || was.Generation != is.Generation {
			a.events.DeclarationsChanged()
		}
	}
	return handler
}

// nodeHandler ignores changes of the Node that leave its labels and its UID. The UID changes if the
// watch missed that the Node object was deleted and created again.
func (a *API) nodeHandler() toolscache.ResourceEventHandler {
	another := func() {
		a.events.DeclarationsChanged()
		a.portsChanged()
	}
	return toolscache.ResourceEventHandlerDetailedFuncs{
		AddFunc: func(_ any, first bool) {
			if first {
				a.events.DeclarationsChanged()
			} else {
				another()
			}
		},
		UpdateFunc: func(before, after any) {
			was, is := before.(*metav1.PartialObjectMetadata), after.(*metav1.PartialObjectMetadata)
			switch {
			case was.UID != is.UID:
				another()
			case !maps.Equal(was.Labels, is.Labels):
				a.events.DeclarationsChanged()
			}
		},
		DeleteFunc: func(any) { a.events.DeclarationsChanged() },
	}
}

// onChange returns a handler that calls changed for every event of an object.
func onChange(changed func()) toolscache.ResourceEventHandlerFuncs {
	return toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(any, any) { changed() },
		DeleteFunc: func(any) { changed() },
	}
}

// Synced waits until everything has been read once. It returns false if ctx ended before.
func (a *API) Synced(ctx context.Context) bool {
	select {
	case <-a.synced:
		return true
	case <-ctx.Done():
		return false
	}
}

// DevicePools returns all DevicePools of the cluster.
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

// isSynced reports whether objects can be read without blocking.
func (a *API) isSynced() bool {
	select {
	case <-a.synced:
		return true
	default:
		return false
	}
}

// NodeUID returns the UID of the agent's Node object, or "" if it is not known. It does not block.
func (a *API) NodeUID() types.UID {
	if !a.isSynced() {
		return "" // a read would block
	}

	owner, err := a.owner(context.Background())
	if err != nil {
		return ""
	}
	return owner.UID
}

// XPUNode returns the status of the node's XPUNode, or nil if no XPUNode belongs to the current
// Node object.
func (a *API) XPUNode(ctx context.Context) (*v1alpha1.XPUNodeStatus, error) {
	n, err := a.ownXPUNode(ctx)
	if n == nil {
		return nil, err
	}
	return &n.Status, nil
}

// Cordons returns the cordons in the spec of the node's XPUNode, none if no XPUNode belongs to the
// current Node object.
func (a *API) Cordons(ctx context.Context) ([]v1alpha1.Cordon, error) {
	n, err := a.ownXPUNode(ctx)
	if n == nil {
		return nil, err
	}
	return n.Spec.Cordons, nil
}

// ownXPUNode returns the XPUNode that belongs to the current Node object, or nil if there is none.
func (a *API) ownXPUNode(ctx context.Context) (*v1alpha1.XPUNode, error) {
	owner, err := a.owner(ctx)
	if err != nil {
		return nil, err
	}

	var n v1alpha1.XPUNode
	err = a.cache.Get(ctx, types.NamespacedName{Name: a.node}, &n)
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("XPUNode %s: %w", a.node, err)
	}

	if !slices.ContainsFunc(n.OwnerReferences, func(r metav1.OwnerReference) bool {
		return r.UID == owner.UID
	}) {
		return nil, nil
	}

	return &n, nil
}

// WriteXPUNode replaces the status of the node's XPUNode, and creates the XPUNode if it is missing.
// The garbage collector deletes it with the Node.
func (a *API) WriteXPUNode(ctx context.Context, status v1alpha1.XPUNodeStatus) error {
	owner, err := a.owner(ctx)
	if err != nil {
		return err
	}

	n := v1alpha1.XPUNode{
		TypeMeta: metav1.TypeMeta{
			APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "XPUNode",
		},
		ObjectMeta: metav1.ObjectMeta{
			Name: a.node, OwnerReferences: []metav1.OwnerReference{owner},
		},
		Status: status,
	}

	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&n)
	if err != nil {
		return err
	}

	return a.writer.Apply(ctx,
		client.ApplyConfigurationFromUnstructured(&unstructured.Unstructured{Object: fields}),
		client.FieldOwner("xpu-agent"), client.ForceOwnership)
}

// owner returns an owner reference to the agent's Node.
func (a *API) owner(ctx context.Context) (metav1.OwnerReference, error) {
	node := nodeMetadata()
	if err := a.cache.Get(ctx, types.NamespacedName{Name: a.node}, node); err != nil {
		return metav1.OwnerReference{}, fmt.Errorf("node %s: %w", a.node, err)
	}
	return metav1.OwnerReference{
		APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID,
	}, nil
}
