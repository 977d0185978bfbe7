// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"cmp"
	"encoding/json"
	"net/netip"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/uptime"
)

// State is the stage of an attachment. It is written before the Function is touched.
type State string

const (
	// Reserved: the Function has an owner, and is unchanged except for its Setup.
	Reserved State = "Reserved"
	// Attaching: Before is recorded, and the netdev is on its way to the pod.
	Attaching State = "Attaching"
	// Attached: the netdev is in the pod.
	Attached State = "Attached"
	// Lost: the device or its driver disappeared while the sandbox exists. The next state is
	// Reattaching or Detaching.
	Lost State = "Lost"
	// Reattaching: the netdev is on its way back to the pod that lost it. The next state is
	// Attached or Lost.
	Reattaching State = "Reattaching"
	// Detaching: the netdev is on its way to the host. The next state is Reserved.
	Detaching State = "Detaching"
	// Releasing: the netdev is on its way to the host. After RestoredAt the post-delete hooks run.
	// After that, the record is deleted.
	Releasing State = "Releasing"
)

// Attachment is the record of a Function that is not free. It is a value: the targets of its
// pointers and slices must not be changed. Port, Setup and Before are written before they have an
// effect.
type Attachment struct {
	Function function.ID `json:"function"`
	// PF is the address of the Function's PF. For a PF it is its own address.
	PF pci.Address `json:"pf"`
	// PFName is the name of the PF's netdev when the Function was reserved. It may have been
	// renamed since.
	PFName  string `json:"pfName,omitempty"`
	VFIndex int    `json:"vfIndex"` // see [function.Function.Index]
	Claim   Claim  `json:"claim"`
	Pod     Pod    `json:"pod"`
	// Resource is the extended resource by which the Function was allocated, such as
	// "xpu.opiproject.org/fast"; empty for a claim.
	Resource string `json:"resource,omitempty"`
	// Nodes says that a container got device nodes of the Function when it was allocated, so that a
	// pod may have used the Function without an attachment.
	Nodes bool `json:"nodes,omitempty"`
	// Devices are the devices beside the Function that its pool promised when the Function was
	// reserved for a claim. It is nil in records of older agents, and without a claim.
	Devices *Devices `json:"devices,omitempty"`
	// Port is the Port that this agent requests from the xPU; nil if there is none, or if the
	// controller makes it.
	Port *Port `json:"port,omitempty"`
	// CNI is the CNI request that has attached the Function, or wants to; nil for NRI.
	CNI *CNI `json:"cni,omitempty"`
	// Setup says how the Function is set up for its owner. The release undoes it. It is nil if
	// there is nothing to set up.
	Setup *Setup `json:"setup,omitempty"`
	// Interface is the interface that the pod asks for. AnyName says that the agent chose the
	// interface's name, and may choose another one if the pod has an interface of that name.
	Interface function.Interface `json:"interface"`
	AnyName   bool               `json:"anyName,omitempty"`

	// Driver is the kernel driver that the Function had when it was reserved, before any Setup; ""
	// if this is unknown.
	Driver string `json:"driver,omitempty"`

	// Times of the wall clock are meant for people, because the clock may be set. Made orders the
	// record among requests. It is the time of the reservation, and after the Function was
	// attached, the time of the attachment. Records of older agents have none.
	State      State         `json:"state"`
	ReservedAt time.Time     `json:"reservedAt"`
	Made       uptime.Moment `json:"made,omitzero"`
	// Ended is the last sandbox that had the Function and has ended; nil if there was none.
	Ended *Ended `json:"ended,omitempty"`

	// The fields from here on are empty in state Reserved. Sandbox is the ID of the pod's sandbox
	// container.
	Sandbox string `json:"sandbox,omitempty"`
	// BootID is the boot in which the netdev was moved (/proc/sys/kernel/random/boot_id). A reboot
	// undoes the move.
	BootID string `json:"bootID,omitempty"`
	// Place is the pod's network namespace, and the netdev's place in it.
	Place netdev.Place `json:"place,omitzero"`
	// Inode is the inode number that the device of a Function without a netdev had in sysfs during
	// this boot, before the attachment; 0 if it is unknown. A later device at the same address has
	// another one.
	Inode uint64 `json:"inode,omitempty"`
	// Before is the netdev as it was on the host.
	Before *netdev.Snapshot `json:"before,omitempty"`

	// Observed is the netdev as it was in the pod after the attachment. In state Lost, the netdev
	// is to become this again. Observed and AttachedAt are set once the state is Attached.
	Observed   *netdev.Observed `json:"observed,omitempty"`
	AttachedAt time.Time        `json:"attachedAt,omitzero"`
	// LostAt is when the agent saw that the netdev was lost; zero unless the state is Lost or
	// Reattaching.
	LostAt time.Time `json:"lostAt,omitzero"`
	// StoppedAt is when the agent began to take the Function back.
	StoppedAt time.Time `json:"stoppedAt,omitzero"`

	// Quarantine says why no owner may get the Function although its pod is gone; nil for a
	// Function that is not quarantined. It is set in the states Detaching and Releasing only, and
	// is removed before RestoredAt is set.
	Quarantine *Quarantine `json:"quarantine,omitempty"`

	// Rebinding is the driver that is unbound and bound again to bring the netdev back; "" for
	// none. It is written before the driver is unbound, and stays until the Function is back.
	Rebinding string `json:"rebinding,omitempty"`

	// RestoredAt is when the netdev was verified to be back. RestoredAt and Hooks are set in state
	// Releasing only. Once RestoredAt is set, only post-delete hooks change the record.
	RestoredAt time.Time `json:"restoredAt,omitzero"`
	// Hooks is the progress of the post-delete hooks. It is nil before RestoredAt, unless the
	// Function is quarantined, in which case its Port is deleted earlier.
	Hooks *Hooks `json:"hooks,omitempty"`
}

