// SPDX-License-Identifier: Apache-2.0

package model

import (
	"strings"

	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Index is one of the ways to find Ports.
type Index int

// The indexes, with their keys.
const (
	ByClaim     Index = iota // namespace and name of the ResourceClaim; see [ClaimKey]
	ByFunction               // see [FunctionKey]
	ByMAC                    // MAC address in lower case with colons
	ByNetwork                // name of the XPUNetwork
	ByXPU                    // name of the XPU
	ByBridge                 // see [BridgeKey]
	ByPool                   // name of the DevicePool, for Ports that were made ahead
	ByBond                   // see [BondKey], for Ports of bonds
	ByNamespace              // namespace of the pod; see [NamespaceOf]

	numberOfIndexes = iota
)

// keys are the keys of a Port in each index, "" where the index does not have it.
type keys [numberOfIndexes]string

// keysOf returns the keys of a Port. A Port in several networks is several times in some indexes,
// so that there is an element for each of its networks.
func keysOf(p *v1alpha1.XPUPort) []keys {
	all := []keys{{
		ByClaim:    ClaimKey(p),
		ByFunction: FunctionKeyOf(p),
		ByMAC:      MACKey(p),
		ByXPU:      p.Spec.XPU,
		ByPool:     poolKey(p),
		ByBond:     BondKey(p),

		ByNamespace: NamespaceOf(p),
	}}

	for i, network := range p.Spec.AllNetworks() {
		if i > 0 {
			all = append(all, keys{})
		}
		all[i][ByNetwork], all[i][ByBridge] = network, BridgeKey(network, p.Spec.XPU)
	}

	return all
}

// ClaimKey is the namespace and name of the Port's claim, "" for a Port without one.
func ClaimKey(p *v1alpha1.XPUPort) string {
	if p.Spec.Claim.Name == "" {
		return ""
	}
	return client.ObjectKey{Namespace: p.Namespace, Name: p.Spec.Claim.Name}.String()
}

// NamespaceOf is the namespace of the Port's pod. It is "" for a Port that was made ahead, and
// during the kubelet's Allocate call, when the pod is unknown.
func NamespaceOf(p *v1alpha1.XPUPort) string {
	if p.Spec.Claim.Name != "" {
		return p.Namespace
	}
	return ptr.Deref(p.Spec.Pod, v1alpha1.PodRef{}).Namespace
}

// BondKey identifies the bond of a Port's Function: the node, the namespace and UID of the claim,
// and the name of the bond. The node's name distinguishes tenants, whose claims may have the same
// UID. The key is "" for a Port without a bond.
func BondKey(p *v1alpha1.XPUPort) string {
	if p.Spec.Claim.Bond == "" {
		return ""
	}
	return strings.Join([]string{
		p.Spec.NodeName, p.Namespace, string(p.Spec.Claim.UID), p.Spec.Claim.Bond,
	}, "/")
}

// FunctionKey identifies a Function in the cluster.
func FunctionKey(node string, f function.ID) string { return node + "/" + f.String() }

// FunctionKeyOf is the [FunctionKey] of a Port's Function.
func FunctionKeyOf(p *v1alpha1.XPUPort) string {
	return FunctionKey(p.Spec.NodeName, claim.FunctionOf(p.Spec.Function))
}

// MACKey is the Port's MAC address, "" if spec.mac cannot be parsed, because the API server lets
// some values pass that are no MAC addresses.
func MACKey(p *v1alpha1.XPUPort) string {
	mac, err := function.ParseMAC(p.Spec.MAC)
	if err != nil {
		return ""
	}
	return string(mac)
}

func poolKey(p *v1alpha1.XPUPort) string {
	if !p.Spec.Ahead {
		return ""
	}
	return p.Labels[v1alpha1.LabelPool]
}

// BridgeKey identifies the logical bridge of a network at an XPU, by the names of both, which have
// no slash.
func BridgeKey(network, xpu string) string { return network + "/" + xpu }
