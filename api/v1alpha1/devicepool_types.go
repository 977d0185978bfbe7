// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"cmp"
	"fmt"
	"regexp"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// PublishMode is the Kubernetes API that offers a pool's Functions.
// +kubebuilder:validation:Enum=DRA;DevicePlugin
type PublishMode string

const (
	// PublishDRA offers Functions as devices in ResourceSlices.
	PublishDRA PublishMode = "DRA"

	// PublishDevicePlugin offers Functions as an extended resource, through the kubelet's device
	// plugin API.
	PublishDevicePlugin PublishMode = "DevicePlugin"
)

// DeviceModel is what the devices of a pool are in ResourceSlices.
// +kubebuilder:validation:Enum=Functions;Counters;Ports
type DeviceModel string

const (
	// ModelFunctions makes each VF and SF a device.
	ModelFunctions DeviceModel = "Functions"

	// ModelCounters makes each VF and SF a device, and also their PF as a whole. They share
	// counters (KEP-4815): a pod gets the PF, or pods get its VFs and SFs, never both. A PF is a
	// device only if the pool has all of its VFs.
	ModelCounters DeviceModel = "Counters"

	// ModelPorts makes each PF one device that many claims share (KEP-5075), with ports and
	// bandwidth as its capacity. A claim takes one port, and the bandwidth that it asks for, which
	// becomes the highest rate of a VF. The agent chooses the VF when the kubelet prepares the
	// claim.
	ModelPorts DeviceModel = "Ports"
)

// ProvisionMode is when the xPU is made ready for a Function.
// +kubebuilder:validation:Enum=OnPrepare;BeforeBind;Ahead
type ProvisionMode string

const (
	// ProvisionOnPrepare binds the pod at once. The xPU is provisioned meanwhile and the kubelet's
	// Prepare waits for it. This is the fastest mode, but a pod whose xPU refuses stays on its
	// node.
	ProvisionOnPrepare ProvisionMode = "OnPrepare"

	// ProvisionBeforeBind holds the pod unbound, by binding conditions (KEP-5007), until the xPU
	// serves the Port. If the xPU refuses, the scheduler allocates another device, on another node
	// if necessary. The scheduler looks at binding conditions every 5 s, so binding takes up to 5 s
	// longer.
	ProvisionBeforeBind ProvisionMode = "BeforeBind"

	// ProvisionAhead is BeforeBind, but some free Functions of each PF have an XPUPort in the
	// pool's network before any pod asks for them. A pod that gets such a Function is bound at
	// once, because its xPU serves the Port already. A pod that gets another Function waits as with
	// BeforeBind.
	ProvisionAhead ProvisionMode = "Ahead"
)

// LinkDownEffect is the effect of the taint xpu.opiproject.org/link-down.
// +kubebuilder:validation:Enum=NoSchedule;None
type LinkDownEffect string

const (
	// LinkDownNoSchedule keeps new pods away from a Function whose PF has no carrier.
	LinkDownNoSchedule LinkDownEffect = "NoSchedule"

	// LinkDownNone only informs: pods get Functions whose PF has no carrier.
	LinkDownNone LinkDownEffect = "None"
)

// DefaultPortsAhead is the value of an absent DevicePoolSpec.PortsAhead.
const DefaultPortsAhead = 4

// DeviceType is the kind of Functions in a pool, in the terms of sriov-network-device-plugin.
// +kubebuilder:validation:Enum=netDevice;accelerator;auxNetDevice
type DeviceType string

const (
	// DeviceTypeNet selects VFs, and NICs (PFs) that have no VFs and do not carry the node's
	// default route.
	DeviceTypeNet DeviceType = "netDevice"

	// DeviceTypeAccelerator selects the same as netDevice, but of PCI class 0x12 (processing
	// accelerators).
	DeviceTypeAccelerator DeviceType = "accelerator"

	// DeviceTypeAuxNet selects SFs.
	DeviceTypeAuxNet DeviceType = "auxNetDevice"
)

