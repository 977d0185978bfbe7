// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// FromNamespaces is a set of namespaces, as in the Gateway API.
// +kubebuilder:validation:Enum=All;Selector;None
type FromNamespaces string

const (
	NamespacesFromAll      FromNamespaces = "All"
	NamespacesFromSelector FromNamespaces = "Selector"
	NamespacesFromNone     FromNamespaces = "None"
)

// AllowedNamespaces are the namespaces whose pods may join a network.
// +kubebuilder:validation:XValidation:rule="(self.from == 'Selector') == has(self.selector)",message="selector is for from: Selector, and only for that"
type AllowedNamespaces struct {
	// From is All, None, or Selector for the namespaces that the selector matches.
	From FromNamespaces `json:"from"`

	// Selector matches labels of Namespaces. Every Namespace has the label
	// kubernetes.io/metadata.name.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// Allows reports whether a namespace with these labels is allowed. An error means that the selector
// is invalid.
func (a AllowedNamespaces) Allows(namespace map[string]string) (bool, error) {
	if a.From != NamespacesFromSelector {
		return a.From == NamespacesFromAll, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(a.Selector)
	return err == nil && selector.Matches(labels.Set(namespace)), err
}

// SourceFilter is which source addresses the frames of a network's interfaces may have.
// +kubebuilder:validation:Enum=Addresses;MAC;None
type SourceFilter string

const (
	SourceFilterAddresses SourceFilter = "Addresses"
	SourceFilterMAC       SourceFilter = "MAC"
	SourceFilterNone      SourceFilter = "None"
)

// XPUNetworkSpec describes an L2 segment. The xPUs serve it as a LogicalBridge.
// +kubebuilder:validation:XValidation:rule="!has(self.routed) || has(self.subnets) && self.subnets.size() > 0",message="routed needs at least one subnet in spec.subnets, because the gateway has an address of each subnet",fieldPath=".routed"
// +kubebuilder:validation:XValidation:rule="!has(self.gateways) || !has(self.subnets) || self.gateways.all(g, !isIP(g) || self.subnets.exists(s, !isCIDR(s) || cidr(s).containsIP(g)))",message="the gateways must be addresses of the subnets, because pods reach them directly",fieldPath=".gateways"
// +kubebuilder:validation:XValidation:rule="has(self.routed) == has(oldSelf.routed) && (!has(self.routed) || self.routed.vrf == oldSelf.routed.vrf)",message="routed cannot be added, changed or removed: make another XPUNetwork",fieldPath=".routed"
type XPUNetworkSpec struct {
	// VLAN is the segment's VLAN id on the xPUs, 1-4094 (IEEE 802.1Q). Two networks must not have
	// the same VLAN. In a tenant cluster VLAN has no effect and may be left out, because the infra
	// cluster gives the network a segment of the tenant's range.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4094
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="vlan cannot be changed: make another XPUNetwork"
	VLAN int32 `json:"vlan,omitempty"`

	// AllowedNamespaces are the namespaces whose pods may join the network, by a claim, an extended
	// resource or a NetworkAttachmentDefinition. A pod that has joined stays in the network when
	// its namespace is not allowed any more.
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces"`

	// VNI joins the segment across xPUs by VXLAN, 1-16777215 (RFC 7348). Without a VNI the segment
	// ends at each xPU. In a tenant cluster VNI has no effect, like vlan.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16777215
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="vni cannot be changed: make another XPUNetwork"
	VNI *int32 `json:"vni,omitempty"`

	// MTU is the MTU of the pods' interfaces in bytes, unless an InterfaceConfig asks for less. If
	// MTU is absent and the network has a VNI, the interfaces get the MTU between the xPUs minus
	// the overhead of VXLAN, if the xPUs' agents report that MTU. An xPU that carries less than the
	// network's MTU does not serve the network.
	// +optional
	// +kubebuilder:validation:Minimum=1280
	// +kubebuilder:validation:Maximum=9216
	MTU *int32 `json:"mtu,omitempty"`

	// SourceFilter is which source addresses the frames of an interface may have. It applies to
	// xPUs whose agents filter source addresses, such as opi-bridge. Addresses (the default) allows
	// the interface's MAC address and IP addresses, also in ARP and Neighbor Discovery, and no
	// protocol but these and IP. MAC allows the interface's MAC address, for pods that have further
	// addresses or use other protocols. None allows any source, for pods that bridge or route. If
	// the XPUPort of an interface does not know its addresses, Addresses works like MAC.
	// +optional
	SourceFilter SourceFilter `json:"sourceFilter,omitempty"`

	// Subnets are the segment's prefixes in CIDR notation, at most one IPv4 and one IPv6 prefix. An
	// interface that asks for no address gets the lowest free address of each subnet. Addresses of
	// gateways, reserved addresses, and the IPv4 broadcast address are never assigned, and an
	// interface must not ask for them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self.all(s, isCIDR(s) && cidr(s) == cidr(s).masked())",message="each subnet must be a prefix in CIDR notation without host bits, such as 10.1.0.0/24"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !isCIDR(s) || self.filter(o, isCIDR(o) && cidr(o).ip().family() == cidr(s).ip().family()).size() == 1)",message="at most one IPv4 and one IPv6 subnet"
	Subnets []string `json:"subnets,omitempty"`

	// Gateways are the routers' addresses, at most one of each address family. If the family of a
	// subnet has no gateway here, the first address of the subnet is taken as the gateway's.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=39
	// +kubebuilder:validation:XValidation:rule="self.all(a, isIP(a))",message="each gateway must be an address, such as 10.1.0.1"
	Gateways []string `json:"gateways,omitempty"`

	// Reserved are addresses that interfaces do not get: prefixes, such as "10.1.0.0/28", or
	// ranges, such as "10.1.0.10-10.1.0.19".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=32
	// +kubebuilder:validation:items:MaxLength=79
	// +kubebuilder:validation:XValidation:rule="self.all(r, isCIDR(r) || r.split('-').size() == 2 && r.split('-').all(a, isIP(a)))",message="each entry must be a prefix such as 10.1.0.0/28 or a range such as 10.1.0.10-10.1.0.19"
	Reserved []string `json:"reserved,omitempty"`

	// Routed makes each xPU that serves the network the network's gateway: it answers for the
	// addresses of the gateways, and routes between the networks of the same VRF. It needs an OPI
	// agent with gateways, such as opi-bridge. Pods of two xPUs reach each other if the networks
	// have a VNI; see "Between xPUs" in docs/how-to/route-between-networks.md.
	// +optional
	Routed *RoutedNetwork `json:"routed,omitempty"`
}

// RoutedNetwork says with which networks a network is routed.
type RoutedNetwork struct {
	// VRF is the name of the routing domain (Virtual Routing and Forwarding). Networks with the
	// same VRF reach each other, and their subnets must not overlap. Networks with different VRFs
	// never reach each other, and may have the same subnets. In a tenant cluster, the name belongs
	// to the tenant.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:XValidation:rule="self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",message="vrf must have lower-case letters, digits, '-' and '.' only, and begin and end with a letter or digit, such as blue"
	VRF string `json:"vrf"`
}

// XPUNetworkFailure is the reason why an xPU that needs the network does not serve it.
type XPUNetworkFailure struct {
	// XPU is the XPU's name.
	XPU string `json:"xpu"`

	// Message is the reason.
	Message string `json:"message"`
}

// MaxNetworkFailures bounds XPUNetworkStatus.Failures.
const MaxNetworkFailures = 5

// XPUNetworkStatus is the state of the network on the xPUs. An xPU serves the network as long as it
// has an XPUPort in the network. If xPUs route between the network and others of a VRF, an xPU also
// serves it as long as it has an XPUPort in one of these.
type XPUNetworkStatus struct {
	// XPUs is how many XPUs have to serve the network.
	// +optional
	// +kubebuilder:default=0
	XPUs int32 `json:"xpus"`

	// ReadyXPUs is how many of these XPUs serve the network.
	// +optional
	// +kubebuilder:default=0
	ReadyXPUs int32 `json:"readyXPUs"`

	// Failures are the failures of the other XPUs, at most the first 5 by name.
	// +optional
	// +listType=map
	// +listMapKey=xpu
	Failures []XPUNetworkFailure `json:"failures,omitempty"`

	// Conditions has Ready: True (Up) when every xPU that needs the network and can be reached
	// serves it.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPUNetwork is an L2 segment that the xPUs serve and the interfaces of pods join.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=xnet
// +kubebuilder:printcolumn:name="VLAN",type=integer,JSONPath=`.spec.vlan`
// +kubebuilder:printcolumn:name="VNI",type=integer,JSONPath=`.spec.vni`
// +kubebuilder:printcolumn:name="Subnet",type=string,JSONPath=`.spec.subnets[0]`
// +kubebuilder:printcolumn:name="Second Subnet",type=string,JSONPath=`.spec.subnets[1]`,priority=1
// +kubebuilder:printcolumn:name="VRF",type=string,JSONPath=`.spec.routed.vrf`,priority=1
// +kubebuilder:printcolumn:name="xPUs",type=integer,JSONPath=`.status.xpus`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="the name of an XPUNetwork may have at most 63 characters"
// +kubebuilder:validation:XValidation:rule="has(self.spec.vlan) == has(oldSelf.spec.vlan)",message="vlan cannot be added or removed: make another XPUNetwork",fieldPath=".spec.vlan"
// +kubebuilder:validation:XValidation:rule="has(self.spec.vni) == has(oldSelf.spec.vni)",message="vni cannot be added or removed: make another XPUNetwork",fieldPath=".spec.vni"
type XPUNetwork struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   XPUNetworkSpec   `json:"spec"`
	Status XPUNetworkStatus `json:"status,omitempty"`
}

// XPUNetworkList is a list of XPUNetworks.
//
// +kubebuilder:object:root=true
type XPUNetworkList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []XPUNetwork `json:"items"`
}
