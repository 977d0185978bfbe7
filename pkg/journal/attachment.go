package journal

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/pci"
)

// State is how far an attachment is. The journal always says at least as much as was done to the Function.
type State string

const (
	// Reserved: the Function belongs to the claim, nothing is touched.
	Reserved State = "Reserved"
	// Attaching: what the netdev was is written down, and any part of the way to the pod may be done.
	Attaching State = "Attaching"
	// Attached: the netdev is in the pod.
	Attached State = "Attached"
	// Detaching: any part of the way back may be done. Next is Reserved.
	Detaching State = "Detaching"
	// Releasing: as Detaching, but the reservation goes too. Next is no record.
	Releasing State = "Releasing"
)

// Attachment is what the node knows about a Function that is not free. It is a value: what its pointers and slices
// point to is never changed once it is in a journal.
type Attachment struct {
	Function inventory.ID `json:"function"`
	// PF is the address of the Function's PF, its own for a PF.
	PF pci.Address `json:"pf"`
	// PFName is the PF's netdev when the Function was reserved; it may be renamed since.
	PFName string `json:"pfName,omitempty"`
	// VFIndex is [inventory.Function.Index].
	VFIndex int   `json:"vfIndex"`
	Claim   Claim `json:"claim"`
	Pod     Pod   `json:"pod"`

	// Interface is what the pod wants.
	Interface link.Interface `json:"interface"`

	State      State     `json:"state"`
	ReservedAt time.Time `json:"reservedAt"`

	// What follows is empty while the state is Reserved.

	// Sandbox is the ID of the pod's sandbox container: the generation of the attachment.
	Sandbox string `json:"sandbox,omitempty"`
	// BootID is that of the boot in which the Function was touched (/proc/sys/kernel/random/boot_id). After another
	// boot there is nothing to undo.
	BootID string `json:"bootID,omitempty"`
	// Place is the pod's network namespace and where the netdev is in it.
	Place link.Place `json:"place,omitzero"`
	// Before is what the netdev was on the host.
	Before *link.Snapshot `json:"before,omitempty"`

	// What follows is there once the state is Attached.

	Observed   *link.Observed `json:"observed,omitempty"`
	AttachedAt time.Time      `json:"attachedAt,omitzero"`

	// StoppedAt is when the way back began.
	StoppedAt time.Time `json:"stoppedAt,omitzero"`
}

// Claim is the ResourceClaim that a Function is allocated to. All of it is empty for a Function that was allocated as
// an extended resource.
type Claim struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
	Request   string    `json:"request,omitempty"` // in the claim; "main/sub" for a subrequest
	Pool      string    `json:"pool,omitempty"`    // of the ResourceSlice
	Device    string    `json:"device,omitempty"`  // in the ResourceSlice
}

// Pod is the pod that uses a Function.
type Pod struct {
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	UID       types.UID `json:"uid,omitempty"`
}

// IsVF says whether a PF enforces properties for the Function.
func (a Attachment) IsVF() bool {
	return a.Function.Subfunction == "" && a.PF != "" && a.PF != a.Function.Address && a.VFIndex >= 0
}

// Untouched is the attachment as it is once the netdev is back: reserved and nothing more.
func (a Attachment) Untouched() Attachment {
	return Attachment{
		Function: a.Function, PF: a.PF, PFName: a.PFName, VFIndex: a.VFIndex,
		Claim: a.Claim, Pod: a.Pod, Interface: a.Interface,
		State: Reserved, ReservedAt: a.ReservedAt,
	}
}
