// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// An xPU with a Port in a network of a VRF serves the other networks of the VRF too, so that it
// routes to their Ports at other xPUs (asymmetric IRB, RFC 9135, section 4.1). The networks need a
// VNI, because other networks end at each xPU.

// MostRouted is how many networks of a VRF are routed between xPUs. It bounds what an xPU has for
// Ports of other xPUs: a bridge, a VXLAN port and a gateway for each network.
const MostRouted = 64

// routesAcross reports whether xPUs may route to the network's Ports at other xPUs.
func routesAcross(n *v1alpha1.XPUNetwork) bool { return n.Spec.Routed != nil && n.Spec.VNI != nil }

// routedWith returns the names of the networks that an xPU with a Port in a network routes to at
// other xPUs, the network itself among them. They are the oldest usable networks of the VRF, at
// most MostRouted. There are none for a network that is not routed between xPUs. A network that is
// being deleted counts as long as it has Ports.
func (r *Bridges) routedWith(ctx context.Context, network string) (names []string, err error) {
	if !r.options.Catalog.Segments {
		return nil, nil
	}

	var of v1alpha1.XPUNetwork
	err = r.options.Catalog.Client.Get(ctx, client.ObjectKey{Name: network}, &of)
	if apierrors.IsNotFound(err) || err == nil && !routesAcross(&of) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("XPUNetwork %s: %w", network, err)
	}

	names, err = r.routedIn(ctx, of.Spec.Routed.VRF)
	if !slices.Contains(names, network) {
		return nil, err
	}

	return names, nil
}

// routedIn returns the names of the networks of a VRF that are routed between xPUs. A network that
// cannot be used is not among them, because its gateway would be in the way of the network that it
// is in conflict with.
func (r *Bridges) routedIn(ctx context.Context, vrf string) (names []string, err error) {
	found, err := r.options.Catalog.with(ctx, vrfKey(vrf))
	if err != nil {
		return nil, err
	}

	slices.SortFunc(found, func(a, b *v1alpha1.XPUNetwork) int {
		if reconciling.Older(a, b) {
			return -1
		}
		return 1
	})

	for _, n := range found {
		if len(names) == MostRouted {
			break
		}
		if !routesAcross(n) || !n.DeletionTimestamp.IsZero() &&
			r.options.Ports.Count(model.ByNetwork, n.Name) == 0 {
			continue
		}

		usable, err := r.isUsable(ctx, n)
		if err != nil {
			return nil, err
		}
		if usable {
			names = append(names, n.Name)
		}
	}

	return names, nil
}

// isUsable reports whether Ports can join the network.
func (r *Bridges) isUsable(ctx context.Context, n *v1alpha1.XPUNetwork) (bool, error) {
	err := r.options.Catalog.check(ctx, n)
	if _, isRefusal := errors.AsType[*reconciling.Refusal](err); isRefusal {
		return false, nil
	}
	return err == nil, err
}

// isTooYoung reports whether XPUs do not route to a network's Ports at other XPUs because its VRF
// has MostRouted older networks.
func (r *Bridges) isTooYoung(ctx context.Context, n *v1alpha1.XPUNetwork) (bool, error) {
	if !routesAcross(n) || !r.options.Catalog.Segments {
		return false, nil
	}
	names, err := r.routedWith(ctx, n.Name)
	return len(names) == 0, err
}

// isNeeded reports whether Ports need a bridge: Ports at the XPU in its network, or in one of those
// that its network is routed with.
func (r *Bridges) isNeeded(b Bridge, routedWith []string) bool {
	return r.count(b) > 0 || slices.ContainsFunc(routedWith, func(network string) bool {
		return r.count(Bridge{network, b.XPU}) > 0
	})
}

// neededWith returns the bridges at their XPUs that Ports need together with these, among them
// these themselves.
func (r *Bridges) neededWith(ctx context.Context, these ...Bridge) sets.Set[Bridge] {
	all := sets.New(these...)
	for _, b := range these {
		for _, network := range r.mustRouteWith(ctx, b.Network) {
			all.Insert(Bridge{network, b.XPU})
		}
	}
	return all
}

