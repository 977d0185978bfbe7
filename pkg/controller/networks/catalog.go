// SPDX-License-Identifier: Apache-2.0

package networks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/addresses"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Catalog finds the networks that Ports may join.
type Catalog struct {
	Client client.Client // reads come from the cache
	// Segments is whether VLAN and VNI have a meaning. They have none in a tenant cluster.
	Segments bool
}

// byID is the index of XPUNetworks by [keys]. It exists if there are segments.
const byID = "id"

// AddIndexes adds the index of the cache that a catalog with segments reads.
func AddIndexes(ctx context.Context, indexer client.FieldIndexer) error {
	return reconciling.AddIndex(ctx, indexer, &v1alpha1.XPUNetwork{}, byID, keys)
}

// Usable returns the network, or a refusal if no Port can join it.
func (c Catalog) Usable(ctx context.Context, name string) (*v1alpha1.XPUNetwork, error) {
	var network v1alpha1.XPUNetwork
	err := c.Client.Get(ctx, client.ObjectKey{Name: name}, &network)
	if apierrors.IsNotFound(err) {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotFound,
			"XPUNetwork %s does not exist; create it, or name another one in the "+
				"InterfaceConfig, the CNI configuration or the DevicePool", name)
	}

	if err != nil {
		return nil, fmt.Errorf("XPUNetwork %s: %w", name, err)
	}

	err = c.check(ctx, &network)
	if refusal, ok := errors.AsType[*reconciling.Refusal](err); ok {
		return nil, reconciling.Refuse(v1alpha1.ReasonNetworkNotReady,
			"XPUNetwork %s cannot be used: %s", name, refusal.Message)
	}

	return &network, err
}

// Admit returns a refusal if pods of the namespace may not join the network. The namespace is ""
// if the pod is not known yet.
func (c Catalog) Admit(ctx context.Context, network *v1alpha1.XPUNetwork, namespace string) error {
	allowed := network.Spec.AllowedNamespaces
	if allowed.From == v1alpha1.NamespacesFromAll {
		return nil
	}

	if namespace == "" {
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s is not for pods of all namespaces, and the kubelet does not say which "+
				"pod it allocates for; use provisionAt: Add in the DevicePool", network.Name)
	}

	pods := namespaceMetadata()
	err := c.Client.Get(ctx, client.ObjectKey{Name: namespace}, pods)
	if apierrors.IsNotFound(err) {
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"namespace %s, which XPUNetwork %s must allow, is not known yet", namespace,
			network.Name)
	}
	if err != nil {
		return fmt.Errorf("namespace %s: %w", namespace, err)
	}

	ok, err := allowed.Allows(pods.Labels)
	switch {
	case err != nil:
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s: allowedNamespaces.selector: %s", network.Name, err)
	case !ok:
		return reconciling.Refuse(v1alpha1.ReasonForbidden,
			"XPUNetwork %s does not let pods of namespace %s join; ask its administrator to allow "+
				"the namespace in spec.allowedNamespaces, or name another network",
			network.Name, namespace)
	}

	return nil
}

// Rivals returns the networks that have a VLAN, VNI or VRF in common with this one, including this
// one.
func (c Catalog) Rivals(ctx context.Context, o client.Object) []reconcile.Request {
	if !c.Segments {
		return nil
	}

	var requests []reconcile.Request
	for _, key := range keys(o.(*v1alpha1.XPUNetwork)) {
		requests = append(requests,
			reconciling.Requests(ctx, c.Client, &v1alpha1.XPUNetworkList{},
				client.MatchingFields{byID: key})...)
	}

	return requests
}

// with returns the networks that have one of the [keys]. The caller must not change them.
func (c Catalog) with(ctx context.Context, key string) (found []*v1alpha1.XPUNetwork, err error) {
	var all v1alpha1.XPUNetworkList
	if err := c.Client.List(ctx, &all, client.MatchingFields{byID: key},
		client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUNetworks with %s: %w", key, err)
	}

	for i := range all.Items {
		found = append(found, &all.Items[i])
	}
	return found, nil
}

// check returns a refusal if the network's segment or its subnets belong to an older network.
func (c Catalog) check(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	return cmp.Or(c.checkSegment(ctx, n), c.checkRouted(ctx, n))
}

