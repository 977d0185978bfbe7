// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Labels of an XPUPort, by which people can select XPUPorts.
const (
	// LabelPool is the name of the DevicePool that the Function belongs to.
	LabelPool = GroupName + "/pool"

	// LabelNetwork is the name of the XPUNetwork. A Port with tagged networks does not have it.
	LabelNetwork = GroupName + "/network"
)

// FunctionRef names a Function of a node.
type FunctionRef struct {
	// PCIAddress is the Function's PCI address, "dddd:bb:dd.f". For an SF it is the PF's address.
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`
	PCIAddress string `json:"pciAddress"`

	// Subfunction is the sfnum of an SF; absent for a VF.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=4294967295
	Subfunction *int64 `json:"subfunction,omitempty"`
}

// ClaimRef names the ResourceClaim that a Port is for, in the Port's namespace.
type ClaimRef struct {
	// Name is the ResourceClaim's name.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// UID is the ResourceClaim's UID, which distinguishes it from a later claim of the same name.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid"`

	// Request is the request of the claim for which the Function was allocated. It is
	// "request/subrequest" for a prioritized list.
	// +kubebuilder:validation:MaxLength=127
	Request string `json:"request"`

	// Bond is the name of the bond of which the Function is a port in the pod. The Ports of one
	// claim with the same bond have the same addresses. It is absent if the Function has no bond.
	// +optional
	// +kubebuilder:validation:MaxLength=15
	Bond string `json:"bond,omitempty"`

	// Pod is the name of the pod for which the claim was reserved first, if there was one when the
	// Port was made.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod,omitempty"`
}

// PodRef names the pod that a Port is for.
type PodRef struct {
	// Namespace is the pod's namespace.
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`

	// Name is the pod's name.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// UID is the pod's UID.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid,omitempty"`
}

// PortRate says to what the node of a Function limits what the Function sends, in Mbit/s.
// +kubebuilder:validation:XValidation:rule="!has(self.maximum) || self.maximum == 0 || !has(self.guaranteed) || self.guaranteed <= self.maximum",message="guaranteed must not be more than maximum"
type PortRate struct {
	// Guaranteed is the rate that the Function can always send: vf.minTxRate of the InterfaceConfig,
	// or min_tx_rate of the network configuration. 0 guarantees none.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Guaranteed int32 `json:"guaranteed,omitempty"`

	// Maximum is the highest rate at which the Function sends: vf.maxTxRate of the InterfaceConfig,
	// the bandwidth that the claim has of a shared PF, or max_tx_rate of the network configuration.
	// 0 is no limit.
	// +optional
	// +kubebuilder:validation:Minimum=0
	Maximum int32 `json:"maximum,omitempty"`
}

// XPUPortNetwork is a network that a Port joins with a VLAN tag.
type XPUPortNetwork struct {
	// Name is the name of the XPUNetwork.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// Addresses are the addresses that the pod may use in this network, with prefix length:
	// "10.1.0.2/24".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`
}

// XPUPortNetworkStatus is a network that a Port has joined with a VLAN tag.
type XPUPortNetworkStatus struct {
	// Name is the name of the XPUNetwork.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// VLAN is the tag of the Function's frames, 1-4094: the VLAN that the network has at the xPU.
	VLAN int32 `json:"vlan"`

	// MTU is the network's MTU in bytes, as in the status of a Port with one network.
	// +optional
	MTU int32 `json:"mtu,omitempty"`

	// Addresses are the addresses that the pod may use in this network, with prefix length.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`
}

// AllNetworks returns the names of the networks that the Port joins, with a tag or without.
func (s *XPUPortSpec) AllNetworks() []string {
	if s.Network != "" {
		return []string{s.Network}
	}
	var names []string
	for _, network := range s.Networks {
		names = append(names, network.Name)
	}
	return names
}

// IsTrunk reports whether the Function's frames have VLAN tags.
func (s *XPUPortSpec) IsTrunk() bool { return len(s.Networks) > 0 }