// Quarantine says why no owner may get a Function that could not be restored.
type Quarantine struct {
	Reason QuarantineReason `json:"reason"`
	// Message is the error of the last attempt to restore the Function.
	Message string    `json:"message"`
	Since   time.Time `json:"since"`
	// Attempts is the number of attempts since then. RetryAt is the time of the next attempt, for
	// people.
	Attempts int       `json:"attempts,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// QuarantineReason is the kind of problem of a quarantined Function.
type QuarantineReason string

const (
	// MayLeak: leftovers of the last owner may reach the next one.
	MayLeak QuarantineReason = "MayLeak"
	// WrongDriver: the Function has another driver than before.
	WrongDriver QuarantineReason = "WrongDriver"
	// NotTornDown: the setup of the reservation is not undone.
	NotTornDown QuarantineReason = "NotTornDown"
	// NotRestored: the netdev, or what the PF enforces, cannot be read or restored.
	NotRestored QuarantineReason = "NotRestored"
)

// Devices says which devices containers get beside the Function.
type Devices struct {
	// RDMA stands for the character devices of the RDMA devices.
	RDMA bool `json:"rdma,omitempty"`
	// VDPA is "virtio" or "vhost" if the Function is used through its vDPA device, otherwise "".
	VDPA string `json:"vdpa,omitempty"`
}

// QuarantineReasons lists all reasons.
var QuarantineReasons = []QuarantineReason{MayLeak, WrongDriver, NotTornDown, NotRestored}

// Ended is the use of a Function by a sandbox that has ended. AttachedAt is zero if the attachment
// was never complete.
type Ended struct {
	Sandbox    string    `json:"sandbox"`
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	StoppedAt  time.Time `json:"stoppedAt"`
}

// Setup says how a Function is set up for its owner.
type Setup struct {
	// SF says that the Function is an SF that exists for its owner only. It is created with the
	// MAC, and deleted after the release.
	SF  bool         `json:"sf,omitempty"`
	MAC function.MAC `json:"mac,omitempty"`
	// Driver is the driver that is bound for the owner, "" for the Function's own. Own is the
	// driver that was bound before, "" if there was none.
	Driver string `json:"driver,omitempty"`
	Own    string `json:"own,omitempty"`
	// Netdev is the netdev of the Function's own driver, nil if there was none. RDMA says that
	// there was an RDMA device, and RDMADevices has the names.
	Netdev      *netdev.Snapshot `json:"netdev,omitempty"`
	RDMA        bool             `json:"rdma,omitempty"`
	RDMADevices []string         `json:"rdmaDevices,omitempty"`
	// BootID is the boot in which Netdev was seen. After a reboot it may be different.
	BootID string `json:"bootID,omitempty"`
}

// Hooks is the progress of a Function's post-delete hooks. They run one after the other.
type Hooks struct {
	// Done has the names of the hooks that succeeded or were given up.
	Done []string `json:"done,omitempty"`
	// Next is the name of the hook that runs or waits for another run.
	Next string `json:"next"`
	// Attempts is how often Next failed, Error is its last error, and RetryAt the time of its next
	// run.
	Attempts int       `json:"attempts,omitempty"`
	Error    string    `json:"error,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// Claim is the ResourceClaim to which a Function is allocated. It is empty for a Function that was
// allocated as an extended resource.
type Claim struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
	Request   string    `json:"request,omitempty"` // in the claim; "main/sub" for a subrequest
	Pool      string    `json:"pool,omitempty"`    // of the ResourceSlice
	Device    string    `json:"device,omitempty"`  // in the ResourceSlice
	// Share is the ID of the share, if Device is a PF. The Function was chosen for the share then.
	Share types.UID `json:"share,omitempty"`
	// PodClaim is the name of the claim in the pod's spec, if the claim was made from a template.
	PodClaim string `json:"podClaim,omitempty"`
}