// ProvisionPoint is when the xPU is made ready for a Function that the device plugin allocates.
// +kubebuilder:validation:Enum=Allocate;Add
type ProvisionPoint string

const (
	// ProvisionAtAllocate makes the xPU ready before the kubelet starts the pod. The pool must name
	// the network. A pod whose xPU refuses fails for good, because the kubelet does not ask twice.
	ProvisionAtAllocate ProvisionPoint = "Allocate"

	// ProvisionAtAdd makes the xPU ready when the CNI plugin attaches the Function. The network
	// comes from the plugin's configuration or else from the pool. The kubelet tries again until it
	// succeeds.
	ProvisionAtAdd ProvisionPoint = "Add"
)

// PreferredAllocation is which Functions of a pool the kubelet should prefer for a container that
// wants several.
// +kubebuilder:validation:Enum=Pack;Spread
type PreferredAllocation string

const (
	// PreferPack takes Functions of one PF, then of PFs below the same PCIe root.
	PreferPack PreferredAllocation = "Pack"

	// PreferSpread takes Functions of as many PFs as possible, and prefers the PFs with the most
	// free Functions.
	PreferSpread PreferredAllocation = "Spread"
)

// FunctionSelector selects Functions. Every field that is set must match; a list matches if one
// entry does. The fields have the names and meaning of sriov-network-device-plugin's selectors.
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

	// Drivers are names of bound kernel drivers, such as "mlx5_core". A variant of vfio-pci, such as
	// "mlx5_vfio_pci", matches by "vfio-pci" too.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MinLength=1
	Drivers []string `json:"drivers,omitempty"`

	// PCIAddresses are PCI addresses of the Functions themselves, "dddd:bb:dd.f".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1024
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$`
	PCIAddresses []string `json:"pciAddresses,omitempty"`

	// PFNames are names or altnames of the PF's netdev, optionally with VF indexes: "ens3f0",
	// "ens3f0#0-3", "ens3f0#0,2,4-7" (ranges are inclusive). An altname that is also a name of
	// another PF's netdev is refused; the pool has no Functions on that node then.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=256
	// +kubebuilder:validation:items:Pattern=`^[^#\s/]{1,127}(#[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*)?$`
	// +kubebuilder:validation:XValidation:rule="self.all(n, !n.contains('#') || n.split('#')[1].split(',').all(r, !r.contains('-') || int(r.split('-')[0]) <= int(r.split('-')[1])))",message="a range of VF indexes must go from the smaller to the larger one, such as #3-7"
	PFNames []string `json:"pfNames,omitempty"`

	// RootDevices are PCI addresses of the PF, optionally with VF indexes as in pfNames:
	// "0000:3b:00.0", "0000:3b:00.0#0-3".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=128
	// +kubebuilder:validation:items:Pattern=`^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](#[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*)?$`
	// +kubebuilder:validation:XValidation:rule="self.all(n, !n.contains('#') || n.split('#')[1].split(',').all(r, !r.contains('-') || int(r.split('-')[0]) <= int(r.split('-')[1])))",message="a range of VF indexes must go from the smaller to the larger one, such as #3-7"
	RootDevices []string `json:"rootDevices,omitempty"`

	// ACPIIndexes are firmware numbers of the Function (sysfs acpi_index), such as "101".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^[0-9]+$`
	ACPIIndexes []string `json:"acpiIndexes,omitempty"`

	// LinkTypes are link types of the Function's netdev: "ether" or "infiniband". While the netdev
	// is away, the link type of the PF's netdev counts.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	LinkTypes []string `json:"linkTypes,omitempty"`

	// DDPProfiles are names of the Dynamic Device Personalization package that the PF runs (Intel),
	// such as "ICE COMMS Package".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	DDPProfiles []string `json:"ddpProfiles,omitempty"`

	// PKeys are InfiniBand partition keys of the Function, in hex: "0x1".
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=64
	PKeys []string `json:"pKeys,omitempty"`

	// AuxTypes are types of auxiliary devices; "sf" is the only one.
	// +optional
	// +listType=atomic
	// +kubebuilder:validation:MaxItems=1
	// +kubebuilder:validation:items:Enum=sf
	AuxTypes []string `json:"auxTypes,omitempty"`

	// IsRdma limits the selector to Functions with an RDMA device. The container also gets the
	// character devices of the RDMA device.
	// +optional
	IsRdma bool `json:"isRdma,omitempty"`

	// VDPAType limits the selector to Functions with a vDPA device that is bound to this driver.
	// +optional
	// +kubebuilder:validation:Enum=virtio;vhost
	VDPAType string `json:"vdpaType,omitempty"`
}