// XPUPortSpec is set when the Port is made, and never changed.
// +kubebuilder:validation:XValidation:rule="!has(self.ahead) || !self.ahead || !has(self.claim) && !has(self.pod)",message="a port that is made ahead is for no claim and for no pod"
// +kubebuilder:validation:XValidation:rule="!has(self.claim) || !has(self.pod)",message="a port is for a claim or for a pod: set one of them"
// +kubebuilder:validation:XValidation:rule="has(self.network) != has(self.networks)",message="a port joins one network, or several tagged ones: set network or networks"
// +kubebuilder:validation:XValidation:rule="!has(self.networks) || !has(self.addresses) && (!has(self.assignAddresses) || !self.assignAddresses)",message="the addresses of a port with networks are in networks: leave addresses and assignAddresses out"
// +kubebuilder:validation:XValidation:rule="!has(self.networks) || has(self.claim)",message="networks are for the port of a claim: set network for another port"
// +kubebuilder:validation:XValidation:rule="self == oldSelf",message="the spec of an XPUPort cannot be changed: delete the port and let the controller make another"
type XPUPortSpec struct {
	// NodeName is the node that has the Function.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	NodeName string `json:"nodeName"`

	// Function is the Function that the Port serves.
	Function FunctionRef `json:"function"`

	// XPU is the name of the XPU that serves the Port.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	XPU string `json:"xpu"`

	// Network is the name of the XPUNetwork that the Port joins. The Function's frames have no VLAN
	// tag.
	// +optional
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network,omitempty"`

	// Networks are the XPUNetworks that the Port joins with tags: the Function's frames have the
	// VLAN tags in status.networks, and frames without a tag are dropped, because a BridgePort of
	// OPI with tagged networks has no other one. Exactly one of network and networks is set.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=64
	Networks []XPUPortNetwork `json:"networks,omitempty"`

	// MAC is the Function's unicast MAC address while it is attached, "02:00:00:00:00:01".
	// +kubebuilder:validation:Pattern=`^[0-9a-f][02468ace](:[0-9a-f]{2}){5}$`
	MAC string `json:"mac"`

	// MTU is the MTU of the pod's interface in bytes; 0 leaves the MTU unchanged.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MTU int32 `json:"mtu,omitempty"`

	// Rate is what the claim of the Function asks for. Quotas of bandwidth count it. Absent means that
	// no rate is known, which quotas count as one without a limit.
	// +optional
	Rate *PortRate `json:"rate,omitempty"`

	// AssignAddresses makes xpu-controller assign the lowest free address of each of the network's
	// subnets to the interface, if addresses is empty. status.addresses has the result.
	// +optional
	AssignAddresses bool `json:"assignAddresses,omitempty"`

	// Addresses are the addresses of the pod's interface, with prefix length: "10.1.0.2/24".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`

	// Claim is the ResourceClaim that the Port is for. It is absent if the device plugin allocated
	// the Function.
	// +optional
	Claim ClaimRef `json:"claim,omitzero"`

	// Ahead is true for a Port that was made before a claim has the Function, for a pool with
	// provision: Ahead. A claim's Port for the Function replaces it with the same MAC, so that the
	// xPU has nothing to change.
	// +optional
	Ahead bool `json:"ahead,omitempty"`

	// Pod is the pod that the Port is for, if the device plugin allocated the Function and the pod
	// is known. The pod is not known if the Port is made by Allocate.
	// +optional
	Pod *PodRef `json:"pod,omitempty"`
}

// XPUPortStatus is the state of the Port on the xPU.
type XPUPortStatus struct {
	// BridgePort is the id of the Port at the OPI agent.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	BridgePort string `json:"bridgePort,omitempty"`

	// Addresses are the addresses of the pod's interface. They come from the spec or from the
	// network's address book.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`

	// Pod is the pod for which the Port came up: the pod in spec.pod, or the pod for which the
	// claim was reserved first.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod,omitempty"`

	// Predecessor is the XPUPort that had the MAC address and the IP addresses before,
	// "namespace/name". It belongs to the pod from which a virtual machine was migrated. While the
	// predecessor exists, this Port stands by.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	Predecessor string `json:"predecessor,omitempty"`

	// MTU is the network's MTU in bytes. If the network sets none, it is the largest MTU that the
	// xPU carries, or 0 if that is not known. For a Port with networks it is the largest of their
	// MTUs, or 0 if one of them is not known.
	// +optional
	MTU int32 `json:"mtu,omitempty"`

	// Networks are the networks that the Port has joined with tags, if the spec has networks.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=64
	Networks []XPUPortNetworkStatus `json:"networks,omitempty"`

	// Conditions has Ready: True (Up) while the xPU serves the Port. A Port without a claim also
	// has Admitted: True once its network allows it to join and it has its addresses.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPUPort is the port of a Function on its xPU. For a Function that is allocated to a claim, the
// controller makes the XPUPort in the claim's namespace, and deletes it when the claim no longer
// has the Function. For a Function that the device plugin allocated, and for an XPUPort that is
// made ahead, the node's agent makes and deletes the XPUPort in the agent's namespace. The name
// depends only on the node and the Function, and on whether the XPUPort was made ahead.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:shortName=xport
// +kubebuilder:selectablefield:JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Node",type=string,JSONPath=`.spec.nodeName`
// +kubebuilder:printcolumn:name="Function",type=string,JSONPath=`.spec.function.pciAddress`
// +kubebuilder:printcolumn:name="Network",type=string,JSONPath=`.spec.network`
// +kubebuilder:printcolumn:name="Claim",type=string,JSONPath=`.spec.claim.name`
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.status.pod`
// +kubebuilder:printcolumn:name="Address",type=string,JSONPath=`.status.addresses[0]`
// +kubebuilder:printcolumn:name="Second Address",type=string,JSONPath=`.status.addresses[1]`,priority=1
// +kubebuilder:printcolumn:name="Tagged Networks",type=string,JSONPath=`.spec.networks[*].name`,priority=1
// +kubebuilder:printcolumn:name="MAC",type=string,JSONPath=`.spec.mac`,priority=1
// +kubebuilder:printcolumn:name="XPU",type=string,JSONPath=`.spec.xpu`,priority=1
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type XPUPort struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   XPUPortSpec   `json:"spec"`
	Status XPUPortStatus `json:"status,omitempty"`
}

// XPUPortList is a list of XPUPorts.
//
// +kubebuilder:object:root=true
type XPUPortList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []XPUPort `json:"items"`
}

// IsAdmitted reports whether an XPUPort may join its network. An XPUPort of a claim may always
// join, because xpu-controller made it to join the network.
func IsAdmitted(port *XPUPort) bool {
	return port.Spec.Claim.Name != "" ||
		meta.IsStatusConditionTrue(port.Status.Conditions, ConditionAdmitted)
}
