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

// Input is what an executable reads from standard input, as one JSON object. Times are in UTC, as
// RFC 3339 has them. What is not known or never was is absent; docs/how-to/post-delete-hooks.md
// tells when.
type Input struct {
	Version  int           `json:"version"`
	Node     string        `json:"node"`
	Function InputFunction `json:"function"`
	// the extended resource by which the Function was handed out
	Resource string `json:"resource,omitempty"`
	// or the ResourceClaim that it was allocated to
	Claim *journal.Claim `json:"claim,omitempty"`
	// had the Function, or it was reserved for the pod
	Pod *journal.Pod `json:"pod,omitempty"`

	ContainerID   string `json:"containerID,omitempty"`   // of the pod's sandbox
	InterfaceName string `json:"interfaceName,omitempty"` // in the pod, attached or wanted
	// that the agent had the xPU make, and that is gone
	Port *journal.Port `json:"port,omitempty"`

	ReservedAt time.Time `json:"reservedAt"`
	AttachedAt time.Time `json:"attachedAt,omitzero"` // the interface was in the pod
	DetachedAt time.Time `json:"detachedAt,omitzero"` // its way back began
	// the Function was on the host again, as it was before
	RestoredAt time.Time `json:"restoredAt"`

	Attempt int `json:"attempt"` // from 1; a run that was broken off with the agent is not counted
}

// InputFunction is the Function that was taken back.
type InputFunction struct {
	// as [function.ID] is written: "0000:3b:00.0/sf88" for an SF
	ID         string        `json:"id"`
	Kind       function.Kind `json:"kind"` // PF, VF or SF
	PCIAddress pci.Address   `json:"pciAddress"`
	PF         pci.Address   `json:"pf"`
	// netdev of the PF when the Function was reserved
	PFName string `json:"pfName,omitempty"`
	// the VF's index at its PF, the sfnum of an SF, and -1 for a PF
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
