// SPDX-License-Identifier: Apache-2.0

// Package nodestate defines what an agent reports to administrators about its node, and has a
// client to get it.
package nodestate

import (
	"net/netip"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// State is the state of a node at a time. Without an agent, it has only what the kernel shows: no
// pools, problems, attachments and dead letters.
type State struct {
	// name of the Node object, or of the host if there is none
	Node string `json:"node,omitempty"`
	// version of the agent that reports; empty without an agent
	Agent string    `json:"agent,omitempty"`
	Time  time.Time `json:"time"`
	// sorted by address; SFs follow their PF, sorted by sfnum
	Functions []Function `json:"functions"`
	// DeadLetters are the post-delete hooks that were given up, the oldest first. An agent keeps
	// the last 100.
	DeadLetters []DeadLetter `json:"deadLetters,omitempty"`
	// Verification is the last comparison of the Functions with what sriovnet says; nil if there was
	// none yet, without an agent, and with an agent that does not compare.
	Verification *Verification `json:"verification,omitempty"`
}

// Function is a Function as the kernel shows it. See [function.Function] for fields of the same
// names.
type Function struct {
	ID     function.ID    `json:"function"`
	Kind   function.Kind  `json:"kind"`
	Class  function.Class `json:"class"`
	PF     pci.Address    `json:"pf"`
	PFName string         `json:"pfName,omitempty"`
	Index  int            `json:"index"`
	Vendor string         `json:"vendor,omitempty"`
	Device string         `json:"device,omitempty"`
	// VendorName and DeviceName are what the PCI ID database calls Vendor and Device where people
	// look at the state. Agents leave them out.
	VendorName string `json:"vendorName,omitempty"`
	DeviceName string `json:"deviceName,omitempty"`
	Driver     string `json:"driver,omitempty"`
	NUMANode   int    `json:"numaNode"`
	PCIeRoot   string `json:"pcieRoot,omitempty"`
	// root complexes of the Data Direct functions of the PF's card
	DataDirectRoots []string `json:"dataDirectRoots,omitempty"`
	AuxDevice       string   `json:"auxDevice,omitempty"`
	Netdev          string   `json:"netdev,omitempty"`
	AltNames        []string `json:"altNames,omitempty"` // of a PF's netdev
	LinkType        string   `json:"linkType,omitempty"`
	LinkUp          bool     `json:"linkUp"`
	AdminDown       bool     `json:"adminDown,omitempty"`
	NumVFs          int      `json:"numVFs,omitempty"`
	TotalVFs        int      `json:"totalVFs,omitempty"`
	RDMADevices     []string `json:"rdmaDevices,omitempty"`
	// RDMAMode is the mode of the node's RDMA system, "shared" or "exclusive"; "" if it is unknown,
	// and for a Function without RDMA devices.
	RDMAMode   function.RDMAMode `json:"rdmaMode,omitempty"`
	IOMMUGroup string            `json:"iommuGroup,omitempty"`
	// HostUse is how the host itself uses the netdev, which keeps the Function from pods: "is a
	// port of bridge br0".
	HostUse string `json:"hostUse,omitempty"`
	// DefaultRoute is set if the node's own traffic uses the netdev, which keeps the Function from
	// pods.
	DefaultRoute bool `json:"defaultRoute,omitempty"`
	// Potential is set for an SF that is created when it is allocated. Gone is set if the device no
	// longer exists but has an attachment.
	Potential bool `json:"potential,omitempty"`
	Gone      bool `json:"gone,omitempty"`
	// Serial and Board describe the card of a PF.
	Serial string `json:"serial,omitempty"`
	Board  string `json:"board,omitempty"`

	// Pool is the DevicePool of the Function; empty if it has none. Publish is DRA or DevicePlugin.
	Pool    string `json:"pool,omitempty"`
	Publish string `json:"publish,omitempty"`
	// Problems keep the Function from pods.
	Problems   []Problem   `json:"problems,omitempty"`
	Attachment *Attachment `json:"attachment,omitempty"` // nil if the Function is free
}

// Problem is a reason why a Function is not allocated to pods.
type Problem struct {
	Taint   string `json:"taint"` // key of the device taint
	Message string `json:"message"`
}

// Attachment says which pod has a Function, and in which state.
type Attachment struct {
	// Reserved, Attaching, Attached, Lost, Reattaching, Detaching or Releasing
	State string `json:"state"`
	Pod   Pod    `json:"pod,omitzero"`
	Claim Claim  `json:"claim,omitzero"`
	// Resource is the extended resource through which the pod got the Function.
	Resource string `json:"resource,omitempty"`
	Sandbox  string `json:"sandbox,omitempty"` // ID of the pod's sandbox container

	// Interface is what the pod wants, or what it has once the Function is attached.
	Interface Interface `json:"interface"`
	// Network is the network of a Port that the agent itself requested; empty otherwise.
	Network string `json:"network,omitempty"`

	ReservedAt time.Time `json:"reservedAt"`
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	LostAt     time.Time `json:"lostAt,omitzero"`
	StoppedAt  time.Time `json:"stoppedAt,omitzero"` // when its release began
	// when it was restored and post-delete hooks began to run
	RestoredAt time.Time `json:"restoredAt,omitzero"`
	// Hook is the post-delete hook that the Function waits for. It is nil before RestoredAt, except
	// for the hook that deletes the Port of a quarantined Function, which runs earlier.
	Hook *Hook `json:"hook,omitempty"`
	// Quarantine is why the Function is kept from pods although its own pod is gone; nil if it is
	// not quarantined.
	Quarantine *Quarantine `json:"quarantine,omitempty"`
}

// Quarantine says why a Function could not be restored after its last pod.
type Quarantine struct {
	Reason  string    `json:"reason"`  // MayLeak, WrongDriver, NotTornDown or NotRestored
	Message string    `json:"message"` // result of the last attempt
	Since   time.Time `json:"since"`
	// how many attempts to restore the Function followed
	Attempts int       `json:"attempts,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// Interface describes a Function's netdev in a pod.
type Interface struct {
	Name      string         `json:"name,omitempty"`
	MAC       function.MAC   `json:"mac,omitempty"`
	MTU       int            `json:"mtu,omitempty"` // in bytes; 0 means the same as on the host
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	// Bond is the bond that the interface is a port of, and that has Addresses; "" for none.
	Bond string `json:"bond,omitempty"`
	VLAN int    `json:"vlan,omitempty"` // tag that the PF adds, 1-4094; 0 for none
	// Userspace is set if a program of the pod uses the Function without a netdev.
	Userspace bool `json:"userspace,omitempty"`
}

// Pod identifies a pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
}

// Claim identifies a request of a ResourceClaim.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
	Request   string `json:"request"`
}

// Hook is a post-delete hook that is running or waiting for a retry.
type Hook struct {
	Name     string    `json:"name"`               // PortHook, or the name of an executable
	Attempts int       `json:"attempts,omitempty"` // how often it failed
	Error    string    `json:"error,omitempty"`    // of the last failure
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// PortHook is the name of the hook that deletes the Port at the xPU.
const PortHook = "port"

// DeadLetter is a post-delete hook that was given up.
type DeadLetter struct {
	Hook     string      `json:"hook"`
	Function function.ID `json:"function"`
	Pod      Pod         `json:"pod,omitzero"`
	Claim    Claim       `json:"claim,omitzero"`
	Attempts int         `json:"attempts"`
	Error    string      `json:"error"` // of the last attempt
	Time     time.Time   `json:"time"`  // when it was given up
}

// Release is a request to free a Function: with a Hook by giving up this post-delete hook, and
// without by ending the quarantine.
type Release struct {
	Function function.ID `json:"function"`
	Hook     string      `json:"hook,omitempty"` // must be the hook that the Function waits for
	// AsItIs frees a quarantined Function in its current state. Otherwise it is tried again at
	// once, and stays quarantined if that fails.
	AsItIs bool `json:"asItIs,omitempty"`
	// PortGone confirms that the xPU no longer serves a Port of the Function. It is required to
	// give up [PortHook].
	PortGone bool `json:"portGone,omitempty"`
}

// NewFunction returns what the kernel shows of a Function.
func NewFunction(f function.Function) Function {
	var altNames []string
	if f.Kind == function.PF {
		altNames = f.PFAltNames
	}

	return Function{
		ID: f.ID, Kind: f.Kind, Class: f.Class, PF: f.PF, PFName: f.PFName, Index: f.Index,
		AltNames: altNames,
		Vendor:   f.Vendor, Device: f.Device, Driver: f.Driver, NUMANode: f.NUMANode,
		PCIeRoot: f.PCIeRoot, DataDirectRoots: f.DataDirectRoots,
		Netdev: f.Netdev, LinkType: f.LinkType, LinkUp: f.LinkUp, NumVFs: f.NumVFs,
		TotalVFs:  f.TotalVFs,
		AuxDevice: f.AuxDevice, AdminDown: f.AdminDown, HostUse: f.HostUse,
		RDMADevices: f.RDMADevices, RDMAMode: f.RDMAMode,
		IOMMUGroup: f.IOMMUGroup, DefaultRoute: f.DefaultRoute, Potential: f.Potential,
	}
}