// Port is what the xPU was asked to serve for a Function.
type Port struct {
	// ID is the id of the Port at the OPI agent in direct mode, so that the Port is found again
	// whatever the agent reports later. "" is the id of [opi.PortID].
	ID string `json:"id,omitempty"`
	// DevicePool is the Function's pool when it was allocated; empty if unknown.
	DevicePool string `json:"devicePool,omitempty"`
	// Network is the name of the network that the Port joins.
	Network string `json:"network"`
	// MAC is the address of the Function that the xPU knows.
	MAC function.MAC `json:"mac"`
	// AssignAddresses says that the network's address book assigns the interface its addresses.
	// Addresses are the assigned addresses, or the requested ones.
	AssignAddresses bool           `json:"assignAddresses,omitempty"`
	Addresses       []netip.Prefix `json:"addresses,omitempty"`
}

// CNI is the request of the container runtime, in the terms of the CNI specification.
type CNI struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Network     string `json:"network"` // the name of the network configuration
	// IPAM is the output of the IPAM plugin; empty if there is none.
	IPAM json.RawMessage `json:"ipam,omitempty"`
	// Claimed is the interface that the Function's claim asks for, if there is a claim. It applies
	// again when the request has ended.
	Claimed *function.Interface `json:"claimed,omitempty"`
}

// Pod is the pod that uses a Function.
type Pod struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
}

// IsVF reports whether the Function is a VF, for which a PF enforces properties.
func (a Attachment) IsVF() bool {
	return a.Function.Subfunction == "" && a.PF != "" && a.PF != a.Function.Address &&
		a.VFIndex >= 0
}

// Owner returns the UID of the claim that has the Function, or else of its pod; "" while the pod is
// unknown.
func (a Attachment) Owner() types.UID { return cmp.Or(a.Claim.UID, a.Pod.UID) }

// Restored reports whether a released netdev is back, so that only the hooks of the release have to
// run.
func (a Attachment) Restored() bool { return a.State == Releasing && !a.RestoredAt.IsZero() }

// Quarantined reports whether no owner may get the Function.
func (a Attachment) Quarantined() bool { return a.Quarantine != nil }

// OwnDriver returns the driver that the Function must have after its release. known is false if the
// record does not have it.
func (a Attachment) OwnDriver() (driver string, known bool) {
	if a.Setup != nil && a.Setup.Driver != "" {
		return a.Setup.Own, true
	}
	return a.Driver, a.Driver != ""
}

// LastUse returns the sandbox that has the Function, or had it last. ok is false if there was none.
func (a Attachment) LastUse() (use Ended, ok bool) {
	switch {
	case a.Sandbox != "":
		return Ended{Sandbox: a.Sandbox, AttachedAt: a.AttachedAt, StoppedAt: a.StoppedAt}, true
	case a.Ended != nil:
		return *a.Ended, true
	}
	return Ended{}, false
}

// BackToReserved returns the attachment as it is after its netdev is back. A CNI request for a
// claim's Function has ended then, and the interface is the claim's.
func (a Attachment) BackToReserved() Attachment {
	reserved := Attachment{
		Function: a.Function, PF: a.PF, PFName: a.PFName, VFIndex: a.VFIndex,
		Claim: a.Claim, Pod: a.Pod, Resource: a.Resource, Nodes: a.Nodes, Devices: a.Devices,
		Port: a.Port, CNI: a.CNI,
		Setup:     a.Setup,
		Interface: a.Interface, AnyName: a.AnyName, Driver: a.Driver,
		State: Reserved, ReservedAt: a.ReservedAt, Made: a.Made,
	}

	if a.CNI != nil && a.CNI.Claimed != nil {
		reserved.Interface, reserved.CNI = *a.CNI.Claimed, nil
	}

	if use, ok := a.LastUse(); ok {
		reserved.Ended = &use
	}

	return reserved
}

// ContainerIs returns a function that reports whether an attachment belongs to the container's CNI
// request for the interface.
func ContainerIs(containerID, ifName string) func(Attachment) bool {
	return func(a Attachment) bool {
		return a.CNI != nil && a.CNI.ContainerID == containerID && a.CNI.IfName == ifName
	}
}
