package hooks

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// InputVersion is the version of [Input]. Fields may be added without a new version.
const InputVersion = 1

// Input is what an executable reads from standard input, as one JSON object. Times are in UTC, as RFC 3339 has them.
type Input struct {
	Version int `json:"version"`
	// Node is the name of the node.
	Node     string        `json:"node"`
	Function InputFunction `json:"function"`
	// Resource is the extended resource by which the Function was handed out; absent for a claim.
	Resource string `json:"resource,omitempty"`
	// Claim is the ResourceClaim that the Function was allocated to; absent for an extended resource.
	Claim *journal.Claim `json:"claim,omitempty"`
	// Pod had the Function, or it was reserved for it; absent where it is not known.
	Pod *journal.Pod `json:"pod,omitempty"`
	// ContainerID is the ID of the pod's sandbox container; absent where the Function was never attached.
	ContainerID string `json:"containerID,omitempty"`
	// InterfaceName is the name of the interface in the pod, attached or wanted.
	InterfaceName string `json:"interfaceName,omitempty"`
	// Port is the Port that the agent had the xPU make, and that is gone; absent where there was none, or where the
	// controller makes and deletes it.
	Port *journal.Port `json:"port,omitempty"`

	ReservedAt time.Time `json:"reservedAt"`
	// AttachedAt is when the interface was in the pod, DetachedAt when its way back began; absent if it never was there.
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	DetachedAt time.Time `json:"detachedAt,omitzero"`
	// RestoredAt is when the Function was on the host again, as it was before.
	RestoredAt time.Time `json:"restoredAt"`

	// Attempt counts the runs of this executable for this release, from 1. A run that was broken off with the agent is
	// not counted.
	Attempt int `json:"attempt"`
}

// InputFunction is the Function that was taken back.
type InputFunction struct {
	// ID is the PCI address; for an SF the PCI address of its PF and the sfnum: "0000:3b:00.0/sf88".
	ID         string        `json:"id"`
	Kind       function.Kind `json:"kind"` // PF, VF or SF
	PCIAddress pci.Address   `json:"pciAddress"`
	// PF is the PCI address of the PF, PFName its netdev when the Function was reserved.
	PF     pci.Address `json:"pf"`
	PFName string      `json:"pfName,omitempty"`
	// Index is the VF's index at its PF, the sfnum of an SF, and -1 for a PF.
	Index int `json:"index"`
}

// input is what the executable reads.
func input(node string, a journal.Attachment, attempt int) ([]byte, error) {
	use, _ := a.LastUse()
	in := Input{
		Version: InputVersion, Node: node,
		Function: InputFunction{
			ID: a.Function.String(), Kind: kind(a), PCIAddress: a.Function.Address, PF: a.PF, PFName: a.PFName, Index: a.VFIndex,
		},
		Resource: a.Resource, ContainerID: use.Sandbox, InterfaceName: a.Interface.Name,
		ReservedAt: a.ReservedAt, AttachedAt: use.AttachedAt, DetachedAt: use.StoppedAt, RestoredAt: a.RestoredAt,
		Attempt: attempt,
	}
	if a.Claim.UID != "" {
		in.Claim = &a.Claim
		in.Claim.PodClaim = "" // hooks are not told
	}
	if a.Pod.Name != "" {
		in.Pod = &a.Pod
	}
	if a.Port != nil {
		in.Port = &journal.Port{Network: a.Port.Network, MAC: a.Port.MAC}
	}
	out, err := json.Marshal(in)
	if err != nil {
		return nil, fmt.Errorf("input of post-delete hooks: %w", err)
	}
	return append(out, '\n'), nil
}