// checkRouted returns a refusal if the xPUs cannot be the network's gateway, or if an older network
// of the same VRF has a subnet that overlaps with one of this network. It checks nothing in a
// tenant cluster, because the infra cluster decides.
func (c Catalog) checkRouted(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	if !c.Segments || n.Spec.Routed == nil {
		return nil
	}

	gateways, err := addresses.Gateways(n)
	if err != nil {
		return err
	}
	if len(gateways) == 0 { // the API server refuses such a network
		return reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"spec.routed needs a subnet in spec.subnets")
	}

	same, err := c.with(ctx, vrfKey(n.Spec.Routed.VRF))
	if err != nil {
		return err
	}

	for _, other := range same {
		if other.Name == n.Name || !reconciling.Older(other, n) {
			continue
		}
		if mine, theirs := overlap(n.Spec.Subnets, other.Spec.Subnets); mine != "" {
			return reconciling.Refuse(v1alpha1.ReasonConflict,
				"spec.subnets: %s overlaps with %s of XPUNetwork %s, which is older and in the "+
					"same VRF %s; use another subnet or another VRF", mine, theirs, other.Name,
				n.Spec.Routed.VRF)
		}
	}

	return nil
}

// overlap returns a subnet of each list that overlap, "" if none do.
func overlap(some, others []string) (one, other string) {
	for _, a := range some {
		for _, b := range others {
			p, err := netip.ParsePrefix(a)
			q, errOther := netip.ParsePrefix(b)
			if err == nil && errOther == nil && p.Overlaps(q) {
				return a, b
			}
		}
	}
	return "", ""
}

// keys returns what other networks may be in conflict about.
func keys(n *v1alpha1.XPUNetwork) []string {
	all := segmentKeys(n)
	if n.Spec.Routed != nil {
		all = append(all, vrfKey(n.Spec.Routed.VRF))
	}
	return all
}

func vrfKey(vrf string) string { return "VRF " + vrf }

// checkSegment returns a refusal if the network has no VLAN, or if an older network has its VLAN or
// VNI. It checks nothing in a tenant cluster, where VLAN and VNI have no meaning.
func (c Catalog) checkSegment(ctx context.Context, n *v1alpha1.XPUNetwork) error {
	if !c.Segments {
		return nil
	}
	if n.Spec.VLAN == 0 {
		return reconciling.Refuse(v1alpha1.ReasonInvalidConfig,
			"spec.vlan is not set; make another XPUNetwork with it")
	}

	for _, key := range segmentKeys(n) {
		same, err := c.with(ctx, key)
		if err != nil {
			return err
		}

		for _, other := range same {
			if other.Name != n.Name && reconciling.Older(other, n) {
				return reconciling.Refuse(v1alpha1.ReasonConflict,
					"%s belongs to XPUNetwork %s, which is older and stays as it is; make this network "+
						"anew with a free one, or have pods name the other network", key, other.Name)
			}
		}
	}

	return nil
}

// segmentKeys returns the identifiers that no two networks may have in common.
func segmentKeys(n *v1alpha1.XPUNetwork) []string {
	keys := []string{fmt.Sprintf("VLAN %d", n.Spec.VLAN)}
	if n.Spec.VNI != nil {
		keys = append(keys, fmt.Sprintf("VNI %d", *n.Spec.VNI))
	}
	return keys
}

// namespaceMetadata is an empty Namespace for reads of metadata, because only the labels matter.
func namespaceMetadata() *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
	}
}

// AtAgents returns an XPUNetwork of the installation, which is usable, in the form for OPI agents.
func AtAgents(installation opi.Installation, network *v1alpha1.XPUNetwork) opi.Network {
	n := installation.Network(network.Name, network.Spec.VLAN, network.Spec.VNI)
	n.MTU = int(ptr.Deref(network.Spec.MTU, 0))
	n.SourceFilter = opi.SourceFilter(network.Spec.SourceFilter)
	if routed := network.Spec.Routed; routed != nil {
		n.Gateway = &opi.Gateway{
			VRF: installation.VRFID(routed.VRF), MAC: installation.GatewayMAC(),
		}
		// An agent is never asked for a gateway without addresses.
		n.Gateway.Prefixes, _ = addresses.Gateways(network)
	}
	return n
}
