// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcev1beta2api "k8s.io/api/resource/v1beta2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	typedresourcev1 "k8s.io/client-go/kubernetes/typed/resource/v1"
	typedresourcev1beta2 "k8s.io/client-go/kubernetes/typed/resource/v1beta2"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/pager"
	schedulingcorev1 "k8s.io/component-helpers/scheduling/corev1"
	resourcev1beta2 "k8s.io/dynamic-resource-allocation/api/v1beta2"
)

// Clients are clients of the API groups that List reads. The clientset of client-go has clients of
// all groups, and the linker keeps a description of each type that these have.
type Clients struct {
	Core interface {
		typedcorev1.NodesGetter
		typedcorev1.NamespacesGetter
		typedcorev1.PodsGetter
	}
	Resource        typedresourcev1.ResourceV1Interface
	ResourceV1beta2 typedresourcev1beta2.DeviceTaintRulesGetter
}

// NewClients returns clients for the API server of a cluster.
func NewClients(config *rest.Config) (Clients, error) {
	core, err := typedcorev1.NewForConfig(config)
	if err != nil {
		return Clients{}, err
	}

	resource, err := typedresourcev1.NewForConfig(config)
	if err != nil {
		return Clients{}, err
	}

	resourceV1beta2, err := typedresourcev1beta2.NewForConfig(config)
	if err != nil {
		return Clients{}, err
	}

	return Clients{core, resource, resourceV1beta2}, nil
}

// List returns the objects of a cluster. Pods are in the order of the scheduler's queue: first by
// priority, then by age. DeviceTaintRules are listed as resource.k8s.io/v1 or v1beta2, if the API
// server has them.
func List(ctx context.Context, clients Clients) (*Snapshot, error) {
	s := &Snapshot{}
	core, resource := clients.Core, clients.Resource
	for _, kind := range []struct {
		name string
		list pager.ListPageFunc
		may  bool // the API server may lack the kind
	}{
		{"Nodes", pageFunc(core.Nodes().List), false},
		{"Namespaces", pageFunc(core.Namespaces().List), false},
		{"DeviceClasses", pageFunc(resource.DeviceClasses().List), false},
		{"ResourceSlices", pageFunc(resource.ResourceSlices().List), false},
		{"DeviceTaintRules", pageFunc(taintRules(clients)), true},
		{"ResourceClaimTemplates", pageFunc(resource.ResourceClaimTemplates("").List), false},
		{"ResourceClaims", pageFunc(resource.ResourceClaims("").List), false},
		{"Pods", pageFunc(core.Pods("").List), false},
	} {
		err := pager.New(kind.list).EachListItem(ctx, metav1.ListOptions{}, s.Put)
		if err != nil && !(kind.may && apierrors.IsNotFound(err)) {
			return nil, fmt.Errorf("list %s: %w", kind.name, err)
		}
	}

	slices.SortStableFunc(s.Pods, byQueue)
	return s, nil
}

// pageFunc adapts a client's List method to the pager.
func pageFunc[L runtime.Object](
	list func(context.Context, metav1.ListOptions) (L, error),
) pager.ListPageFunc {
	return func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
		return list(ctx, options)
	}
}

// taintRules lists DeviceTaintRules of v1, available since Kubernetes 1.37, or else of v1beta2.
func taintRules(
	clients Clients,
) func(context.Context, metav1.ListOptions) (*resourceapi.DeviceTaintRuleList, error) {
	return func(
		ctx context.Context, options metav1.ListOptions,
	) (*resourceapi.DeviceTaintRuleList, error) {
		newest, err := clients.Resource.DeviceTaintRules().List(ctx, options)
		if !apierrors.IsNotFound(err) {
			return newest, err
		}

		old, err := clients.ResourceV1beta2.DeviceTaintRules().List(ctx, options)
		if err != nil {
			return nil, err
		}
		return convertTaintRules(old)
	}
}

func convertTaintRules(
	old *resourcev1beta2api.DeviceTaintRuleList,
) (*resourceapi.DeviceTaintRuleList, error) {
	converted := &resourceapi.DeviceTaintRuleList{
		ListMeta: old.ListMeta, Items: make([]resourceapi.DeviceTaintRule, len(old.Items)),
	}
	for i := range old.Items {
		if err := resourcev1beta2.Convert_v1beta2_DeviceTaintRule_To_v1_DeviceTaintRule(
			&old.Items[i], &converted.Items[i], nil,
		); err != nil {
			return nil, fmt.Errorf("convert DeviceTaintRule %s: %w", old.Items[i].Name, err)
		}
	}

	return converted, nil
}

// byQueue orders pods like the scheduler's plugin PrioritySort.
func byQueue(a, b *corev1.Pod) int {
	return cmp.Or(
		cmp.Compare(schedulingcorev1.PodPriority(b), schedulingcorev1.PodPriority(a)),
		a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
		cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}
