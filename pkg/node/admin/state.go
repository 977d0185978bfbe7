// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// State returns the current state of the node.
func (s *Server) State() nodestate.State {
	state := nodestate.State{
		Node: s.Node, Agent: version.String(), Time: time.Now().UTC(),
		Verification: s.Verification(),
	}
	pools := map[function.ID]pool.Pool{}
	all, _ := s.Pools()
	functions := s.Functions()
	for _, p := range all {
		for _, f := range p.Functions {
			pools[f.ID] = p
			if f.Potential {
				functions = append(functions, f)
			}
		}
	}

	attachments := map[function.ID]journal.Attachment{}
	for _, a := range s.Journal.All() {
		attachments[a.Function] = a
	}

	for _, f := range functions {
		shown := nodestate.NewFunction(f)
		if f.Kind == function.PF {
			card := s.Card(f.PF)
			shown.Serial, shown.Board = card.Serial, card.Board
		}

		if p, has := pools[f.ID]; has {
			shown.Pool, shown.Publish = p.Name, string(p.Spec.Publish)
			for _, problem := range s.Problems(p, f) {
				shown.Problems = append(shown.Problems, nodestate.Problem(problem))
			}
		}

		if a, has := attachments[f.ID]; has {
			shown.Attachment = attachment(a)
			delete(attachments, f.ID)
		}

		state.Functions = append(state.Functions, shown)
	}

	for _, a := range attachments {
		state.Functions = append(state.Functions, gone(a))
	}

	slices.SortFunc(state.Functions, func(a, b nodestate.Function) int {
		return cmp.Or(cmp.Compare(a.ID.Address, b.ID.Address), cmp.Compare(a.Index, b.Index))
	})

	for _, letter := range s.Journal.DeadLetters() {
		state.DeadLetters = append(state.DeadLetters, nodestate.DeadLetter{
			Hook: letter.Hook, Function: letter.Attachment.Function,
			Pod: podOf(letter.Attachment), Claim: claimOf(letter.Attachment),
			Attempts: letter.Attempts, Error: letter.Error, Time: letter.At,
		})
	}

	return state
}

// gone returns the Function of an attachment whose device no longer exists.
func gone(a journal.Attachment) nodestate.Function {
	f := nodestate.Function{
		ID: a.Function, Kind: function.PF, Class: function.Network, PF: a.PF, PFName: a.PFName,
		Index: a.VFIndex, NUMANode: -1,
		Gone: true, Attachment: attachment(a),
	}

	switch {
	case a.Function.Subfunction != "":
		f.Kind = function.SF
	case a.IsVF():
		f.Kind = function.VF
	}

	return f
}

func attachment(a journal.Attachment) *nodestate.Attachment {
	out := &nodestate.Attachment{
		State: string(a.State), Pod: podOf(a), Claim: claimOf(a), Resource: a.Resource,
		Sandbox:   a.Sandbox,
		Interface: interfaceOf(a), ReservedAt: a.ReservedAt, AttachedAt: a.AttachedAt,
		LostAt: a.LostAt, StoppedAt: a.StoppedAt,
		RestoredAt: a.RestoredAt,
	}

	if a.Port != nil {
		out.Network = a.Port.Network
	}

	// In a quarantine, the hook that deletes the Port has ended, and other hooks cannot run yet.
	if a.Hooks != nil && a.Hooks.Next != "" {
		out.Hook = &nodestate.Hook{
			Name: a.Hooks.Next, Attempts: a.Hooks.Attempts, Error: a.Hooks.Error,
			RetryAt: a.Hooks.RetryAt,
		}
	}

	if q := a.Quarantine; q != nil {
		out.Quarantine = &nodestate.Quarantine{
			Reason: string(q.Reason), Message: q.Message, Since: q.Since, Attempts: q.Attempts,
			RetryAt: q.RetryAt,
		}
	}

	return out
}

// interfaceOf returns the interface as it was observed in the pod, or as it was requested if it was
// not observed yet.
func interfaceOf(a journal.Attachment) nodestate.Interface {
	out := nodestate.Interface{
		Name: a.Interface.Name, MAC: a.Interface.MAC, MTU: a.Interface.MTU,
		Addresses: a.Interface.Addresses,
		Userspace: a.Interface.Userspace,
	}

	if a.Interface.Bond != nil {
		out.Bond = a.Interface.Bond.Name
	}
	if a.Interface.VF != nil {
		out.VLAN = ptr.Deref(a.Interface.VF.VLAN, 0)
	}

	if seen := a.Observed; seen != nil {
		out.Name, out.MAC, out.MTU, out.Addresses = seen.Name, seen.MAC, seen.MTU, seen.Addresses
	}

	return out
}

func podOf(a journal.Attachment) nodestate.Pod {
	return nodestate.Pod{Namespace: a.Pod.Namespace, Name: a.Pod.Name, UID: string(a.Pod.UID)}
}

func claimOf(a journal.Attachment) nodestate.Claim {
	return nodestate.Claim{
		Namespace: a.Claim.Namespace, Name: a.Claim.Name, UID: string(a.Claim.UID),
		Request: a.Claim.Request,
	}
}
