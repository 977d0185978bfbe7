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

// State is how far an attachment is. It is written before the Function is touched.
type State string

const (
	// the Function has an owner, and nothing was done to it but what Setup says
	Reserved  State = "Reserved"
	Attaching State = "Attaching" // Before is recorded, and the netdev is on its way to the pod
	Attached  State = "Attached"  // the netdev is in the pod
	// the device or its driver went while the sandbox lives; Reattaching or Detaching is next
	Lost State = "Lost"
	// the netdev is on its way back to the pod that lost it; Attached or Lost is next
	Reattaching State = "Reattaching"
	Detaching   State = "Detaching" // the netdev is on its way to the host; Reserved is next
	// the same, and after RestoredAt the post-delete hooks run; then there is no record
	Releasing State = "Releasing"
)

// Attachment is what the node knows about a Function that is not free. It is a value: what its
// pointers and slices point to must not be changed. Port, Setup and Before are written before
// anything is done by them.
type Attachment struct {
	Function function.ID `json:"function"`
	// the address of the Function's PF, its own for a PF
	PF pci.Address `json:"pf"`
	// the PF's netdev when the Function was reserved; it may be renamed since
	PFName  string `json:"pfName,omitempty"`
	VFIndex int    `json:"vfIndex"` // [function.Function.Index]
	Claim   Claim  `json:"claim"`
	Pod     Pod    `json:"pod"`
	// Resource is the extended resource by which the Function was handed out, such as
	// "xpu.opiproject.org/fast"; empty for a claim.
	Resource string `json:"resource,omitempty"`
	// Nodes says that a container was given device nodes of the Function when it was allocated, so
	// that a pod may have used it without an attachment.
	Nodes bool `json:"nodes,omitempty"`
	// Port is the Port that this agent asks the xPU for; nil if there is none, or if the controller
	// makes it.
	Port *Port `json:"port,omitempty"`
	// CNI is the request that wants, or has, the Function attached; nil for NRI.
	CNI *CNI `json:"cni,omitempty"`
	// Setup is what is done to the Function so that its owner can use it, and undone by its
	// release; nil for nothing.
	Setup *Setup `json:"setup,omitempty"`
	// Interface is what the pod wants. AnyName says that the agent chose the interface's name, and
	// may choose another one if the pod has an interface of that name.
	Interface function.Interface `json:"interface"`
	AnyName   bool               `json:"anyName,omitempty"`

	// Driver is the kernel driver that the Function had when it was reserved, before any Setup; ""
	// where that is not known.
	Driver string `json:"driver,omitempty"`

	// Times of the wall clock are for people, as the clock may be set. Made orders the record among
	// requests: it is when the reservation was made and, once the Function was attached, when that
	// was. A record of an older agent has none.
	State      State         `json:"state"`
	ReservedAt time.Time     `json:"reservedAt"`
	Made       uptime.Moment `json:"made,omitzero"`
	// Ended is the last sandbox that had the Function and has it no more; nil if there was none.
	Ended *Ended `json:"ended,omitempty"`

	// The fields from here on are empty in state Reserved. Sandbox is the ID of the pod's sandbox
	// container.
	Sandbox string `json:"sandbox,omitempty"`
	// BootID is the boot in which the netdev was moved (/proc/sys/kernel/random/boot_id). Another
	// boot undoes the move.
	BootID string `json:"bootID,omitempty"`
	// Place is the pod's network namespace and where the netdev is in it.
	Place  netdev.Place     `json:"place,omitzero"`
	Before *netdev.Snapshot `json:"before,omitempty"` // what the netdev was on the host

	// Observed is what the netdev became in the pod, and in state Lost what it is to become again.
	// It and AttachedAt are set once the state is Attached.
	Observed   *netdev.Observed `json:"observed,omitempty"`
	AttachedAt time.Time        `json:"attachedAt,omitzero"`
	// LostAt is when it was seen that the netdev is lost; zero unless the state is Lost or
	// Reattaching.
	LostAt    time.Time `json:"lostAt,omitzero"`
	StoppedAt time.Time `json:"stoppedAt,omitzero"` // when the way back began

	// Quarantine is why the Function is kept from every owner although its pod is gone; nil unless
	// it is. It is set in the states Detaching and Releasing only, and ends before RestoredAt is
	// set.
	Quarantine *Quarantine `json:"quarantine,omitempty"`

	// Rebinding is the driver that is unbound and bound again to bring the netdev back; "" for
	// none. It is written before the driver is unbound, and stays until the Function is back.
	Rebinding string `json:"rebinding,omitempty"`

	// RestoredAt is when the netdev was verified to be back. It and Hooks are set in state
	// Releasing only. Once it is set, only post-delete hooks change the record.
	RestoredAt time.Time `json:"restoredAt,omitzero"`
	// Hooks is how far the post-delete hooks are; nil before RestoredAt, except that the Port of a
	// quarantined Function goes before.
	Hooks *Hooks `json:"hooks,omitempty"`
}