// FunctionDriver is a kernel driver that gives a Function to a program of the pod: vfio-pci, or its
// variant for a card, by the name that the driver has below /sys/bus/pci/drivers, such as
// mlx5_vfio_pci. A Function that is bound to a variant already keeps it if vfio-pci is asked for.
// +kubebuilder:validation:MaxLength=64
// +kubebuilder:validation:Pattern=`^(vfio-pci|[a-z0-9][-_a-z0-9]*[-_]vfio[-_]pci)$`
type FunctionDriver string

// DriverVFIO gives a container the Function's IOMMU group (/dev/vfio), and no netdev.
const DriverVFIO FunctionDriver = "vfio-pci"

// FunctionDriverPattern is the pattern of a [FunctionDriver] that is not "", in the syntax of RE2.
// MaxFunctionDriver is the most bytes of one.
const (
	FunctionDriverPattern = `^(vfio-pci|[a-z0-9][-_a-z0-9]*[-_]vfio[-_]pci)$`
	MaxFunctionDriver     = 64
)

// functionDriver is the pattern of the CRD. Variants of vfio-pci end in vfio_pci (drivers/vfio/pci
// of Linux).
var functionDriver = regexp.MustCompile(FunctionDriverPattern)

// Validate returns an error that says what would be right, unless the value is "" or is valid.
func (d FunctionDriver) Validate() error {
	if d == "" || len(d) <= MaxFunctionDriver && functionDriver.MatchString(string(d)) {
		return nil
	}
	return fmt.Errorf("%q: must be %s, or one of its variants such as mlx5_vfio_pci", d, DriverVFIO)
}

// SFSpec describes the SFs that a pool offers at each of its PFs. An SF exists only while a pod has
// it: it is made when it is allocated, active and with a MAC, and deleted when it is released.
type SFSpec struct {
	// Count is how many SFs each PF offers. SFs need the PF's eswitch in mode switchdev.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1024
	Count int32 `json:"count"`

	// FirstNumber is the sfnum of the first SF; the sfnums of the other SFs follow. An SF that
	// already exists with such an sfnum belongs to the pool too.
	// +optional
	// +kubebuilder:default=1
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	FirstNumber int32 `json:"firstNumber,omitempty"`
}

// Has reports whether the SF with this sfnum belongs to the SFs. A nil SFSpec has no SFs.
func (s *SFSpec) Has(sfnum uint32) bool {
	if s == nil {
		return false
	}
	beyond := int64(sfnum) - int64(s.FirstNumber)
	return beyond >= 0 && beyond < int64(s.Count)
}

// ResourceName returns the name of the extended resource by which the device plugin offers the
// DevicePool with the name pool: "<prefix>/<name>". The prefix defaults to xpu.opiproject.org, and
// the name to the name of the DevicePool. The result is "" for a pool that the device plugin does
// not offer.
func (s DevicePoolSpec) ResourceName(pool string) string {
	if s.Publish != PublishDevicePlugin {
		return ""
	}
	plugin := ptr.Deref(s.DevicePlugin, DevicePluginSpec{})
	return cmp.Or(plugin.ResourcePrefix, GroupName) + "/" + cmp.Or(plugin.ResourceName, pool)
}

