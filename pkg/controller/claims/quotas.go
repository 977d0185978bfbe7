// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
)

// waitingForQuota returns the claims of the namespace that exceeded its quotas and fit now, the
// oldest first. The others are left alone, because each attempt of a claim that does not fit would
// write to the API server what is used now.
func (r *reconciler) waitingForQuota(ctx context.Context, namespace string) []reconcile.Request {
	fitting, err := r.fittingClaims(ctx, namespace)
	if err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "looking for claims that fit into the quota")
		return r.dependents(ctx, onQuota(namespace))
	}
	return fitting
}

func (r *reconciler) fittingClaims(
	ctx context.Context, namespace string,
) ([]reconcile.Request, error) {
	var waiting resourceapi.ResourceClaimList
	err := r.Client.List(ctx, &waiting, client.MatchingFields{byDependency: onQuota(namespace)},
		client.UnsafeDisableDeepCopy)
	if err != nil || len(waiting.Items) == 0 {
		return nil, err
	}
	limits, err := addresses.LimitsOf(ctx, r.Client, namespace)
	if err != nil {
		return nil, err
	}

	slices.SortFunc(waiting.Items, func(a, b resourceapi.ResourceClaim) int {
		return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
	})
	ports := portsOverQuota(waiting.Items)
	fit, err := r.Allocator.Fitting(ctx, limits, ports)
	if err != nil {
		return nil, err
	}

	var requests []reconcile.Request
	for i, port := range ports {
		if fit[i] {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKey{
				Namespace: namespace, Name: port.Spec.Claim.Name,
			}})
		}
	}
	return requests, nil
}

// portsOverQuota returns the Ports that claims did not get because of a quota, with what a quota
// counts of them.
func portsOverQuota(waiting []resourceapi.ResourceClaim) (ports []*v1alpha1.XPUPort) {
	for i := range waiting {
		c := &waiting[i]
		devices, err := claim.Devices(c)
		if err != nil {
			continue // the claim is not in the index
		}
		for j := range devices {
			d := &devices[j]
			condition := deviceCondition(c, d, v1alpha1.ConditionProvisioned)
			if condition.Reason == v1alpha1.ReasonQuotaExceeded {
				ports = append(ports, claim.NewPort(c.Namespace, d.Function, d.ID.DevicePool,
					v1alpha1.XPUPortSpec{
						NodeName: d.ID.Node, Rate: claim.RateOf(d.Interface.VF),
						Claim: v1alpha1.ClaimRef{Name: c.Name},
					}))
			}
		}
	}
	return ports
}
