// SPDX-License-Identifier: Apache-2.0

package xpus

import (
	"context"
	"errors"
	"slices"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Indexes of the cache.
const (
	ByNode      = "node"     // of XPUs: name of the node
	bySecret    = "secret"   // of XPUs: name of the TLS Secret
	byEndpoint  = "endpoint" // of XPUs: opi.NormalEndpoint
	byReason    = "reason"   // of XPUs: of their condition Ready
	nodesByCard = "card"     // of XPUNodes: see cardKeys
)

// AddNodeIndex adds the index [ByNode].
func AddNodeIndex(ctx context.Context, indexer client.FieldIndexer) error {
	node := func(x *v1alpha1.XPU) []string { return []string{x.Node()} }
	return reconciling.AddIndex(ctx, indexer, &v1alpha1.XPU{}, ByNode, node)
}

// AddIndexes adds the other indexes that this package reads.
func AddIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	endpoint := func(x *v1alpha1.XPU) []string {
		return []string{opi.NormalEndpoint(x.Spec.Endpoint)}
	}
	reason := func(x *v1alpha1.XPU) []string {
		return []string{v1alpha1.ReadyOf(x.Status.Conditions).Reason}
	}
	secret := func(x *v1alpha1.XPU) []string {
		return []string{ptr.Deref(x.Spec.TLS, v1alpha1.XPUTLS{}).SecretName}
	}

	return errors.Join(
		reconciling.AddIndex(ctx, indexer, &v1alpha1.XPU{}, byEndpoint, endpoint),
		reconciling.AddIndex(ctx, indexer, &v1alpha1.XPU{}, byReason, reason),
		reconciling.AddIndex(ctx, indexer, &v1alpha1.XPU{}, bySecret, secret),
		reconciling.AddIndex(ctx, indexer, &v1alpha1.XPUNode{}, nodesByCard, cardKeys),
	)
}

// Filters of events of XPUs and XPUNodes.
var (
	// WhenVFMACs selects changes of the MAC addresses of a node's VFs. XPUNodes that exist when the
	// controller starts count as changed.
	WhenVFMACs = builder.WithPredicates(predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool {
			return slices.ContainsFunc(e.Object.(*v1alpha1.XPUNode).Status.PFs,
				func(pf v1alpha1.XPUNodePF) bool { return len(pf.VFMACs) > 0 })
		},
		UpdateFunc: func(e event.UpdateEvent) bool {
			return !slices.EqualFunc(e.ObjectOld.(*v1alpha1.XPUNode).Status.PFs,
				e.ObjectNew.(*v1alpha1.XPUNode).Status.PFs, func(a, b v1alpha1.XPUNodePF) bool {
					return a.Address == b.Address && slices.Equal(a.VFMACs, b.VFMACs)
				})
		},
		DeleteFunc: func(event.DeleteEvent) bool { return false },
	})
	// whenAwayReported selects changes of what an infra cluster says of an XPU's agent.
	whenAwayReported = builder.WithPredicates(predicate.Or(predicate.GenerationChangedPredicate{},
		predicate.Funcs{UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*v1alpha1.XPU).Status, e.ObjectNew.(*v1alpha1.XPU).Status
			was, is := v1alpha1.ReadyOf(before.Conditions), v1alpha1.ReadyOf(after.Conditions)
			return before.AwaySeconds != after.AwaySeconds || was.Status != is.Status ||
				was.Reason != is.Reason
		}}))

	// WhenServing selects changes of what an XPU serves.
	WhenServing    = builder.WithPredicates(servingChanged)
	servingChanged = predicate.Or(predicate.GenerationChangedPredicate{}, predicate.Funcs{
		UpdateFunc: func(e event.UpdateEvent) bool {
			before, after := e.ObjectOld.(*v1alpha1.XPU).Status, e.ObjectNew.(*v1alpha1.XPU).Status
			return before.NodeName != after.NodeName || !slices.Equal(before.PFs, after.PFs)
		},
	})
)
