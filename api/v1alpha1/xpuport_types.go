// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Labels of an XPUPort, for people to select by.
const (
	// LabelPool is the name of the DevicePool that the Function belongs to.
	LabelPool = GroupName + "/pool"

	// LabelNetwork is that of the XPUNetwork.
	LabelNetwork = GroupName + "/network"
)

// FunctionRef names a Function of a node.
type FunctionRef struct {
	// PCIAddress is the Function's PCI address, "dddd:bb:dd.f"; for an SF it is its PF's.
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

	// UID is the ResourceClaim's, so that a later claim of the same name is another one.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid"`

	// Request is the request of the claim that the Function was allocated for; "request/subrequest"
	// for a prioritized list.
	// +kubebuilder:validation:MaxLength=127
	Request string `json:"request"`

	// Pod is the name of the pod that the claim was reserved for first, if there was one when the
	// Port was made.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod,omitempty"`
}

// PodRef names the pod that a Port is for.
type PodRef struct {
	// Namespace is the pod's.
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace"`

	// Name is the pod's.
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`

	// UID is the pod's.
	// +optional
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=128
	UID types.UID `json:"uid,omitempty"`
}

// XPUPortSpec is decided once, when the Port is made, and never changed.
// +kubebuilder:validation:XValidation:rule="!has(self.ahead) || !self.ahead || !has(self.claim) && !has(self.pod)",message="a port that is made ahead is for no claim and for no pod"
// +kubebuilder:validation:XValidation:rule="!has(self.claim) || !has(self.pod)",message="a port is for a claim or for a pod: set one of them"
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

	// Network is the name of the XPUNetwork that the Port joins.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Network string `json:"network"`

	// MAC is the Function's unicast address while it is attached, "02:00:00:00:00:01".
	// +kubebuilder:validation:Pattern=`^[0-9a-f][02468ace](:[0-9a-f]{2}){5}$`
	MAC string `json:"mac"`

	// MTU is that of the pod's interface in bytes; 0 leaves it as it is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	MTU int32 `json:"mtu,omitempty"`

	// AssignAddresses has xpu-controller give the interface the lowest free address of each of the
	// network's subnets, where addresses is empty. They are in status.addresses.
	// +optional
	AssignAddresses bool `json:"assignAddresses,omitempty"`

	// Addresses are those of the pod's interface, with prefix length: "10.1.0.2/24".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`

	// Claim is the ResourceClaim that the Port is for; absent where the device plugin handed the
	// Function out.
	// +optional
	Claim ClaimRef `json:"claim,omitzero"`

	// Ahead says that the Port was made before any claim has the Function, for a pool with
	// provision: Ahead. A claim's Port of the Function takes its place: with the same MAC, so that
	// the xPU has nothing to change.
	// +optional
	Ahead bool `json:"ahead,omitempty"`

	// Pod is the pod that the Port is for, where the device plugin handed the Function out and the
	// pod is known: it is not when the Port is made by Allocate.
	// +optional
	Pod *PodRef `json:"pod,omitempty"`
}

// XPUPortStatus is what the xPU makes of the Port.
type XPUPortStatus struct {
	// BridgePort is the id of the Port at the OPI agent.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	BridgePort string `json:"bridgePort,omitempty"`

	// Addresses are those of the pod's interface: of the spec, or those that the network's address
	// book gave.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=64
	Addresses []string `json:"addresses,omitempty"`

	// Pod is the pod that the Port came up for: that of spec.pod, or the one that the claim was
	// reserved for first.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	Pod string `json:"pod,omitempty"`

	// Predecessor is the XPUPort that had the MAC address and the addresses before,
	// "namespace/name": that of the pod that a virtual machine was migrated from. While it is
	// there, this Port stands by.
	// +optional
	// +kubebuilder:validation:MaxLength=317
	Predecessor string `json:"predecessor,omitempty"`

	// MTU is the network's in bytes, or the largest that the xPU carries where the network sets
	// none; 0 if that is not known.
	// +optional
	MTU int32 `json:"mtu,omitempty"`

	// Conditions has Ready: True (Up) while the xPU serves the Port. A Port without a claim also has
	// Admitted: True once its network lets it join and it has its addresses.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// XPUPort is what backs a Function on its xPU. For a Function that is allocated to a claim the
// controller makes one, in the claim's namespace, and takes it away when the claim no longer has
// it. For one that the device plugin handed out the node's agent does both, in the namespace that
// the agent runs in, and so for one that is made ahead. Its name is a pure function of node and
// Function, and of whether it was made ahead.
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

// IsAdmitted reports whether an XPUPort may join its network. An XPUPort of a claim may, because it
// was made for that.
func IsAdmitted(port *XPUPort) bool {
	return port.Spec.Claim.Name != "" ||
		meta.IsStatusConditionTrue(port.Status.Conditions, ConditionAdmitted)
}