// Quarantine is why a Function that did not come back as it was is kept from every owner.
type Quarantine struct {
	Reason  QuarantineReason `json:"reason"`
	Message string           `json:"message"` // what the last try to bring the Function back said
	Since   time.Time        `json:"since"`
	// Attempts is how often the Function was tried again since then, and RetryAt when it will be,
	// for people.
	Attempts int       `json:"attempts,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// QuarantineReason is the kind of what is wrong with a quarantined Function.
type QuarantineReason string

const (
	MayLeak     QuarantineReason = "MayLeak"     // what the last owner left may reach the next one
	WrongDriver QuarantineReason = "WrongDriver" // another driver is bound than before
	NotTornDown QuarantineReason = "NotTornDown" // what the reservation set up is not undone
	// the netdev, or what the PF enforces, cannot be seen or restored
	NotRestored QuarantineReason = "NotRestored"
)

// QuarantineReasons are all reasons.
var QuarantineReasons = []QuarantineReason{MayLeak, WrongDriver, NotTornDown, NotRestored}

// Ended is a sandbox's use of a Function that is over. AttachedAt is zero if the attachment was
// never complete.
type Ended struct {
	Sandbox    string    `json:"sandbox"`
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	StoppedAt  time.Time `json:"stoppedAt"`
}

// Setup is how a Function is made usable for its owner.
type Setup struct {
	// SF says that the Function is an SF that exists for its owner only: it is made with the MAC,
	// and deleted afterwards.
	SF  bool         `json:"sf,omitempty"`
	MAC function.MAC `json:"mac,omitempty"`
	// Driver is the driver that is bound for the owner, "" for the Function's own. Own is the
	// driver that was bound before, "" if none was.
	Driver string `json:"driver,omitempty"`
	Own    string `json:"own,omitempty"`
	// Netdev is the netdev that the own driver had made, nil if there was none. RDMA says that it
	// had made an RDMA device.
	Netdev *netdev.Snapshot `json:"netdev,omitempty"`
	RDMA   bool             `json:"rdma,omitempty"`
	// BootID is the boot in which Netdev was seen. Another boot may have made something else of it.
	BootID string `json:"bootID,omitempty"`
}

// Hooks is how far the post-delete hooks of a Function are. They run one after the other.
type Hooks struct {
	Done []string `json:"done,omitempty"` // the names of those that ended well or were given up
	Next string   `json:"next"`           // the name of the one that runs or waits to be run again
	// Attempts is how often Next failed, Error why it failed last, and RetryAt when it runs again.
	Attempts int       `json:"attempts,omitempty"`
	Error    string    `json:"error,omitempty"`
	RetryAt  time.Time `json:"retryAt,omitzero"`
}

// Claim is the ResourceClaim that a Function is allocated to. All of it is empty for a Function
// that was allocated as an extended resource.
type Claim struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
	Request   string    `json:"request,omitempty"` // in the claim; "main/sub" for a subrequest
	Pool      string    `json:"pool,omitempty"`    // of the ResourceSlice
	Device    string    `json:"device,omitempty"`  // in the ResourceSlice
	// of the device, which is the PF; the Function was chosen for it then
	Share types.UID `json:"share,omitempty"`
	// in the pod's spec, for a claim that was made of a template
	PodClaim string `json:"podClaim,omitempty"`
}

// Port is what the xPU was asked to serve for a Function.
type Port struct {
	// of the Function when it was handed out; empty if not known
	DevicePool string `json:"devicePool,omitempty"`
	// the name of the network that the Port joins
	Network string       `json:"network"`
	MAC     function.MAC `json:"mac"` // of the Function as the xPU knows it
	// AssignAddresses has the network's address book give the interface its addresses; Addresses
	// are those it gave, or those that were asked for.
	AssignAddresses bool           `json:"assignAddresses,omitempty"`
	Addresses       []netip.Prefix `json:"addresses,omitempty"`
}

// CNI is what the container runtime asked for, by the CNI specification.
type CNI struct {
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
	Network     string `json:"network"` // the name of the network configuration
	// IPAM is the result of the IPAM plugin, as it printed it; empty if there is none.
	IPAM json.RawMessage `json:"ipam,omitempty"`
	// Claimed is the interface that the Function's claim, if any, wants: it is wanted again when
	// the request is over.
	Claimed *function.Interface `json:"claimed,omitempty"`
}

// Pod is the pod that uses a Function.
type Pod struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
}

// IsVF says whether a PF enforces properties for the Function.
func (a Attachment) IsVF() bool {
	return a.Function.Subfunction == "" && a.PF != "" && a.PF != a.Function.Address &&
		a.VFIndex >= 0
}

// Owner is the UID of the claim that the Function is for, or of its pod; "" while nobody knows the
// pod.
func (a Attachment) Owner() types.UID { return cmp.Or(a.Claim.UID, a.Pod.UID) }

// Restored says whether the netdev is back from a release and only hooks are left of it.
func (a Attachment) Restored() bool { return a.State == Releasing && !a.RestoredAt.IsZero() }

// Quarantined says whether the Function is kept from every owner.
func (a Attachment) Quarantined() bool { return a.Quarantine != nil }

// OwnDriver is the driver that the Function must have after its release; known is false where no
// record has it.
func (a Attachment) OwnDriver() (driver string, known bool) {
	if a.Setup != nil && a.Setup.Driver != "" {
		return a.Setup.Own, true
	}
	return a.Driver, a.Driver != ""
}

// LastUse is the sandbox that has the Function, or had it last; ok is false if there was none.
func (a Attachment) LastUse() (use Ended, ok bool) {
	switch {
	case a.Sandbox != "":
		return Ended{Sandbox: a.Sandbox, AttachedAt: a.AttachedAt, StoppedAt: a.StoppedAt}, true
	case a.Ended != nil:
		return *a.Ended, true
	}
	return Ended{}, false
}

// BackToReserved is the attachment after its netdev is back. The CNI request for a claim's Function
// is over then, and the interface is the claim's.
func (a Attachment) BackToReserved() Attachment {
	reserved := Attachment{
		Function: a.Function, PF: a.PF, PFName: a.PFName, VFIndex: a.VFIndex,
		Claim: a.Claim, Pod: a.Pod, Resource: a.Resource, Nodes: a.Nodes, Port: a.Port, CNI: a.CNI,
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

// ContainerIs returns a function that is true for attachments of the container's CNI request for
// the interface.
func ContainerIs(containerID, ifName string) func(Attachment) bool {
	return func(a Attachment) bool {
		return a.CNI != nil && a.CNI.ContainerID == containerID && a.CNI.IfName == ifName
	}
}
