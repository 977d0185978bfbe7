// SPDX-License-Identifier: Apache-2.0

package claims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/pools"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/ports"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

// create creates the Port of a device. needed is false if the device needs no Port. A refusal says
// why the Port cannot be created now.
func (r *reconciler) create(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device,
) (needed bool, err error) {
	port, joins, err := r.buildPort(ctx, c, d)
	if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
		return true, reconciling.Refuse(refusal.Reason, "request %s: %s", d.Request,
			refusal.Message)
	}
	if err != nil || port == nil {
		return false, err
	}
	if err := r.assume(ctx, c, d, port, joins); err != nil {
		return true, err
	}

	_, end := r.Tracer.Stage(ctx, c.UID, "create XPUPort", ports.TraceAttributes(port)...)
	err = r.Client.Create(ctx, port)
	end(client.IgnoreAlreadyExists(err))

	if apierrors.IsInvalid(err) || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		if err := r.Allocator.Failed(ctx, port); err != nil {
			return true, err
		}
	}

	switch {
	case err == nil && d.Interface.Bond != nil && port.Spec.Claim.Bond == "":
		return true, reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "request %s: the API server does "+
			"not keep spec.claim.bond of XPUPorts; upgrade the CRDs", d.Request)
	case err == nil:
		ctrl.LoggerFrom(ctx).Info("created XPUPort", "port", client.ObjectKeyFromObject(port),
			"device", d.Name,
			"networks", port.Spec.AllNetworks(), "xpu", port.Spec.XPU,
			"addresses", port.Spec.Addresses)
	case apierrors.IsAlreadyExists(err): // the cache is behind: its event is on the way
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		// the claim goes with its namespace
	case apierrors.IsInvalid(err):
		return true, reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "request %s: %s", d.Request,
			reconciling.OneLine(err))
	case apierrors.IsForbidden(err): // by a quota, or by an admission policy of the cluster
		return true, reconciling.Refuse(v1alpha1.ReasonForbidden,
			"request %s: the API server refuses the XPUPort; raise the namespace's quota, "+
				"or ask who refuses it: %s", d.Request, reconciling.OneLine(err))
	default:
		return true, fmt.Errorf("create XPUPort %s/%s: %w", port.Namespace, port.Name, err)
	}

	return true, nil
}

// assume has the allocator reserve what the Port needs. If the Port's default MAC address is taken,
// the Port gets one that is derived from the claim.
func (r *reconciler) assume(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, port *v1alpha1.XPUPort,
	joins []addresses.Join,
) error {
	limits, err := addresses.LimitsOf(ctx, r.Client, port.Namespace)
	if err != nil {
		return err
	}

	err = r.Allocator.Assume(ctx, port, limits, joins...)
	byFunction := string(claim.DerivedMAC("", d.ID.Node, d.Function))
	refusal, refused := errors.AsType[*reconciling.Refusal](err)
	if !refused || refusal.Reason != v1alpha1.ReasonConflict || port.Spec.MAC != byFunction {
		return err
	}

	port.Spec.MAC = string(claim.DerivedMAC(c.UID, d.ID.Node, d.Function))
	return r.Allocator.Assume(ctx, port, limits, joins...)
}

