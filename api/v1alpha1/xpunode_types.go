// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Shortage is a PF that does not have the VFs, or cannot offer the SFs, that a DevicePool asks for.
type Shortage struct {
	// PF is the PCI address of the PF.
	// +kubebuilder:validation:MaxLength=32
	PF string `json:"pf"`

	// Reason is a reason of the DevicePool's condition Supplied.
	// +kubebuilder:validation:MaxLength=64
	// +kubebuilder:validation:Pattern=`^[A-Za-z]+$`
	Reason string `json:"reason"`

	// Message says what is missing and what to do.
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// FunctionProblem is a problem that keeps Functions of a pool from being used.
type FunctionProblem struct {
	// Taint is the key of the device taint for the problem: "xpu.opiproject.org/link-down".
	// +kubebuilder:validation:MaxLength=128
	Taint string `json:"taint"`

	// Functions is how many of the pool's Functions have the problem.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65536
	Functions int32 `json:"functions"`

	// Message is about the first of these Functions: what happened and what to do.
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// Fallback is what a DevicePool gets instead of what it asks for, because the cluster lacks a
// feature gate.
type Fallback struct {
	// Feature is the feature gate of Kubernetes that is off, or that is not used:
	// "DRADeviceBindingConditions".
	// +kubebuilder:validation:MaxLength=64
	Feature string `json:"feature"`

	// GateOn says that the feature gate is on. The message says then why it is not used.
	// +optional
	GateOn bool `json:"gateOn,omitempty"`

	// Message says what happens instead.
	// +kubebuilder:validation:MaxLength=1024
	Message string `json:"message"`
}

// XPUNodePool is the state of a DevicePool on the node.
type XPUNodePool struct {
	// Name is the DevicePool's name.
	// +kubebuilder:validation:MaxLength=63
	Name string `json:"name"`

	// ObservedGeneration is the metadata.generation of the DevicePool that the entry is about. If
	// it is older than the DevicePool, the agent has not carried out the spec yet, or does not run.
	// +optional
	// +kubebuilder:validation:Minimum=0
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`

	// Functions is how many Functions of the node are in the pool.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65536
	Functions int32 `json:"functions"`

	// Healthy is how many of the Functions have no problem.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65536
	Healthy int32 `json:"healthy"`

	// Problems are the problems of the other Functions.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=taint
	Problems []FunctionProblem `json:"problems,omitempty"`

	// Overlapping names Functions that the pool selects but that belong to another pool:
	// "0000:3b:02.1 in fast"; at most 16 are listed.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=128
	Overlapping []string `json:"overlapping,omitempty"`

	// Error is the reason why the node's agent cannot offer the pool at all.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	Error string `json:"error,omitempty"`

	// Fallbacks are the features that the pool asks for and the cluster lacks.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=feature
	Fallbacks []Fallback `json:"fallbacks,omitempty"`

	// Shortages are PFs without the VFs or SFs that numVFs and sfs ask for; at most 16 are listed.
	// +optional
	// +kubebuilder:validation:MaxItems=16
	// +listType=map
	// +listMapKey=pf
	Shortages []Shortage `json:"shortages,omitempty"`
}

// XPUNodePF is a PF of the node.
type XPUNodePF struct {
	// Address is the PCI address, "dddd:bb:dd.f".
	// +kubebuilder:validation:MaxLength=32
	Address string `json:"address"`

	// Name is the name of the netdev, or its last known name while the netdev is away.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Name string `json:"name,omitempty"`

	// Vendor and Device are PCI ids in hex, such as "15b3" and "a2dc".
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Vendor string `json:"vendor,omitempty"`
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Device string `json:"device,omitempty"`

	// Driver is the kernel driver; empty if none is bound.
	// +optional
	// +kubebuilder:validation:MaxLength=64
	Driver string `json:"driver,omitempty"`

	// Serial is the serial number of the card as its driver reports it, or else as its Vital
	// Product Data has it.
	// +optional
	// +kubebuilder:validation:MaxLength=255
	Serial string `json:"serial,omitempty"`

	// Board is the type of the card's board as its driver reports it: its PSID, such as
	// "MT_0000000884", or its board id.
	// +optional
	// +kubebuilder:validation:MaxLength=255
	Board string `json:"board,omitempty"`

	// MAC is the address with which the netdev was made, "02:00:00:00:00:01".
	// +optional
	// +kubebuilder:validation:MaxLength=32
	MAC string `json:"mac,omitempty"`

	// VFs is how many VFs the PF has.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65536
	VFs int32 `json:"vfs,omitempty"`

	// VFOffset and VFStride are the positions of VFs: the routing ID of VF i is the routing ID of
	// the PF plus VFOffset plus i times VFStride (PCI Express 6.0, section 9.2.1.2). Both are 0 for
	// a PF without SR-IOV.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	VFOffset int32 `json:"vfOffset,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	VFStride int32 `json:"vfStride,omitempty"`

	// TotalVFs is how many VFs the PF can have.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	TotalVFs int32 `json:"totalVFs,omitempty"`

	// VFMACs are the permanent addresses of the netdevs of VFs 0, 1 and so on, "02:00:00:00:00:01";
	// "" for a VF whose address is not known or not permanent. An xPU may know a VF by it.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=17
	VFMACs []string `json:"vfMACs,omitempty"`
}

// XPUNodeAgent is the agent that wrote the report.
type XPUNodeAgent struct {
	// Version is the version of xpu-agent.
	// +optional
	// +kubebuilder:validation:MaxLength=128
	Version string `json:"version,omitempty"`

	// Namespace is the namespace of the agent's pod. It is absent if the agent does not run in a pod.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Namespace string `json:"namespace,omitempty"`
}

// Cordon keeps new pods away from the Functions of a PF. Pods that have such a Function keep it.
type Cordon struct {
	// PF is the PCI address of the PF, "dddd:bb:dd.f".
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`
	PF string `json:"pf"`

	// Reason says to others why: "new firmware".
	// +optional
	// +kubebuilder:validation:MaxLength=256
	Reason string `json:"reason,omitempty"`
}

// XPUNodeSpec is what an administrator asks of the node's agent.
type XPUNodeSpec struct {
	// Cordons are PFs whose Functions no new pod gets, as with a cordoned node: their devices have the
	// taint "xpu.opiproject.org/cordoned". A PF that the node does not have may be among them. See
	// xpuctl cordon.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=pf
	Cordons []Cordon `json:"cordons,omitempty"`
}

// XPUNodeStatus is the report of the node's agent.
type XPUNodeStatus struct {
	// Agent is the agent that wrote the report.
	// +optional
	Agent *XPUNodeAgent `json:"agent,omitempty"`

	// Functions is how many PFs, VFs and SFs of network cards the node has.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65536
	Functions int32 `json:"functions"`

	// PFs are the node's PFs, at most 64.
	// +optional
	// +kubebuilder:validation:MaxItems=64
	// +listType=map
	// +listMapKey=address
	PFs []XPUNodePF `json:"pfs,omitempty"`

	// Pools are the DevicePools that have Functions of the node, select Functions of the node that
	// belong to another pool, or name PFs that must have VFs or SFs.
	// +optional
	// +kubebuilder:validation:MaxItems=256
	// +listType=map
	// +listMapKey=name
	Pools []XPUNodePool `json:"pools,omitempty"`

	// Conditions has AgentReady, which xpu-controller writes: True (Running) if a pod of xpu-agent is
	// ready on the node, and False (AgentAway) if none has been for 30 s, so that the report is old.
	// It also has InventoryVerified: True (Verified) if sriovnet, which reads the same kernel by
	// other code, says the same about the node's Functions, False (Different) if it says something
	// else about at least one, and Unknown (NotVerified) if nothing could be compared, or not in
	// time. The agent compares at its start, and when the Functions are others.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// Bounds of the fields of an XPUNode. Texts are in bytes.
const (
	MaxNodePFs     = 64
	MaxNodePools   = 256
	MaxNodeListed  = 16
	MaxNodeMessage = 1024
	MaxNodeText    = 255 // for serial and board
	MaxNodeVFMACs  = 256 // of a PF
)

// XPUNode is what xpu-agent found on the node of the same name. Only the agent makes it and writes
// its status, but for the condition AgentReady. Administrators write its spec. The XPUNode belongs to the Node, and is deleted with it.
// xpu-controller sums up the pools in the status of DevicePools.
//
// +kubebuilder:object:root=true
// +kubebuilder:resource:scope=Cluster,shortName=xnode
// +kubebuilder:printcolumn:name="Agent",type=string,JSONPath=`.status.agent.version`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="AgentReady")].status`
// +kubebuilder:printcolumn:name="Functions",type=integer,JSONPath=`.status.functions`
// +kubebuilder:printcolumn:name="Cordoned",type=string,JSONPath=`.spec.cordons[*].pf`
// +kubebuilder:printcolumn:name="Verified",type=string,JSONPath=`.status.conditions[?(@.type=="InventoryVerified")].status`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type XPUNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	// +optional
	Spec   XPUNodeSpec   `json:"spec,omitzero"`
	Status XPUNodeStatus `json:"status,omitempty"`
}

// XPUNodeList is a list of XPUNodes.
//
// +kubebuilder:object:root=true
type XPUNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []XPUNode `json:"items"`
}
