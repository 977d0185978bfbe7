// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Route is a route of the pod through the interface.
type Route struct {
	// To is the destination in CIDR notation; "0.0.0.0/0" or "::/0" is the default route.
	To string `json:"to"`

	// Via is the next hop; absent means that the destination is on the link.
	// +optional
	Via string `json:"via,omitempty"`

	// Metric is the route's priority; lower is better. Absent leaves the kernel's default.
	// +optional
	Metric *int32 `json:"metric,omitempty"`
}

// VFConfig is what the PF enforces for a VF (IFLA_VF_* in linux/if_link.h). If the PF's driver does
// not support a setting, the attachment fails with the driver's answer. Absent fields keep the
// administrator's settings.
type VFConfig struct {
	// VLAN is the tag that the PF adds and strips, 1-4094; 0 removes the tag.
	// +optional
	VLAN *int32 `json:"vlan,omitempty"`

	// QoS is the 802.1p priority of the tag, 0-7. It needs vlan.
	// +optional
	QoS *int32 `json:"qos,omitempty"`

	// VLANProtocol is "802.1q" (the default) or "802.1ad". It needs vlan.
	// +optional
	VLANProtocol string `json:"vlanProtocol,omitempty"`

	// Trust lets the VF change its MAC address and be promiscuous.
	// +optional
	Trust *bool `json:"trust,omitempty"`

	// SpoofCheck drops frames that the VF sends from another MAC address.
	// +optional
	SpoofCheck *bool `json:"spoofCheck,omitempty"`

	// MinTxRate is the guaranteed rate in Mbit/s; 0 removes the guarantee.
	// +optional
	MinTxRate *int32 `json:"minTxRate,omitempty"`

	// MaxTxRate is the highest rate in Mbit/s; 0 removes the limit.
	// +optional
	MaxTxRate *int32 `json:"maxTxRate,omitempty"`

	// LinkState is "auto", "enable" or "disable".
	// +optional
	LinkState string `json:"linkState,omitempty"`
}

// InterfaceNetwork is a network whose frames have a VLAN tag at the Function.
type InterfaceNetwork struct {
	// Name is the XPUNetwork to join.
	Name string `json:"name"`

	// Addresses are IP addresses with prefix length, "10.1.0.5/24", inside the network's subnets.
	// Absent means that one address of each of the network's subnets is assigned.
	// +optional
	Addresses []string `json:"addresses,omitempty"`
}

// InterfaceConfig is what a pod asks of one interface. It is given as opaque parameters of driver
// xpu.opiproject.org in a ResourceClaim, a ResourceClaimTemplate or a DeviceClass. A field in the
// claim overrides the same field in the class. Unknown fields are refused.
//
// +kubebuilder:object:root=true
type InterfaceConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Network is the XPUNetwork to join. If both network and networks are absent, it is the
	// DevicePool's network.
	// +optional
	Network string `json:"network,omitempty"`

	// Networks are up to 64 XPUNetworks to join with VLAN tags, instead of network: the Function
	// has tagged frames, and the pod makes its VLAN interfaces itself. The XPUPort's
	// status.networks has the tags. The fields addresses, routes and vf.vlan must be absent. What
	// the claim gives of network and networks replaces both of the class.
	// +optional
	Networks []InterfaceNetwork `json:"networks,omitempty"`

	// InterfaceName is the name in the pod, at most 15 bytes without "/" or white space. Absent
	// means "net1", "net2", ... in the order of the pod's devices.
	// +optional
	InterfaceName string `json:"interfaceName,omitempty"`

	// MTU is the MTU in bytes, 68-9216, and at most the network's MTU.
	// +optional
	MTU *int32 `json:"mtu,omitempty"`

	// MAC is a unicast address, "02:00:00:00:00:01". Absent means an address that is derived from
	// claim, node and Function.
	// +optional
	MAC string `json:"mac,omitempty"`

	// Addresses are IP addresses with prefix length, "10.1.0.5/24", inside the network's subnets.
	// Absent means that one address of each of the network's subnets is assigned.
	// +optional
	Addresses []string `json:"addresses,omitempty"`

	// Routes are added once the interface is up.
	// +optional
	Routes []Route `json:"routes,omitempty"`

	// AllMulticast makes the interface receive every multicast frame (IFF_ALLMULTI). Multicast
	// routing daemons need that, and programs that answer Neighbor Discovery themselves. Some
	// drivers also require vf.trust.
	// +optional
	AllMulticast *bool `json:"allMulticast,omitempty"`

	// VF is what the PF enforces. For an SF, and for a VF in eswitch mode switchdev, minTxRate and
	// maxTxRate are a rate object of the eswitch (devlink-rate). The other fields do not apply to
	// an SF.
	// +optional
	VF *VFConfig `json:"vf,omitempty"`

	// Driver is bound to the Function while the pod has it; absent means the DevicePool's driver.
	// With vfio-pci the container gets the Function's IOMMU group, and there is no interface: mtu,
	// routes and allMulticast must be absent, and addresses are only reported to the pod.
	// +optional
	// +kubebuilder:validation:Enum=vfio-pci
	Driver FunctionDriver `json:"driver,omitempty"`
}
