package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PublishMode says through which Kubernetes API a pool's Functions are offered.
// +kubebuilder:validation:Enum=DRA
type PublishMode string

// PublishDRA offers Functions as devices in ResourceSlices.
const PublishDRA PublishMode = "DRA"

// ProvisionMode says when the xPU is made ready for a Function.
// +kubebuilder:validation:Enum=OnPrepare;BeforeBind
type ProvisionMode string

const (
	// ProvisionOnPrepare binds the pod at once; the xPU is provisioned meanwhile and the kubelet's Prepare
	// waits for it. Fastest, but a pod whose xPU refuses stays on its node.
	ProvisionOnPrepare ProvisionMode = "OnPrepare"

	// ProvisionBeforeBind holds the pod unbound, by binding conditions (KEP-5007), until the xPU serves the
	// Port; if it refuses, the scheduler allocates another device, on another node if need be. The scheduler
	// looks at binding conditions every 5 s, so binding takes up to that much longer.
	ProvisionBeforeBind ProvisionMode = "BeforeBind"
)

// FunctionSelector selects Functions. Every field that is set must match; a list matches if one entry does.
// The vocabulary is that of sriov-network-device-plugin.
// +kubebuilder:validation:MinProperties=1
type FunctionSelector struct {
	// Vendors are PCI vendor ids in hex, such as "15b3".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4}$`
	Vendors []string `json:"vendors,omitempty"`

	// Devices are PCI device ids in hex, such as "101e".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4}$`
	Devices []string `json:"devices,omitempty"`

	// Drivers are names of the kernel driver that is bound, such as "mlx5_core".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	Drivers []string `json:"drivers,omitempty"`

	// PCIAddresses are addresses of the Functions themselves, "dddd:bb:dd.f".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$`
	PCIAddresses []string `json:"pciAddresses,omitempty"`

	// PFNames are names of the PF's netdev, optionally with VF indexes: "ens3f0", "ens3f0#0-3",
	// "ens3f0#0,2,4-7" (ranges are inclusive).
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[^#\s/]{1,15}(#[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$`
	PFNames []string `json:"pfNames,omitempty"`

	// RootDevices are PCI addresses of the PF, optionally with VF indexes as in pfNames:
	// "0000:3b:00.0", "0000:3b:00.0#0-3".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](#[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$`
	RootDevices []string `json:"rootDevices,omitempty"`
}

// DevicePoolSpec says which Functions belong to the pool and how they are offered.
type DevicePoolSpec struct {
	// NodeSelector limits the pool to nodes with these labels; empty means every node.
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// Selectors select VFs and SFs; a Function belongs to the pool if one selector matches. A Function that
	// several pools select belongs to the pool whose name sorts first, and the others say so in their status.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	Selectors []FunctionSelector `json:"selectors"`

	// Publish is the API through which the Functions are offered.
	// +optional
	// +kubebuilder:default=DRA
	Publish PublishMode `json:"publish,omitempty"`

	// Provision says when the xPU is made ready.
	// +optional
	// +kubebuilder:default=OnPrepare
	Provision ProvisionMode `json:"provision,omitempty"`

	// Network is the XPUNetwork of interfaces whose InterfaceConfig names none. If neither does, the Function
	// is attached without a Port on the xPU.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Network string `json:"network,omitempty"`
}

// DevicePoolNodeStatus is what one node's agent found for the pool.
type DevicePoolNodeStatus struct {
	// Name is the node's name.
	Name string `json:"name"`

	// Functions is how many Functions of the node are in the pool.
	Functions int32 `json:"functions"`

	// Overlapping names Functions that this pool selects but that belong to another pool, as
	// "<Function> in <pool>"; at most 16 are listed.
	// +optional
	// +listType=atomic
	Overlapping []string `json:"overlapping,omitempty"`
}

// DevicePoolStatus is what came of the pool.
type DevicePoolStatus struct {
	// Functions is the number of Functions in the pool, over all nodes.
	// +optional
	Functions int32 `json:"functions"`

	// Nodes are the nodes that have Functions of the pool, or Functions that it selects but may not have. Each
	// agent writes its own entry and no other.
	// +optional
	// +listType=map
	// +listMapKey=name
	Nodes []DevicePoolNodeStatus `json:"nodes,omitempty"`

	// Conditions has Ready: True (Published) or False (NoFunctions, Overlap).
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// DevicePool declares Functions of the cluster's nodes that are offered together.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=dpool
// +kubebuilder:printcolumn:name="Functions",type=integer,JSONPath=`.status.functions`
// +kubebuilder:printcolumn:name="Publish",type=string,JSONPath=`.spec.publish`
// +kubebuilder:printcolumn:name="Provision",type=string,JSONPath=`.spec.provision`
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:validation:XValidation:rule="self.metadata.name.size() <= 63",message="the name of a DevicePool may have at most 63 characters: it becomes part of resource names"
type DevicePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   DevicePoolSpec   `json:"spec"`
	Status DevicePoolStatus `json:"status,omitempty"`
}

// DevicePoolList is a list of DevicePools.
//
// +kubebuilder:object:root=true
type DevicePoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []DevicePool `json:"items"`
}