// buildPort returns the Port that the device needs, without addresses, and the networks that it
// joins. The Port is nil if the device needs none.
func (r *reconciler) buildPort(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device,
) (*v1alpha1.XPUPort, []addresses.Join, error) {
	if !allocatedOn(c.Status.Allocation, d.ID.Node) {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"pool %s is named after node %s, but the allocation is for another node; "+
				"see who wrote the ResourceSlice", d.Pool, d.ID.Node)
	}

	if d.ConfigErr != nil {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"%s", reconciling.OneLine(d.ConfigErr))
	}

	if err := forPods(c); err != nil {
		return nil, nil, err
	}

	joins, err := r.joinsOf(ctx, c, d)
	if err != nil || len(joins) == 0 {
		return nil, nil, err
	}
	for _, join := range joins {
		if err := r.Catalog.Admit(ctx, join.Network, c.Namespace); err != nil {
			return nil, nil, err
		}
	}

	var ofNode v1alpha1.XPUList
	if err := r.Client.List(ctx, &ofNode,
		client.MatchingFields{xpus.ByNode: d.ID.Node}); err != nil {
		return nil, nil, fmt.Errorf("list XPUs of node %s: %w", d.ID.Node, err)
	}

	xpu := claim.XPUOf(ofNode.Items, d.ID.PF)
	if xpu == nil {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonNoXPU,
			"%s", claim.NoXPU(d.ID.Node, d.ID.PF))
	}
	if !xpu.DeletionTimestamp.IsZero() {
		return nil, nil, reconciling.Refuse(v1alpha1.ReasonNoXPU,
			"XPU %s is being deleted; create another one for PF %s", xpu.Name, d.ID.PF)
	}

	mac, err := r.macOf(ctx, c, d, joins, xpu)
	if err != nil {
		return nil, nil, err
	}

	owner := metav1.NewControllerRef(c, resourceapi.SchemeGroupVersion.WithKind("ResourceClaim"))
	owner.BlockOwnerDeletion = nil // the Port must not hold up the claim's deletion

	spec := v1alpha1.XPUPortSpec{
		NodeName: d.ID.Node,
		XPU:      xpu.Name,
		MAC:      mac,
		MTU:      optional.Min(int32(d.Interface.MTU), largestMTU(joins)),
		Rate:     claim.RateOf(d.Interface.VF),
		Claim: v1alpha1.ClaimRef{
			Name: c.Name, UID: c.UID, Request: d.Request, Pod: consumerOf(c),
		},
	}
	if d.Interface.Bond != nil {
		spec.Claim.Bond = d.Interface.Bond.Name
	}
	if len(d.Networks) == 0 {
		spec.Network = joins[0].Network.Name
	}
	for _, network := range d.Networks {
		spec.Networks = append(spec.Networks, v1alpha1.XPUPortNetwork{Name: network.Name})
	}

	port := claim.NewPort(c.Namespace, d.Function, d.ID.DevicePool, spec)

	port.Annotations = map[string]string{addresses.AnnotationAllocation: allocationStamp(c)}
	port.OwnerReferences = []metav1.OwnerReference{*owner}
	return port, joins, nil
}

// forPods refuses a claim that is reserved for something else than pods, such as a PodGroup
// (KEP-5729). The agent would refuse it when the first pod starts, because an interface can be in one
// pod only.
func forPods(c *resourceapi.ResourceClaim) error {
	for _, consumer := range c.Status.ReservedFor {
		if consumer.APIGroup != "" || consumer.Resource != "pods" {
			return reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "the claim is reserved for %s %s, "+
				"but an interface can be in one pod only; give each pod its own claim, by a "+
				"ResourceClaimTemplate that only the pods name", consumer.Resource, consumer.Name)
		}
	}
	return nil
}

// largestMTU returns the largest MTU of these networks, of which there is at least one. It returns
// 0 if one of them has none.
func largestMTU(joins []addresses.Join) int32 {
	largest := ptr.Deref(joins[0].Network.Spec.MTU, 0)
	for _, join := range joins[1:] {
		largest = optional.Max(largest, ptr.Deref(join.Network.Spec.MTU, 0))
	}
	return largest
}

// consumerOf returns the name of the first pod for which the claim is reserved, "" if there is
// none.
func consumerOf(c *resourceapi.ResourceClaim) string {
	for _, consumer := range c.Status.ReservedFor {
		if consumer.APIGroup == "" && consumer.Resource == "pods" {
			return consumer.Name
		}
	}
	return ""
}

// macOf returns the MAC address of the device's Port: the Function's own if the XPU knows it by
// that, or the one that the claim asks for, or one that is derived from the Function if Ports of
// its pool are made ahead in the network, or one that is derived from the claim. It is the same
// each time that the Port is created.
func (r *reconciler) macOf(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device,
	joins []addresses.Join, xpu *v1alpha1.XPU,
) (string, error) {
	own, err := xpus.OwnMAC(ctx, r.Client, xpu, d.ID.Node, d.Function)
	switch {
	case err != nil:
		return "", err
	case own != "" && d.Interface.MAC != "" && string(d.Interface.MAC) != own:
		return "", reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"request %s: mac %s: XPU %s knows Function %s by its permanent address %s; leave mac "+
				"out", d.Request, d.Interface.MAC, xpu.Name, d.Function, own)
	case own != "":
		return own, nil
	}

	if d.Interface.MAC != "" {
		return string(d.Interface.MAC), nil
	}

	of := c.UID
	if len(d.Networks) == 0 { // no Port with tagged networks is made ahead
		ahead, err := pools.MakesAhead(ctx, r.Client, d.ID.DevicePool, joins[0].Network.Name)
		if err != nil {
			return "", err
		}
		if ahead {
			of = ""
		}
	}

	return string(claim.DerivedMAC(of, d.ID.Node, d.Function)), nil
}

