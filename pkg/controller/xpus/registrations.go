// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// registrations creates an XPU for each node that runs an OPI agent as a pod, where the nodes are
// the xPUs themselves. The agents are the endpoints of Services with the label LabelAgents. An XPU
// has the name of its node. It is never deleted here, because a node that is away may come back; an
// administrator who removes a card deletes its XPU.
type registrations struct {
	reconciling.Cluster
	namespace string
}

func (r *registrations) setup(mgr ctrl.Manager) error {
	ofSlice := func(_ context.Context, slice client.Object) []reconcile.Request {
		name := slice.GetLabels()[discoveryv1.LabelServiceName]
		return []reconcile.Request{
			{NamespacedName: types.NamespacedName{Namespace: slice.GetNamespace(), Name: name}},
		}
	}

	ofXPU := func(_ context.Context, xpu client.Object) []reconcile.Request {
		name := xpu.GetLabels()[v1alpha1.LabelAgents]
		if name == "" {
			return nil
		}
		return []reconcile.Request{
			{NamespacedName: types.NamespacedName{Namespace: r.namespace, Name: name}},
		}
	}

	return reconciling.NewController(mgr, "registration", 1).
		For(&corev1.Service{}).
		Watches(&discoveryv1.EndpointSlice{}, handler.EnqueueRequestsFromMapFunc(ofSlice)).
		Watches(&v1alpha1.XPU{}, handler.EnqueueRequestsFromMapFunc(ofXPU),
			reconciling.WhenSpecChanged).
		Complete(r.Guarded(r))
}

func (r *registrations) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	var service corev1.Service
	if err := r.Client.Get(ctx, req.NamespacedName, &service); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}

	var slicesOf discoveryv1.EndpointSliceList
	if err := r.Client.List(ctx, &slicesOf, client.InNamespace(req.Namespace),
		client.MatchingLabels{discoveryv1.LabelServiceName: req.Name}); err != nil {
		return ctrl.Result{}, fmt.Errorf("list EndpointSlices of Service %s: %w", req, err)
	}

	endpoints := endpointsByNode(slicesOf.Items)
	if err := r.leaveAddresses(ctx, &service, endpoints); err != nil {
		return ctrl.Result{}, err
	}
	for _, node := range slices.Sorted(maps.Keys(endpoints)) {
		if err := r.register(ctx, &service, node, endpoints[node]); err != nil {
			return ctrl.Result{}, err
		}
	}

	return ctrl.Result{}, nil
}

// endpointsByNode returns the addresses of the agents that are ready. A node has two while one
// agent replaces the other; the address that sorts first is used then.
func endpointsByNode(all []discoveryv1.EndpointSlice) map[string]string {
	found := map[string]string{}
	for _, slice := range all {
		if len(slice.Ports) == 0 || slice.Ports[0].Port == nil {
			continue
		}

		port := strconv.Itoa(int(*slice.Ports[0].Port))
		for _, endpoint := range slice.Endpoints {
			node := ptr.Deref(endpoint.NodeName, "")
			if node == "" || len(endpoint.Addresses) == 0 ||
				!ptr.Deref(endpoint.Conditions.Ready, true) {
				continue
			}

			address := net.JoinHostPort(endpoint.Addresses[0], port)
			if other := found[node]; other == "" || address < other {
				found[node] = address
			}
		}
	}

	return found
}

// leaveAddresses takes the endpoint from the Service's XPUs at whose address another node's agent is
// now, because addresses of pods are given to other pods. Such an XPU would be connected with another
// node's card, and keep the card's own XPU from it. It gets an endpoint again with its next agent.
func (r *registrations) leaveAddresses(
	ctx context.Context, service *corev1.Service, endpoints map[string]string,
) error {
	nodes := map[string]string{} // by endpoint
	for node, endpoint := range endpoints {
		nodes[endpoint] = node
	}

	var all v1alpha1.XPUList
	if err := r.Client.List(ctx, &all,
		client.MatchingLabels{v1alpha1.LabelAgents: service.Name}); err != nil {
		return fmt.Errorf("list XPUs of Service %s: %w", service.Name, err)
	}
	for i := range all.Items {
		xpu := &all.Items[i]
		node, taken := nodes[xpu.Spec.Endpoint]
		if !taken || node == xpu.Name {
			continue
		}

		before := xpu.DeepCopy()
		xpu.Spec.Endpoint, xpu.Spec.TLS, xpu.Spec.Insecure = "", nil, false
		err := r.Client.Patch(ctx, xpu, reconciling.Since(before))
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("endpoint of XPU %s: %w", xpu.Name, err)
		}
		ctrl.LoggerFrom(ctx).Info("the agent of another node has the address of an XPU", "xpu",
			xpu.Name, "endpoint", before.Spec.Endpoint, "node", node)
	}
	return nil
}

// register creates or updates the XPU of a node. An XPU without the Service's label is not changed.
func (r *registrations) register(
	ctx context.Context, service *corev1.Service, node, endpoint string,
) error {
	var xpu v1alpha1.XPU
	err := r.Client.Get(ctx, client.ObjectKey{Name: node}, &xpu)
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPU %s: %w", node, err)
	}

	before := xpu.DeepCopy()
	spec := &xpu.Spec
	spec.Endpoint, spec.TLS = endpoint, nil
	spec.Insecure = service.Annotations[v1alpha1.AnnotationInsecure] == "true"
	if !spec.Insecure {
		spec.TLS = &v1alpha1.XPUTLS{
			SecretName: cmp.Or(service.Annotations[v1alpha1.AnnotationTLSSecret], "opi-client"),
			ServerName: service.Annotations[v1alpha1.AnnotationServerName],
		}
	}

	switch {
	case apierrors.IsNotFound(err):
		xpu.ObjectMeta = metav1.ObjectMeta{
			Name: node, Labels: map[string]string{v1alpha1.LabelAgents: service.Name},
		}
		// The cache may be out of date. An event comes then.
		if err := r.Client.Create(ctx, &xpu); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create XPU %s for Service %s: %w", node, service.Name, err)
		}

		ctrl.LoggerFrom(ctx).Info("created XPU", "xpu", node, "endpoint", endpoint)
		return nil
	case before.Labels[v1alpha1.LabelAgents] != service.Name:
		return nil
	case before.Spec.Endpoint == spec.Endpoint && before.Spec.Insecure == spec.Insecure &&
		ptr.Equal(before.Spec.TLS, spec.TLS):
		return nil
	}

	err = r.Client.Patch(ctx, &xpu, reconciling.Since(before))
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("XPU %s for Service %s: %w", node, service.Name, err)
	}

	ctrl.LoggerFrom(ctx).Info("XPU has another endpoint", "xpu", node, "endpoint", endpoint)
	return nil
}
