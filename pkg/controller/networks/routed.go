// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"context"
	"errors"
	"fmt"
	"slices"

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
// other xPUs, the network itself among them. They are the oldest networks of the VRF, at most
// MostRouted. There are none for a network that is not routed between xPUs. A network that is being
// deleted counts as long as it has Ports.
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

// routedIn returns the names of the networks of a VRF that are routed between xPUs.
func (r *Bridges) routedIn(ctx context.Context, vrf string) (names []string, err error) {
	var all v1alpha1.XPUNetworkList
	key := vrfKey(vrf)
	if err := r.options.Catalog.Client.List(ctx, &all, client.MatchingFields{byID: key},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUNetworks with %s: %w", key, err)
	}

	var found []*v1alpha1.XPUNetwork
	for i := range all.Items {
		n := &all.Items[i]
		if routesAcross(n) && (n.DeletionTimestamp.IsZero() ||
			r.options.Ports.Count(model.ByNetwork, n.Name) > 0) {
			found = append(found, n)
		}
	}

	slices.SortFunc(found, func(a, b *v1alpha1.XPUNetwork) int {
		if reconciling.Older(a, b) {
			return -1
		}
		return 1
	})
	for _, n := range found[:min(len(found), MostRouted)] {
		names = append(names, n.Name)
	}

	return names, nil
}

// isTooYoung reports whether XPUs do not route to a network's Ports at other XPUs because its VRF has
// MostRouted older networks.
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

// neededWith returns the bridges at their XPUs that Ports need together with these, among them these
// themselves.
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

// mustRouteWith is routedWith for event handlers. It logs an error, which only a cache that ends can
// return.
func (r *Bridges) mustRouteWith(ctx context.Context, network string) []string {
	names, err := r.routedWith(ctx, network)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "listing the networks of a VRF")
	}
	return names
}

// isLeftOut reports whether an agent lacks a bridge that no Port in its network needs because the
// agent makes no gateways. Its XPU then has no route to the network, which is no failure of the
// network.
func isLeftOut(report bridgeReport) bool {
	return !report.hasPorts && errors.Is(report.err, opi.ErrUnsupported)
}