// allocatedOn reports whether a pod that uses the allocation can run on the node. The name of the
// node comes from the name of the pool, which an agent chooses. The node selector comes from the
// ResourceSlice, which the API server checks.
func allocatedOn(a *resourceapi.AllocationResult, node string) bool {
	if a.NodeSelector == nil {
		return true
	}
	return slices.ContainsFunc(a.NodeSelector.NodeSelectorTerms,
		func(term corev1.NodeSelectorTerm) bool {
			return !slices.ContainsFunc(term.MatchFields,
				func(r corev1.NodeSelectorRequirement) bool {
					return r.Key == metav1.ObjectNameField &&
						r.Operator == corev1.NodeSelectorOpIn &&
						!slices.Contains(r.Values, node)
				})
		})
}

// joinsOf returns the networks that the device joins, none if it joins none, with the addresses
// that the claim asks for. A refusal also says which fields the claim must not set.
func (r *reconciler) joinsOf(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device,
) ([]addresses.Join, error) {
	var pool v1alpha1.DevicePool // stays empty if it does not exist
	err := r.Client.Get(ctx, client.ObjectKey{Name: d.ID.DevicePool}, &pool)
	if client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("DevicePool %s: %w", d.ID.DevicePool, err)
	}

	names := d.NetworkNames(pool.Spec)
	if err != nil && len(names) == 0 {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotFound,
			"DevicePool %s, which would name the network, does not exist; "+
				"create it, or set network in the InterfaceConfig", d.ID.DevicePool)
	}

	// A pod that has its Function keeps it when the pool begins to allow less.
	attached := deviceCondition(c, d, v1alpha1.ConditionReady).Reason != ""
	if err := d.Allowed(pool.Spec); err != nil && !attached {
		return nil, reconciling.Refuse(v1alpha1.ReasonForbidden, "%s", err)
	}
	if d.Interface.Bond != nil && !attached {
		if err := r.checkBond(ctx, c, d, pool.Spec); err != nil {
			return nil, err
		}
	}

	var joins []addresses.Join
	for i, name := range names {
		network, err := r.Catalog.Usable(ctx, name)
		if err != nil {
			return nil, err
		}
		if !network.DeletionTimestamp.IsZero() {
			return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotFound,
				"XPUNetwork %s is being deleted; name another one in the InterfaceConfig or the "+
					"DevicePool", name)
		}

		join := addresses.Join{Network: network, Wanted: d.Interface.Addresses}
		if len(d.Networks) > 0 {
			join.Wanted = d.Networks[i].Addresses
		}
		joins = append(joins, join)
	}

	return joins, nil
}

// checkBond returns a refusal if the bond of a device cannot work in the networks of its ports.
func (r *reconciler) checkBond(
	ctx context.Context, c *resourceapi.ResourceClaim, d *claim.Device, pool v1alpha1.DevicePoolSpec,
) error {
	if err := d.CheckBond(pool); err != nil {
		return reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "%s", err)
	}

	devices, err := claim.Devices(c)
	if err != nil {
		return fmt.Errorf("ports of bond %s: %w", d.Interface.Bond.Name, err)
	}
	for _, other := range d.BondPorts(devices) {
		var of v1alpha1.DevicePool // stays empty if it does not exist
		err := r.Client.Get(ctx, client.ObjectKey{Name: other.ID.DevicePool}, &of)
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("DevicePool %s: %w", other.ID.DevicePool, err)
		}
		if err := d.CheckBondPort(pool, other, of.Spec); err != nil {
			return reconciling.Refuse(v1alpha1.ReasonInvalidConfig, "%s", err)
		}
	}

	return nil
}

// allocationStamp returns the value of [addresses.AnnotationAllocation] for the claim's allocation.
func allocationStamp(c *resourceapi.ResourceClaim) string {
	if c.Status.Allocation == nil || c.Status.Allocation.AllocationTimestamp == nil {
		return ""
	}
	return c.Status.Allocation.AllocationTimestamp.UTC().Format(time.RFC3339)
}
