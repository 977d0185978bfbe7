// SPDX-License-Identifier: Apache-2.0

// Package nodestate has what an agent tells administrators about its node, and asks the agent for
// it.
package nodestate

import (
	"net/netip"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// State is what is on a node at a time. Without an agent, it has no more than what the kernel
// shows: no pools, problems, attachments and dead letters.
type State struct {
	// name of its Node object, or of the host where there is none
	Node string `json:"node,omitempty"`
	// version of the agent that tells; empty where none does
	Agent     string     `json:"agent,omitempty"`
	Time      time.Time  `json:"time"`
	Functions []Function `json:"functions"` // sorted by address, SFs behind their PF by sfnum
	// DeadLetters are the post-delete hooks that were given up, the oldest first. An agent keeps
	// the last 100.
	DeadLetters []DeadLetter `json:"deadLetters,omitempty"`
}

// Function is a Function as the kernel shows it; see [function.Function] for the fields of the same
// names.
type Function struct {
	ID          function.ID    `json:"function"`
	Kind        function.Kind  `json:"kind"`
	Class       function.Class `json:"class"`
	PF          pci.Address    `json:"pf"`
	PFName      string         `json:"pfName,omitempty"`
	Index       int            `json:"index"`
	Vendor      string         `json:"vendor,omitempty"`
	Device      string         `json:"device,omitempty"`
	Driver      string         `json:"driver,omitempty"`
	NUMANode    int            `json:"numaNode"`
	PCIeRoot    string         `json:"pcieRoot,omitempty"`
	AuxDevice   string         `json:"auxDevice,omitempty"`
	Netdev      string         `json:"netdev,omitempty"`
	LinkType    string         `json:"linkType,omitempty"`
	LinkUp      bool           `json:"linkUp"`
	AdminDown   bool           `json:"adminDown,omitempty"`
	NumVFs      int            `json:"numVFs,omitempty"`
	TotalVFs    int            `json:"totalVFs,omitempty"`
	RDMADevices []string       `json:"rdmaDevices,omitempty"`
	IOMMUGroup  string         `json:"iommuGroup,omitempty"`
	// HostUse is what the host itself uses the netdev for, so that pods do not get the Function:
	// "is a port of bridge br0".
	HostUse string `json:"hostUse,omitempty"`
	// DefaultRoute says that the node's own traffic goes over the netdev, so that pods do not get
	// the Function.
	DefaultRoute bool `json:"defaultRoute,omitempty"`
	// Potential says that the SF is made when it is allocated. Gone says that there is no device
	// any more, but an attachment.
	Potential bool `json:"potential,omitempty"`
	Gone      bool `json:"gone,omitempty"`
	// Serial and Board are those of a PF's card.
	Serial string `json:"serial,omitempty"`
	Board  string `json:"board,omitempty"`

	// Pool is the DevicePool that has the Function; empty if none has. Publish is DRA or
	// DevicePlugin.
	Pool    string `json:"pool,omitempty"`
	Publish string `json:"publish,omitempty"`
	// Problems keep the Function from pods.
	Problems   []Problem   `json:"problems,omitempty"`
	Attachment *Attachment `json:"attachment,omitempty"` // nil for a Function that is free
}

// Problem is a reason why a Function is not given to pods.
type Problem struct {
	Taint   string `json:"taint"` // key of the device taint
	Message string `json:"message"`
}

// Attachment says who has a Function that is not free, and how far that is.
type Attachment struct {
	// Reserved, Attaching, Attached, Lost, Reattaching, Detaching or Releasing
	State string `json:"state"`
	Pod   Pod    `json:"pod,omitzero"`
	Claim Claim  `json:"claim,omitzero"`
	// Resource is the extended resource by which the Function was given to the pod.
	Resource string `json:"resource,omitempty"`
	Sandbox  string `json:"sandbox,omitempty"` // ID of the pod's sandbox container

	// Interface is what the pod wants, or what it has, once the Function is attached.
	Interface Interface `json:"interface"`
	// Network is that of the Port that the agent itself asked for; empty where the controller
	// asked, or nobody.
	Network string `json:"network,omitempty"`

	ReservedAt time.Time `json:"reservedAt"`
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	LostAt     time.Time `json:"lostAt,omitzero"`
	StoppedAt  time.Time `json:"stoppedAt,omitzero"` // when its way back began
	// when it was back, and post-delete hooks began to run
	RestoredAt time.Time `json:"restoredAt,omitzero"`
	// Hook is the post-delete hook that keeps the Function from being free; nil before RestoredAt,
	// except that the Port of a quarantined Function goes before.
	Hook *Hook `json:"hook,omitempty"`
	// Quarantine is why the Function is kept from every pod although its own is gone; nil unless it
	// is.
	Quarantine *Quarantine `json:"quarantine,omitempty"`
}

// Quarantine is why a Function did not come back from its last pod as it was.
type Quarantine struct {
	Reason  string    `json:"reason"`  // MayLeak, WrongDriver, NotTornDown or NotRestored
	Message string    `json:"message"` // what the last try said
	Since   time.Time `json:"since"`
	// how often the Function was tried again since then
	Attempts int       `json:"attempts,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// Interface is a Function's netdev in a pod.
type Interface struct {
	Name      string         `json:"name,omitempty"`
	MAC       function.MAC   `json:"mac,omitempty"`
	MTU       int            `json:"mtu,omitempty"` // bytes; 0 where it is as on the host
	Addresses []netip.Prefix `json:"addresses,omitempty"`
	VLAN      int            `json:"vlan,omitempty"` // tag that the PF adds, 1-4094; 0 for none
	// Userspace says that a program of the pod has the Function without a netdev.
	Userspace bool `json:"userspace,omitempty"`
}

// Pod names a pod.
type Pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
}

// Claim names the request of a ResourceClaim.
type Claim struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	UID       string `json:"uid,omitempty"`
	Request   string `json:"request"`
}

// Hook is a post-delete hook that runs or waits to be run again.
type Hook struct {
	Name     string    `json:"name"`               // PortHook, or the name of an executable
	Attempts int       `json:"attempts,omitempty"` // how often it failed
	Error    string    `json:"error,omitempty"`    // why it failed last
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

// Release asks to free a Function: by giving up the post-delete hook that it waits for, or, without
// a Hook, by ending its quarantine.
type Release struct {
	Function function.ID `json:"function"`
	Hook     string      `json:"hook,omitempty"` // must be the one that the Function waits for
	// AsItIs lets a quarantined Function go as it is. Without, it is tried again at once, and stays
	// quarantined if that fails.
	AsItIs bool `json:"asItIs,omitempty"`
	// PortGone affirms that the xPU serves no Port of the Function any more. Without, [PortHook] is
	// not given up.
	PortGone bool `json:"portGone,omitempty"`
}

// NewFunction is what the kernel shows of a Function.
func NewFunction(f function.Function) Function {
	return Function{
		ID: f.ID, Kind: f.Kind, Class: f.Class, PF: f.PF, PFName: f.PFName, Index: f.Index,
		Vendor: f.Vendor, Device: f.Device, Driver: f.Driver, NUMANode: f.NUMANode,
		PCIeRoot: f.PCIeRoot,
		Netdev:   f.Netdev, LinkType: f.LinkType, LinkUp: f.LinkUp, NumVFs: f.NumVFs,
		TotalVFs:  f.TotalVFs,
		AuxDevice: f.AuxDevice, AdminDown: f.AdminDown, HostUse: f.HostUse,
		RDMADevices: f.RDMADevices, IOMMUGroup: f.IOMMUGroup, DefaultRoute: f.DefaultRoute,
		Potential: f.Potential,
	}
}
