// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// segmentOf returns the segment of a tenant's network, or nil if it has none.
func segmentOf(tenant *v1alpha1.XPUTenant, network string) *v1alpha1.TenantNetwork {
	i := slices.IndexFunc(tenant.Status.Networks, func(n v1alpha1.TenantNetwork) bool {
		return n.Name == network
	})
	if i < 0 {
		return nil
	}
	return &tenant.Status.Networks[i]
}

// allocateSegment gives a network of the tenant the lowest free segment. It writes the segment to
// the XPUTenant's status with an optimistic lock before anything uses it, so that two brokers never
// allocate the same segment.
func (r *networks) allocateSegment(
	ctx context.Context, tenant *v1alpha1.XPUTenant, network string,
) (*v1alpha1.TenantNetwork, error) {
	if err := r.checkRanges(ctx, tenant); err != nil {
		return nil, err
	}

	if len(tenant.Status.Networks) >= v1alpha1.MaxTenantNetworks {
		return nil, problemf(v1alpha1.ReasonQuotaExceeded,
			"this cluster has %d networks, as many as it may have; delete some",
			len(tenant.Status.Networks))
	}

	var all v1alpha1.XPUNetworkList
	if err := r.infra.List(ctx, &all, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUNetworks: %w", err)
	}

	segment := v1alpha1.TenantNetwork{Name: network}
	vlans, vnis := sets.New[int32](), sets.New[int32]()
	for i := range all.Items {
		taken := &all.Items[i]
		// The copy may be older than this XPUTenant, or than its status.
		if taken.Name == scopedNetwork(tenant.Name, network) {
			segment.VLAN, segment.VNI = taken.Spec.VLAN, taken.Spec.VNI
		}

		vlans.Insert(taken.Spec.VLAN)
		if taken.Spec.VNI != nil {
			vnis.Insert(*taken.Spec.VNI)
		}
	}

	for _, other := range tenant.Status.Networks {
		vlans.Insert(other.VLAN)
		if other.VNI != nil {
			vnis.Insert(*other.VNI)
		}
	}

	if segment.VLAN == 0 {
		vlan, ok := lowestFree(tenant.Spec.VLANs.First, tenant.Spec.VLANs.Last, vlans)
		if !ok {
			return nil, noSegment("VLAN", tenant.Spec.VLANs.First, tenant.Spec.VLANs.Last)
		}

		segment.VLAN = vlan
		if of := tenant.Spec.VNIs; of != nil {
			vni, ok := lowestFree(of.First, of.Last, vnis)
			if !ok {
				return nil, noSegment("VNI", of.First, of.Last)
			}
			segment.VNI = &vni
		}
	}

	err := r.writeNetworks(ctx, tenant, append(slices.Clone(tenant.Status.Networks), segment))
	return &segment, err
}

func noSegment(kind string, first, last int32) *problem {
	return problemf(v1alpha1.ReasonQuotaExceeded,
		"every %s of this cluster's range, %d-%d, is in use; delete a network, or ask the "+
			"administrator of the infra cluster for a larger range", kind, first, last)
}

// lowestFree returns the lowest number in the range that is not taken.
func lowestFree(first, last int32, taken sets.Set[int32]) (int32, bool) {
	for n := first; n <= last; n++ {
		if !taken.Has(n) {
			return n, true
		}
	}
	return 0, false
}

// releaseSegment frees the segment of a network that no longer exists in the infra cluster.
func (r *networks) releaseSegment(
	ctx context.Context, tenant *v1alpha1.XPUTenant, network string,
) error {
	if segmentOf(tenant, network) == nil {
		return nil
	}
	left := slices.DeleteFunc(slices.Clone(tenant.Status.Networks),
		func(n v1alpha1.TenantNetwork) bool { return n.Name == network })
	return r.writeNetworks(ctx, tenant, left)
}

func (r *networks) writeNetworks(
	ctx context.Context, tenant *v1alpha1.XPUTenant, all []v1alpha1.TenantNetwork,
) error {
	changed := tenant.DeepCopy()
	changed.Status.Networks = all
	patch := client.MergeFromWithOptions(tenant, client.MergeFromWithOptimisticLock{})
	if err := r.infra.Status().Patch(ctx, changed, patch); err != nil {
		return fmt.Errorf("segments of XPUTenant %s: %w", tenant.Name, err)
	}
	return nil
}

// checkRanges returns a *problem if the VLANs or VNIs of the tenant overlap with an older tenant's.
func (b *syncer) checkRanges(ctx context.Context, tenant *v1alpha1.XPUTenant) error {
	tenants, err := b.tenants(ctx)
	if err != nil {
		return err
	}

	for i := range tenants {
		other := &tenants[i]
		if other.UID == tenant.UID || !other.Precedes(tenant) {
			continue
		}
		if ours, theirs := tenant.Spec.VLANs, other.Spec.VLANs; ours.First <= theirs.Last &&
			theirs.First <= ours.Last {
			return overlap("vlans", ours.First, ours.Last, other.Name)
		}
		if ours, theirs := tenant.Spec.VNIs, other.Spec.VNIs; ours != nil && theirs != nil &&
			ours.First <= theirs.Last && theirs.First <= ours.Last {
			return overlap("vnis", ours.First, ours.Last, other.Name)
		}
	}

	return nil
}

func overlap(field string, first, last int32, other string) *problem {
	return problemf(v1alpha1.ReasonConflict, "spec.%s, %d-%d, has some of those of XPUTenant %s, "+
		"which is older; correct it", field, first,
		last, other)
}
