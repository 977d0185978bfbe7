// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"cmp"
	"context"
	"slices"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
)

// siblings finds the Ports that a Port shares its Function or its MAC address with.
type siblings struct {
	ports     *model.Ports
	namespace string // of the Ports of node agents
	infra     bool   // the Ports were admitted in the clusters of tenants
}

// of returns the other Ports of a Port's Function. A Function has two Ports only while the Port of
// a claim replaces one that was made ahead, if a claim and a node's agent created theirs at the
// same time, or if a person created one.
func (s siblings) of(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
	all := s.ports.RequestsBy(ctx, model.ByFunction, model.FunctionKeyOf(port))
	return slices.DeleteFunc(all, func(request reconcile.Request) bool {
		return request == reconciling.RequestFor(port)
	})
}

// preferred returns the Port of the same Function that takes precedence over this one, nil if no
// Port does.
func (s siblings) preferred(
	ctx context.Context, port *v1alpha1.XPUPort,
) (*v1alpha1.XPUPort, error) {
	all, err := s.ports.By(ctx, model.ByFunction, model.FunctionKeyOf(port))
	if err != nil {
		return nil, err
	}

	var preferred *v1alpha1.XPUPort
	for _, other := range all {
		if other.UID != port.UID && s.isGenuine(other) &&
			takesPrecedence(other, cmp.Or(preferred, port)) {
			preferred = other
		}
	}

	return preferred, nil
}

// isGenuine reports whether an agent or this controller may have created the Port. Agents create
// Ports without a claim in the namespace that they share with the controller, each for its own
// node, as an admission policy ensures. A Port in another namespace could name any pod that may
// join the network. A Port that is up stays. The Ports of an infra cluster were admitted in a
// tenant cluster.
func (s siblings) isGenuine(port *v1alpha1.XPUPort) bool {
	return port.Spec.Claim.Name != "" || port.Namespace == s.namespace ||
		port.Status.BridgePort != "" ||
		s.infra
}

// takesPrecedence prefers the Port that was not made ahead, then the Port that was up, then the
// older Port.
func takesPrecedence(a, b *v1alpha1.XPUPort) bool {
	if a.Spec.Ahead != b.Spec.Ahead {
		return b.Spec.Ahead
	}
	if up := a.Status.BridgePort != ""; up != (b.Status.BridgePort != "") {
		return up
	}
	return reconciling.Older(a, b)
}

// rivals returns the other Ports with a Port's MAC address.
func (s siblings) rivals(ctx context.Context, port *v1alpha1.XPUPort) []reconcile.Request {
	all := s.ports.RequestsBy(ctx, model.ByMAC, model.MACKey(port))
	return slices.DeleteFunc(all, func(request reconcile.Request) bool {
		return request == reconciling.RequestFor(port)
	})
}

// portChanged enqueues a Port whose spec changed or that was admitted. If the Port is gone, it also
// enqueues the Ports that may have waited for its Function or its MAC address.
func (s siblings) portChanged(
	ctx context.Context, change model.Change, queue model.Queue[reconcile.Request],
) {
	port := change.Port()
	if change.SpecChanged() || change.Gone() || isAdmitted(change.Old) != isAdmitted(port) {
		queue.Add(reconciling.RequestFor(port))
	}

	var others []reconcile.Request
	if change.Made() || change.Gone() {
		others = s.of(ctx, port)
	}
	if change.Gone() {
		others = append(others, s.rivals(ctx, port)...)
	}
	for _, request := range others {
		queue.Add(request)
	}
}