// DevicePluginSpec describes how the device plugin offers a pool.
type DevicePluginSpec struct {
	// ResourcePrefix is the part before the slash of the extended resource's name;
	// "xpu.opiproject.org" if empty.
	// +optional
	// +kubebuilder:validation:MaxLength=253
	// +kubebuilder:validation:Pattern=`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`
	ResourcePrefix string `json:"resourcePrefix,omitempty"`

	// ResourceName is the part after the slash; the pool's name if empty.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	// +kubebuilder:validation:Pattern=`^[a-zA-Z0-9]([-a-zA-Z0-9_]*[a-zA-Z0-9])?$`
	ResourceName string `json:"resourceName,omitempty"`

	// ProvisionAt is when the xPU is made ready.
	// +optional
	// +kubebuilder:default=Add
	ProvisionAt ProvisionPoint `json:"provisionAt,omitempty"`

	// PreferredAllocation is which Functions are preferred for a container that wants several.
	// +optional
	// +kubebuilder:default=Pack
	PreferredAllocation PreferredAllocation `json:"preferredAllocation,omitempty"`

	// ExcludeTopology hides the NUMA node of the Functions from the kubelet's topology manager.
	// +optional
	ExcludeTopology bool `json:"excludeTopology,omitempty"`

	// NeedVhostNet also gives containers /dev/vhost-net and /dev/net/tun.
	// +optional
	NeedVhostNet bool `json:"needVhostNet,omitempty"`

	// AdditionalInfo is given to containers in PCIDEVICE_.._INFO, by PCI address or "*" for all.
	// +optional
	AdditionalInfo map[string]map[string]string `json:"additionalInfo,omitempty"`
}

// PrivilegedField is a field of an InterfaceConfig by which a pod can take something from others,
// or make the PF trust it.
// +kubebuilder:validation:Enum=mac;addresses;driver;vf.vlan;vf.qos;vf.trust;vf.spoofCheck;vf.minTxRate;vf.maxTxRate;vf.linkState;vf.nodeGUID;vf.portGUID;ethtool.privateFlags;ethtool.channels;ethtool.rings;ethtool.pause
type PrivilegedField string

const (
	FieldMAC          PrivilegedField = "mac"
	FieldAddresses    PrivilegedField = "addresses" // of an interface that joins an XPUNetwork
	FieldDriver       PrivilegedField = "driver"
	FieldVLAN         PrivilegedField = "vf.vlan" // and vf.vlanProtocol
	FieldQoS          PrivilegedField = "vf.qos"
	FieldTrust        PrivilegedField = "vf.trust"
	FieldSpoofCheck   PrivilegedField = "vf.spoofCheck"
	FieldMinTxRate    PrivilegedField = "vf.minTxRate"
	FieldMaxTxRate    PrivilegedField = "vf.maxTxRate"
	FieldLinkState    PrivilegedField = "vf.linkState"
	FieldNodeGUID     PrivilegedField = "vf.nodeGUID"
	FieldPortGUID     PrivilegedField = "vf.portGUID"
	FieldPrivateFlags PrivilegedField = "ethtool.privateFlags"
	// Channels and rings take interrupts and memory of the node, which no limit of the pod counts.
	FieldChannels PrivilegedField = "ethtool.channels"
	FieldRings    PrivilegedField = "ethtool.rings"
	FieldPause    PrivilegedField = "ethtool.pause" // of a PF, whose VFs share the port
)

// PrivilegedFields returns all privileged fields.
func PrivilegedFields() []PrivilegedField {
	return []PrivilegedField{
		FieldMAC, FieldAddresses, FieldDriver, FieldVLAN, FieldQoS, FieldTrust, FieldSpoofCheck,
		FieldMinTxRate, FieldMaxTxRate, FieldLinkState, FieldNodeGUID, FieldPortGUID,
		FieldPrivateFlags,
		FieldChannels, FieldRings, FieldPause,
	}
}

