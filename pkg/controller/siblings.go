// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
)

// siblings are the other Ports of a Port's Function. A Function has two Ports only while the Port
// of a claim takes the place of one that was made ahead, if a claim and a node's agent made theirs
// at the same time, or if a person made one.
func (r *base) siblings(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
	all := r.portsBy(ctx, model.ByFunction, model.FunctionKeyOf(port))
	return slices.DeleteFunc(all, func(request reconcile.Request) bool {
		return request == requestFor(port)
	})
}

// first returns the Port of the same Function that comes before this one, nil if there is none.
func (r *base) first(ctx context.Context, port *v1alpha1.XPUPort) (*v1alpha1.XPUPort, error) {
	all, err := r.store.By(ctx, model.ByFunction, model.FunctionKeyOf(port))
	if err != nil {
		return nil, err
	}

	var first *v1alpha1.XPUPort
	for _, other := range all {
		if other.UID != port.UID && r.counts(other) && comesBefore(other, cmp.Or(first, port)) {
			first = other
		}
	}

	return first, nil
}

// counts says whether a Port may be one that an agent or this controller made. Agents make Ports
// without a claim, each for its own node, in the namespace that they share with the controller, as
// an admission policy ensures. Whoever makes a Port in another namespace could name there any pod
// that may join. What is up stays, and the Ports of an infra cluster were admitted in another
// cluster.
func (r *base) counts(port *v1alpha1.XPUPort) bool {
	return port.Spec.Claim.Name != "" || port.Namespace == r.Namespace ||
		port.Status.BridgePort != "" ||
		r.Role == RoleInfra
}

// comesBefore prefers the Port that was not made ahead, then the one that was up, then the older
// one.
func comesBefore(a, b *v1alpha1.XPUPort) bool {
	if a.Spec.Ahead != b.Spec.Ahead {
		return b.Spec.Ahead
	}
	if up := a.Status.BridgePort != ""; up != (b.Status.BridgePort != "") {
		return up
	}
	return older(a, b)
}
