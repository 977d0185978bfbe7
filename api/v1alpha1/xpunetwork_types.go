// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// FromNamespaces says which namespaces are meant, in the words of Gateway API's FromNamespaces.
// +kubebuilder:validation:Enum=All;Selector;None
type FromNamespaces string

const (
	NamespacesFromAll      FromNamespaces = "All"
	NamespacesFromSelector FromNamespaces = "Selector"
	NamespacesFromNone     FromNamespaces = "None"
)

// AllowedNamespaces says from which namespaces pods may join a network.
// +kubebuilder:validation:XValidation:rule="(self.from == 'Selector') == has(self.selector)",message="selector is for from: Selector, and only for that"
type AllowedNamespaces struct {
	// From is All, None, or Selector for those that the selector matches.
	From FromNamespaces `json:"from"`

	// Selector matches labels of Namespaces. Every Namespace has the label
	// kubernetes.io/metadata.name.
	// +optional
	Selector *metav1.LabelSelector `json:"selector,omitempty"`
}

// Allows says whether a namespace with these labels is one of them. The error says that the
// selector is invalid.
func (a AllowedNamespaces) Allows(namespace map[string]string) (bool, error) {
	if a.From != NamespacesFromSelector {
		return a.From == NamespacesFromAll, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(a.Selector)
	return err == nil && selector.Matches(labels.Set(namespace)), err
}

// SourceFilter says which source addresses the frames of a network's interfaces may have.
// +kubebuilder:validation:Enum=Addresses;MAC;None
type SourceFilter string

const (
	SourceFilterAddresses SourceFilter = "Addresses"
	SourceFilterMAC       SourceFilter = "MAC"
	SourceFilterNone      SourceFilter = "None"
)

// XPUNetworkSpec describes an L2 segment. The xPUs serve it as a LogicalBridge.
type XPUNetworkSpec struct {
	// VLAN is the segment's VLAN id on the xPUs, 1-4094 (IEEE 802.1Q). No two networks may share
	// one. In a tenant cluster it means nothing and may be left out: the infra cluster gives the
	// network a segment of the tenant's range.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=4094
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="vlan cannot be changed: make another XPUNetwork"
	VLAN int32 `json:"vlan,omitempty"`

	// AllowedNamespaces are the namespaces whose pods may join the network, by a claim, an extended
	// resource or a NetworkAttachmentDefinition. A pod that has joined stays when its namespace is
	// not allowed any more.
	AllowedNamespaces AllowedNamespaces `json:"allowedNamespaces"`

	// VNI joins the segment across xPUs by VXLAN, 1-16777215 (RFC 7348). Without it the segment
	// ends at each xPU. In a tenant cluster it means nothing, like vlan.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=16777215
	// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="vni cannot be changed: make another XPUNetwork"
	VNI *int32 `json:"vni,omitempty"`

	// MTU is that of the pods' interfaces in bytes, unless an InterfaceConfig asks for less.
	// Without it that of a network with a VNI is what VXLAN leaves of the MTU between the xPUs,
	// where their agents tell it. An xPU that carries less does not serve the network.
	// +optional
	// +kubebuilder:validation:Minimum=1280
	// +kubebuilder:validation:Maximum=9216
	MTU *int32 `json:"mtu,omitempty"`

	// SourceFilter says which source addresses the frames of an interface may have, for the xPUs'
	// agents that filter them, such as opi-bridge: its MAC address and its addresses, those claimed
	// by ARP and Neighbor Discovery among them, and nothing but these and IP (Addresses, the
	// default); its MAC address (MAC), for pods that have further addresses or other protocols; any
	// (None), for pods that bridge or route. An interface whose addresses are not known to its
	// XPUPort is one of a network with MAC.
	// +optional
	SourceFilter SourceFilter `json:"sourceFilter,omitempty"`

	// Subnets are the segment's prefixes in CIDR notation, at most one IPv4 and one IPv6. An
	// interface that asks for no address gets the lowest free one of each. The addresses of
	// gateways, those reserved, and the IPv4 broadcast address are never given, nor may an
	// interface ask for them.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=2
	// +kubebuilder:validation:items:MaxLength=43
	// +kubebuilder:validation:XValidation:rule="self.all(s, isCIDR(s) && cidr(s) == cidr(s).masked())",message="each subnet must be a prefix in CIDR notation without host bits, such as 10.1.0.0/24"
	// +kubebuilder:validation:XValidation:rule="self.all(s, !isCIDR(s) || self.filter(o, isCIDR(o) && cidr(o).ip().family() == cidr(s).ip().family()).size() == 1)",message="at most one IPv4 and one IPv6 subnet"
	Subnets []string `json:"subnets,omitempty"`

	// Gateways are the routers' addresses, at most one of each family. Without one of its family
	// the first address of a subnet is taken to be the gateway's.
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
}

// XPUNetworkFailure is why an xPU that needs the network does not serve it.
type XPUNetworkFailure struct {
	// XPU is the XPU's name.
	XPU string `json:"xpu"`

	// Message says why.
	Message string `json:"message"`
}

// MaxNetworkFailures bounds XPUNetworkStatus.Failures.
const MaxNetworkFailures = 5

// XPUNetworkStatus is how the xPUs serve the network. An xPU does from the first to the last
// XPUPort of the network there.
type XPUNetworkStatus struct {
	// XPUs is how many XPUs have XPUPorts in the network.
	// +optional
	XPUs int32 `json:"xpus"`

	// ReadyXPUs is how many of these serve it.
	// +optional
	ReadyXPUs int32 `json:"readyXPUs"`

	// Failures are the first of the others by name, at most 5.
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

// XPUNetwork is an L2 segment that the xPUs serve and pods' interfaces join.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=xnet
// +kubebuilder:printcolumn:name="VLAN",type=integer,JSONPath=`.spec.vlan`
// +kubebuilder:printcolumn:name="VNI",type=integer,JSONPath=`.spec.vni`
// +kubebuilder:printcolumn:name="Subnet",type=string,JSONPath=`.spec.subnets[0]`
// +kubebuilder:printcolumn:name="Second Subnet",type=string,JSONPath=`.spec.subnets[1]`,priority=1
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