// around returns the bridges of a network: see [Bridges.ofNetwork]. It also returns those that XPUs
// need because of Ports in the networks that it is routed with.
func (r *Bridges) around(network string, routedWith []string) sets.Set[Bridge] {
	all := sets.KeySet(r.ofNetwork(network))
	for _, other := range routedWith {
		for _, port := range r.options.Ports.Present(model.ByNetwork, other) {
			all.Insert(Bridge{network, port.Spec.XPU})
		}
	}
	return all
}

// mustRouteWith is routedWith for event handlers. It logs an error, which only a cache that ends
// can return.
func (r *Bridges) mustRouteWith(ctx context.Context, network string) []string {
	names, err := r.routedWith(ctx, network)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing the networks of a VRF")
	}
	return names
}

// isLeftOut reports whether an XPU has no route to a network because there is no such XPU, because
// its agent makes no gateways, or because the agent refuses them to this client. This is no failure
// of the network if none of its own Ports is at the XPU.
func isLeftOut(report bridgeReport) bool {
	return !report.hasPorts && (errors.Is(report.err, errNoXPU) ||
		errors.Is(report.err, opi.ErrUnsupported) || opi.IsDenied(report.err))
}

// toDecide returns the bridges of other networks that a change of this network can affect, because
// both have a VLAN, VNI or VRF in common. A bridge that is served, and that is to be served as
// before, is not among them. Otherwise one change would have the agents of all xPUs asked about all
// networks of the VRF.
func (r *Bridges) toDecide(ctx context.Context, changed client.Object) (affected []Bridge) {
	routes := vrfRoutes{r, map[string][]string{}}
	for _, name := range r.options.Catalog.Rivals(ctx, changed) {
		var rival v1alpha1.XPUNetwork
		if rival.Name = name.Name; rival.Name == changed.GetName() {
			continue
		}

		err := r.options.Catalog.Client.Get(ctx, name.NamespacedName, &rival)
		if err != nil {
			ctrl.LoggerFrom(ctx).Error(err, "reading a network", "network", name.Name)
			continue
		}

		var routedWith []string
		if routesAcross(&rival) {
			routedWith = routes.of(ctx, rival.Spec.Routed.VRF, rival.Name)
		}
		usable := sync.OnceValue(func() bool {
			usable, err := r.isUsable(ctx, &rival)
			return usable && err == nil
		})
		states := r.ofNetwork(rival.Name)
		for b := range r.around(rival.Name, routedWith) {
			state := states[b]
			served := state.known && state.err == nil
			if !served || !r.isNeeded(b, routedWith) || !usable() {
				affected = append(affected, b)
			}
		}
	}

	return affected
}

// vrfRoutes remembers what [Bridges.routedIn] returns for VRFs, within one event.
type vrfRoutes struct {
	bridges *Bridges
	names   map[string][]string
}

// of returns the networks that a network of the VRF is routed with. It logs an error, which only a
// cache that ends can return.
func (v vrfRoutes) of(ctx context.Context, vrf, network string) []string {
	names, known := v.names[vrf]
	if !known {
		var err error
		if names, err = v.bridges.routedIn(ctx, vrf); err != nil {
			ctrl.LoggerFrom(ctx).Error(err, "listing the networks of a VRF")
		}
		v.names[vrf] = names
	}
	if !slices.Contains(names, network) {
		return nil
	}
	return names
}

// beginLeft begins the bridges of a network that is being deleted at the xPUs that have Ports in
// other networks of its VRF. An earlier process may have left them there. It does so once for each
// network, because a bridge that is gone is not begun again.
func (r *Bridges) beginLeft(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	if !routesAcross(n) || !r.options.Catalog.Segments {
		return nil
	}

	beside, err := r.routedIn(ctx, n.Spec.Routed.VRF)
	if err != nil {
		return err
	}

	r.mu.Lock()
	done := r.left.Has(n.UID)
	r.left.Insert(n.UID)
	r.mu.Unlock()

	if !done {
		for b := range r.around(n.Name, beside) {
			r.begin(b)
		}
	}
	return nil
}

// forget drops what is known of a network that is gone.
func (r *Bridges) forget(n *v1alpha1.XPUNetwork) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left.Delete(n.UID)
}
