// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// portChanged forgets since when a Port that is gone was known. It also enqueues the other Ports of
// a bond, because each may send from the link-local addresses of all.
func (r *reconciler) portChanged(
	ctx context.Context, change model.Change, queue model.Queue[reconcile.Request],
) {
	r.siblings.portChanged(ctx, change, queue)
	if change.Gone() { // a Port that was never admitted has no finalizer, and is gone at once
		r.seen.Reset(change.Port().UID)
	}

	bond := model.BondKey(change.Port())
	if bond == "" || !change.Made() && !change.Gone() && !change.SpecChanged() {
		return
	}
	all := r.Ports.RequestsBy(ctx, model.ByBond, bond)
	if len(all) > mostBonded { // each Port says so by itself
		return
	}
	for _, request := range all {
		if request != reconciling.RequestFor(change.Port()) {
			queue.Add(request)
		}
	}
}

// mostBonded is how many Ports a bond can have: as many as a claim can have devices
// (resource.k8s.io/v1, AllocationResultsMaxSize).
const mostBonded = 32

// shareAddresses lets the port of a bond send from the link-local addresses of the bond's other
// ports, if the network's filter lets it send from some addresses only. The bond keeps the
// link-local address that the kernel made of the MAC address of its first port, whichever port is
// active.
func (r *reconciler) shareAddresses(
	ctx context.Context, want *opi.Port, port *v1alpha1.XPUPort, filter v1alpha1.SourceFilter,
) error {
	bond := model.BondKey(port)
	addressed := filter == "" || filter == v1alpha1.SourceFilterAddresses
	if bond == "" || len(want.Addresses) == 0 || !addressed {
		return nil
	}

	all, err := r.Ports.By(ctx, model.ByBond, bond)
	if err != nil {
		return err
	}
	if len(all) > mostBonded {
		return fmt.Errorf("bond %s has %d XPUPorts, and a claim has at most %d devices",
			port.Spec.Claim.Bond, len(all), mostBonded)
	}

	for _, other := range all {
		if other.UID == port.UID || !other.DeletionTimestamp.IsZero() {
			continue
		}
		mac, err := function.ParseMAC(other.Spec.MAC)
		if err != nil {
			return fmt.Errorf("XPUPort %s/%s of the same bond: spec.mac: %w", other.Namespace,
				other.Name, err)
		}
		want.Addresses = append(want.Addresses, netaddr.LinkLocal(mac.HardwareAddr()))
		want.Shared = want.Shared || other.Spec.XPU != port.Spec.XPU
	}

	return nil
}