// DevicePoolSpec describes which Functions belong to the pool and how they are offered.
// +kubebuilder:validation:XValidation:rule="!has(self.numVFs) && !has(self.sfs) || self.selectors.all(s, has(s.pfNames) || has(s.rootDevices))",message="numVFs and sfs need selectors that name the PFs, by pfNames or rootDevices"
// +kubebuilder:validation:XValidation:rule="!has(self.numVFs) || self.selectors.all(s, !has(s.pfNames) || s.pfNames.all(n, !n.contains('#') || n.split('#')[1].split(',').all(r, r.split('-').all(i, int(i) < self.numVFs))))",message="pfNames has VF indexes that the PF will not have: the first VF is 0, so the last one is numVFs - 1"
// +kubebuilder:validation:XValidation:rule="!has(self.numVFs) || self.selectors.all(s, !has(s.rootDevices) || s.rootDevices.all(n, !n.contains('#') || n.split('#')[1].split(',').all(r, r.split('-').all(i, int(i) < self.numVFs))))",message="rootDevices has VF indexes that the PF will not have: the first VF is 0, so the last one is numVFs - 1"
// +kubebuilder:validation:XValidation:rule="!has(self.sfs) || !has(self.deviceType) || self.deviceType == 'auxNetDevice'",message="sfs needs a pool that may have SFs: leave deviceType out, or make it auxNetDevice"
// +kubebuilder:validation:XValidation:rule="!has(self.sfs) || !has(self.driver)",message="driver is not for pools with sfs: an SF is no PCI device that another driver could be bound to"
// +kubebuilder:validation:XValidation:rule="!has(self.maxAllocated) || !has(self.publish) || self.publish == 'DRA'",message="maxAllocated is only for pools with publish: DRA, whose counters the scheduler keeps"
// +kubebuilder:validation:XValidation:rule="!has(self.devicePlugin) || has(self.publish) && self.publish == 'DevicePlugin'",message="devicePlugin is only for pools with publish: DevicePlugin"
// +kubebuilder:validation:XValidation:rule="!has(self.devicePlugin) || !has(self.devicePlugin.provisionAt) || self.devicePlugin.provisionAt != 'Allocate' || has(self.network) && size(self.network) > 0",message="provisionAt: Allocate needs network: the kubelet does not say which network a pod wants when it allocates"
// +kubebuilder:validation:XValidation:rule="!has(self.provision) || self.provision != 'Ahead' || has(self.network) && size(self.network) > 0 && (!has(self.publish) || self.publish == 'DRA') && !has(self.sfs)",message="provision: Ahead needs network and publish: DRA, and no sfs: a Port can be made ahead only for a Function that is there, in a network that is known"
// +kubebuilder:validation:XValidation:rule="!has(self.model) || self.model == 'Functions' || !has(self.publish) || self.publish == 'DRA'",message="model is only for pools with publish: DRA, as the device plugin API has only whole devices"
// +kubebuilder:validation:XValidation:rule="!has(self.model) || self.model != 'Ports' || (!has(self.provision) || self.provision == 'OnPrepare') && !has(self.sfs) && (!has(self.deviceType) || self.deviceType == 'netDevice')",message="model: Ports needs provision: OnPrepare, as no VF is chosen before; and VFs, so no sfs and no deviceType but netDevice"
// +kubebuilder:validation:XValidation:rule="!has(self.portsAhead) || has(self.provision) && self.provision == 'Ahead'",message="portsAhead is only for pools with provision: Ahead"
// +kubebuilder:validation:XValidation:rule="!has(self.linkDown) || !has(self.publish) || self.publish == 'DRA'",message="linkDown is only for pools with publish: DRA, as the kubelet knows no taints"
// +kubebuilder:validation:XValidation:rule="!has(self.evictLostAfter) || (!has(self.publish) || self.publish == 'DRA') && (!has(self.model) || self.model != 'Ports')",message="evictLostAfter is only for pools with publish: DRA, as the kubelet knows no taints, and not for model: Ports, whose devices other pods share"
// +kubebuilder:validation:XValidation:rule="!has(self.attributes) || !has(self.publish) || self.publish == 'DRA'",message="attributes is only for pools with publish: DRA, as the kubelet knows none"
// +kubebuilder:validation:XValidation:rule="!has(self.dataDirect) || !self.dataDirect || !has(self.publish) || self.publish == 'DRA'",message="dataDirect is only for pools with publish: DRA, as the kubelet knows no attributes"
// +kubebuilder:validation:XValidation:rule="!has(self.listNUMANodes) || !self.listNUMANodes || !has(self.publish) || self.publish == 'DRA'",message="listNUMANodes is only for pools with publish: DRA, as the kubelet knows no attributes"
type DevicePoolSpec struct {
	// NodeSelector limits the pool to nodes with these labels; empty means every node.
	// +optional
	NodeSelector map[string]string `json:"nodeSelector,omitempty"`

	// DeviceType limits the pool to one kind of Function. If it is empty, the pool has VFs and SFs.
	// +optional
	DeviceType DeviceType `json:"deviceType,omitempty"`

	// Priority decides between pools that select the same Function or name the same resource. The
	// pool with the highest priority gets it, and of equal pools the oldest. The other pools report
	// that in their status.
	// +optional
	Priority int32 `json:"priority,omitempty"`

	// Selectors select Functions. A Function belongs to the pool if one selector matches.
	// +kubebuilder:validation:MinItems=1
	// +kubebuilder:validation:MaxItems=32
	// +listType=atomic
	Selectors []FunctionSelector `json:"selectors"`

	// NumVFs is how many VFs each PF has that a selector names. VF indexes in a selector do not
	// matter. VFs are made, or removed if there are more, while no pod and no program uses one of
	// them. If NumVFs is absent, and after the DevicePool is deleted, PFs keep their VFs.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=65535
	NumVFs *int32 `json:"numVFs,omitempty"`

	// SFs describes the SFs that each PF offers that a selector names.
	// +optional
	SFs *SFSpec `json:"sfs,omitempty"`

	// MaxAllocated is how many of the pool's Functions at one PF may be allocated at once, VFs and
	// SFs together. Set it below the number of Functions if they share resources of the PF. Absent
	// means all. With model: Ports it is how many ports the PF has.
	// +optional
	// +kubebuilder:validation:Minimum=1
	MaxAllocated *int32 `json:"maxAllocated,omitempty"`

	// Driver is bound to a Function while a pod has the Function. The Function's own driver is
	// bound again when the Function is released. Absent means that Functions keep their driver.
	// +optional
	Driver FunctionDriver `json:"driver,omitempty"`

	// Publish is the API through which the Functions are offered.
	// +optional
	// +kubebuilder:default=DRA
	Publish PublishMode `json:"publish,omitempty"`

	// Model is what the devices in ResourceSlices are; Functions if it is empty. Claims that have
	// devices of another model keep them when Model is changed.
	// +optional
	Model DeviceModel `json:"model,omitempty"`

	// Provision is when the xPU is made ready.
	// +optional
	// +kubebuilder:default=OnPrepare
	Provision ProvisionMode `json:"provision,omitempty"`

	// PortsAhead is how many free Functions of each PF have an XPUPort before a pod asks for them.
	// It is only for provision: Ahead. Absent means 4. Each XPUPort is a port at the OPI agent and
	// an object in the namespace of the agents, and keeps the network in service at the xPU.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=64
	PortsAhead *int32 `json:"portsAhead,omitempty"`

	// Network is the XPUNetwork of interfaces whose InterfaceConfig names no network. If neither
	// names a network, the Function is attached without a Port on the xPU.
	// +optional
	// +kubebuilder:validation:MaxLength=63
	Network string `json:"network,omitempty"`

	// LinkDown is the effect of the taint link-down, which devices have while their PF has no
	// carrier; NoSchedule if it is empty. With None, pods get such devices. It suits pods that reach
	// each other within the card. Kubernetes before 1.35 does not take the effect None: the devices
	// have no such taint then.
	// +optional
	LinkDown LinkDownEffect `json:"linkDown,omitempty"`

	// EvictLostAfter has Kubernetes delete pods that lost a Function whose PCI device is gone. The
	// node's agent must have seen without interruption, for this time, that the kernel does not have
	// the device; for an SF, the device of its PF. Or a program of the pod had the device itself, such
	// as by vfio, and another device has been in its place for this time. Other pods keep waiting
	// for a device that is there, and for one that went before the agent started. A pod whose bond
	// has another port is kept too. Absent means that no such pods are deleted. The time is at least 1m.
	//
	// The taint xpu.opiproject.org/lost gets the effect NoExecute then, which disregards
	// PodDisruptionBudgets. Kubernetes deletes all pods whose claims have the device, also those that
	// only watch it with adminAccess. A request keeps its pods with a toleration of the key
	// xpu.opiproject.org/lost, with operator Exists and effect NoExecute. The effect must be named,
	// because Kubernetes before 1.38 evicts in spite of a toleration without an effect.
	// +optional
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1m')",message="must be at least 1m, as a card may reset"
	EvictLostAfter *metav1.Duration `json:"evictLostAfter,omitempty"`

	// Allow lists the privileged fields that a ResourceClaim or a network configuration
	// (NetworkAttachmentDefinition) may set for a Function of the pool. A DeviceClass may set all
	// privileged fields. The entry addresses applies only to interfaces in an XPUNetwork.
	// +optional
	// +listType=set
	Allow []PrivilegedField `json:"allow,omitempty"`

	// Attributes are attributes of all devices of the pool in ResourceSlices, beside those that the
	// agent finds out: the rail, fabric or physical network of the Functions. Claims select by them.
	// They are only for publish: DRA.
	// +optional
	// +listType=map
	// +listMapKey=name
	// +kubebuilder:validation:MaxItems=12
	Attributes []PoolAttribute `json:"attributes,omitempty"`

	// DataDirect says that Data Direct is enabled for the VFs and SFs of the pool's ConnectX-8. They
	// have two ways to memory then: their own PCIe root complex, and the one of the NIC's Data Direct
	// function, which may be the root complex of a GPU beside the NIC. The attribute pcieRoot of the
	// pool's devices lists both (KEP-5491), so that a claim can ask for a device and a GPU with a
	// common root complex. The agent enables nothing. It is only for publish: DRA.
	// +optional
	DataDirect bool `json:"dataDirect,omitempty"`

	// ListNUMANodes makes the attribute numaNode of the pool's devices a list (KEP-5491) where a
	// socket has several NUMA nodes at the same smallest distance, as with sub-NUMA clustering: the
	// device's own node, then the others. A selector that compares numaNode with a number is false
	// for a list, and matchAttribute takes devices that have one node in common. Without it numaNode
	// is the device's own node. It is only for publish: DRA.
	// +optional
	ListNUMANodes bool `json:"listNUMANodes,omitempty"`

	// DevicePlugin describes how the device plugin offers the pool. It is only for publish:
	// DevicePlugin.
	// +optional
	DevicePlugin *DevicePluginSpec `json:"devicePlugin,omitempty"`
}

// DevicePoolStatus sums up the pool over all nodes. The XPUNodes have the state of each node.
type DevicePoolStatus struct {
	// Functions is the number of Functions in the pool.
	// +optional
	// +kubebuilder:default=0
	Functions int32 `json:"functions"`

	// Healthy is how many of the Functions have no problem.
	// +optional
	// +kubebuilder:default=0
	Healthy int32 `json:"healthy"`

	// NodeCount is how many nodes have Functions of the pool.
	// +optional
	NodeCount int32 `json:"nodeCount"`

	// Conditions has Ready: True (Published) or False (NoFunctions, Overlap, Unhealthy,
	// InvalidConfig, NetworkNotFound). If numVFs or sfs is set, it also has Supplied: True
	// (AllMade) or False (NoPF, InvalidConfig, or the reason of a Shortage: Making, Conflict,
	// InUse, OutOfRange, Busy, Refused, NotSupported). While a node's entry is about an older spec,
	// Supplied is False, and Ready has the observedGeneration of the oldest entry.
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
// +kubebuilder:printcolumn:name="Healthy",type=integer,JSONPath=`.status.healthy`
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
