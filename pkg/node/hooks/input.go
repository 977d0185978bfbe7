// SPDX-License-Identifier: Apache-2.0

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

// Input is the input of an executable: one JSON object on standard input. Times are in UTC and
// formatted as in RFC 3339. Fields without a value are absent; docs/how-to/post-delete-hooks.md
// says when.
type Input struct {
	Version  int           `json:"version"`
	Node     string        `json:"node"`
	Function InputFunction `json:"function"`
	// Resource is the extended resource by which the Function was allocated.
	Resource string `json:"resource,omitempty"`
	// Claim is the ResourceClaim to which the Function was allocated. There is either a Resource or
	// a Claim.
	Claim *journal.Claim `json:"claim,omitempty"`
	// Pod had the Function, or the Function was reserved for it.
	Pod *journal.Pod `json:"pod,omitempty"`

	// ContainerID is the ID of the pod's sandbox.
	ContainerID string `json:"containerID,omitempty"`
	// InterfaceName is the name in the pod, whether the interface was attached or not.
	InterfaceName string `json:"interfaceName,omitempty"`
	// Port is the deleted Port that the agent had requested from the xPU.
	Port *journal.Port `json:"port,omitempty"`

	ReservedAt time.Time `json:"reservedAt"`
	// AttachedAt is when the interface was in the pod.
	AttachedAt time.Time `json:"attachedAt,omitzero"`
	// DetachedAt is when the agent began to take the Function back.
	DetachedAt time.Time `json:"detachedAt,omitzero"`
	// RestoredAt is when the Function was on the host again, as it was before.
	RestoredAt time.Time `json:"restoredAt"`

	// Attempt counts from 1. A run that ended because the agent ended is not counted.
	Attempt int `json:"attempt"`
}

// InputFunction is the Function that was taken back.
type InputFunction struct {
	// ID is the Function's ID in the form of [function.ID]: "0000:3b:00.0/sf88" for an SF.
	ID         string        `json:"id"`
	Kind       function.Kind `json:"kind"` // PF, VF or SF
	PCIAddress pci.Address   `json:"pciAddress"`
	PF         pci.Address   `json:"pf"`
	// PFName is the name of the PF's netdev when the Function was reserved.
	PFName string `json:"pfName,omitempty"`
	// Index is the index of a VF on its PF, the sfnum of an SF, and -1 for a PF.
	Index int `json:"index"`
}

func input(node string, a journal.Attachment, attempt int) ([]byte, error) {
	use, _ := a.LastUse()
	in := Input{
		Version: InputVersion, Node: node,
		Function: InputFunction{
			ID: a.Function.String(), Kind: kind(a), PCIAddress: a.Function.Address, PF: a.PF,
			PFName: a.PFName, Index: a.VFIndex,
		},
		Resource: a.Resource, ContainerID: use.Sandbox, InterfaceName: a.Interface.Name,
		ReservedAt: a.ReservedAt, AttachedAt: use.AttachedAt, DetachedAt: use.StoppedAt,
		RestoredAt: a.RestoredAt,
		Attempt:    attempt,
	}

	if a.Claim.UID != "" {
		in.Claim = &a.Claim
		in.Claim.PodClaim = "" // this field is not part of the input
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
