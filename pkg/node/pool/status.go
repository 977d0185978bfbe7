// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// retry is the pause before a status is written again that the API server refused.
const retry = 5 * time.Second

// API has the calls of the API server that a [Reporter] uses.
type API interface {
	Declarations
	// XPUNode returns the last written status of this node, or nil if there is no such object.
	XPUNode(ctx context.Context) (*v1alpha1.XPUNodeStatus, error)
	// WriteXPUNode replaces the status of this node.
	WriteXPUNode(ctx context.Context, status v1alpha1.XPUNodeStatus) error
}

// Supply says which of the VFs that a DevicePool asks for by numVFs this node has.
type Supply struct {
	// Generation is the generation of the DevicePool that this Supply is about. It may be older
	// than the DevicePool's.
	Generation int64
	// PFs is the number of PFs of the node that the DevicePool names.
	PFs int
	// Shortages has the PFs without the VFs that the DevicePool asks for, sorted by PF.
	Shortages []v1alpha1.Shortage
}

// Reporter writes the node's XPUNode, in which the administrator sees the node's hardware and its
// pools.
type Reporter struct {
	Tracker *Tracker
	API     API
	// Problems returns the reasons why no pod can use a Function.
	Problems func(function.Function) []function.Problem
	// Card describes the card to which a PF belongs. answered is false while it may know more.
	Card func(pf pci.Address) (card function.Card, answered bool)
	// MAC returns the permanent address of a VF, or "" if there is none. answered is false if the
	// address is not known.
	MAC func(function.ID) (mac function.MAC, answered bool)
	// Supply returns the VFs of a DevicePool with numVFs. known is false until they have been
	// examined.
	Supply func(devicePool string) (s Supply, known bool)
	// Fallbacks returns what a DevicePool asks for and the cluster does not support.
	Fallbacks func(Pool) []v1alpha1.Fallback
	// Agent is this agent. It is nil in tests.
	Agent *v1alpha1.XPUNodeAgent
	// Verified returns the condition InventoryVerified. known is false until the inventory has been
	// verified.
	Verified func() (c metav1.Condition, known bool)
	Log      logr.Logger
}

// Run writes the XPUNode when it is out of date, until ctx ends. It checks at once, after every
// value from changes (of pools, their supply and their health), and after every value from declared
// (of DevicePools and the Node). It retries failures.
func (r *Reporter) Run(ctx context.Context, changes, declared <-chan struct{}) error {
	for {
		var again <-chan time.Time
		if err := r.write(ctx); err != nil && ctx.Err() == nil {
			r.Log.Error(err, "The XPUNode is not current", "retry", retry.String())
			again = time.After(retry)
		}

		select {
		case <-ctx.Done():
			return nil
		case <-changes:
		case <-declared:
		case <-again:
		}
	}
}

func (r *Reporter) write(ctx context.Context) error {
	pools, known := r.Tracker.Pools()
	if !known {
		return nil
	}

	// An XPUNode belongs to its Node.
	if _, err := r.API.NodeLabels(ctx); apierrors.IsNotFound(err) {
		return nil
	} else if err != nil {
		return err
	}

	have, err := r.API.XPUNode(ctx)
	if err != nil {
		return fmt.Errorf("read XPUNode: %w", err)
	}

	have = withOwnConditions(have)
	want := v1alpha1.XPUNodeStatus{
		Agent: r.Agent, Pools: r.entries(pools, have), Conditions: r.conditions(have),
	}
	want.Functions, want.PFs = r.hardware(r.Tracker.functions.Snapshot(), have)
	if have != nil && equality.Semantic.DeepEqual(*have, want) {
		return nil
	}
	if err := r.API.WriteXPUNode(ctx, want); err != nil {
		return fmt.Errorf("write XPUNode: %w", err)
	}

	return nil
}

// withOwnConditions returns the status without the conditions that xpu-controller writes. The status
// may be nil.
func withOwnConditions(have *v1alpha1.XPUNodeStatus) *v1alpha1.XPUNodeStatus {
	if have == nil {
		return nil
	}
	have = have.DeepCopy()
	meta.RemoveStatusCondition(&have.Conditions, v1alpha1.ConditionAgentReady)
	return have
}

// conditions returns the conditions of the node. Until the inventory has been verified, the earlier
// condition stays, because it may still be true.
func (r *Reporter) conditions(have *v1alpha1.XPUNodeStatus) []metav1.Condition {
	var conditions []metav1.Condition
	if have != nil {
		conditions = slices.Clone(have.Conditions)
	}

	if verified, known := r.Verified(); known {
		verified.Message = bounded(verified.Message, v1alpha1.MaxNodeMessage)
		meta.SetStatusCondition(&conditions, verified)
	}

	return conditions
}

// hardware counts the Functions and describes the PFs. What a card has not said yet stays as it was
// reported earlier, because it may still be true.
func (r *Reporter) hardware(
	functions []function.Function, have *v1alpha1.XPUNodeStatus,
) (int32, []v1alpha1.XPUNodePF) {
	earlier := reported(functions, have)
	macs := r.vfMACs(functions, earlier)
	var pfs []v1alpha1.XPUNodePF
	for _, f := range functions {
		if f.Kind != function.PF || len(pfs) == v1alpha1.MaxNodePFs {
			continue
		}

		card, answered := r.Card(f.PF)
		if before := earlier[f.PF]; !answered {
			card.Serial = cmp.Or(card.Serial, before.Serial)
			card.Board = cmp.Or(card.Board, before.Board)
			card.MAC = cmp.Or(card.MAC, function.MAC(before.MAC))
		}

		pfs = append(pfs, v1alpha1.XPUNodePF{
			Address: string(f.PF), Name: f.PFName, Vendor: f.Vendor, Device: f.Device,
			Driver: f.Driver, VFs: int32(f.NumVFs),
			Serial: bounded(card.Serial, v1alpha1.MaxNodeText),
			Board:  bounded(card.Board, v1alpha1.MaxNodeText),
			MAC:    string(card.MAC), VFOffset: int32(f.VFOffset), VFStride: int32(f.VFStride),
			TotalVFs: int32(f.TotalVFs), VFMACs: macs[f.PF],
		})
	}

	slices.SortFunc(pfs, func(a, b v1alpha1.XPUNodePF) int {
		return cmp.Compare(a.Address, b.Address)
	})

	return int32(len(functions)), pfs
}

// reported returns the PFs in an earlier report that are the same cards still, as far as vendor and
// device say so.
func reported(
	functions []function.Function, have *v1alpha1.XPUNodeStatus,
) map[pci.Address]v1alpha1.XPUNodePF {
	same := map[pci.Address]v1alpha1.XPUNodePF{}
	if have == nil {
		return same
	}

	for _, f := range functions {
		i := slices.IndexFunc(have.PFs, func(pf v1alpha1.XPUNodePF) bool {
			return f.Kind == function.PF && pf.Address == string(f.PF) &&
				pf.Vendor == f.Vendor && pf.Device == f.Device
		})
		if i >= 0 {
			same[f.PF] = have.PFs[i]
		}
	}

	return same
}

// vfMACs returns the permanent addresses of VFs by PF and index.
func (r *Reporter) vfMACs(
	functions []function.Function, earlier map[pci.Address]v1alpha1.XPUNodePF,
) map[pci.Address][]string {
	macs := map[pci.Address][]string{}
	for _, f := range functions {
		if f.Kind != function.VF || f.Index >= v1alpha1.MaxNodeVFMACs {
			continue
		}

		mac, answered := r.MAC(f.ID)
		if before := earlier[f.PF].VFMACs; !answered && f.Index < len(before) {
			mac = function.MAC(before[f.Index])
		}
		if mac != "" {
			missing := max(0, f.Index+1-len(macs[f.PF]))
			macs[f.PF] = append(macs[f.PF], make([]string, missing)...)
			macs[f.PF][f.Index] = string(mac)
		}
	}
	return macs
}

// entries returns the entries of the pools that concern the node, sorted by name. While the supply
// of a pool is unknown, its last entry stays, because it may still be true.
func (r *Reporter) entries(pools []Pool, have *v1alpha1.XPUNodeStatus) []v1alpha1.XPUNodePool {
	earlier := map[string]v1alpha1.XPUNodePool{}
	if have != nil {
		for _, entry := range have.Pools {
			earlier[entry.Name] = entry
		}
	}

	var entries []v1alpha1.XPUNodePool
	for _, p := range pools {
		supply, known := Supply{Generation: p.Generation}, true
		if p.Spec.NumVFs != nil {
			supply, known = r.Supply(p.Name)
		}

		// A Supply of a newer generation is about a DevicePool that will be read again, or that was
		// deleted and created anew.
		if !known || supply.Generation > p.Generation {
			if entry, had := earlier[p.Name]; had {
				entries = append(entries, entry)
			}
		} else if entry := r.entry(p, supply); entry != nil {
			entries = append(entries, *entry)
		}
	}

	return entries[:min(len(entries), v1alpha1.MaxNodePools)]
}

// entry returns the entry of a pool, or nil if the pool does not concern the node.
func (r *Reporter) entry(p Pool, supply Supply) *v1alpha1.XPUNodePool {
	shortages := merge(supply.Shortages, p.Shortages)
	if len(p.Functions) == 0 && len(p.Overlaps) == 0 && p.Err == nil && supply.PFs == 0 &&
		len(shortages) == 0 {
		return nil
	}

	for i := range shortages {
		shortages[i].Message = bounded(shortages[i].Message, v1alpha1.MaxNodeMessage)
	}

	entry := &v1alpha1.XPUNodePool{
		Name: p.Name, ObservedGeneration: supply.Generation, Functions: int32(len(p.Functions)),
		Overlapping: p.Overlaps[:min(len(p.Overlaps), v1alpha1.MaxNodeListed)],
		Shortages:   shortages[:min(len(shortages), v1alpha1.MaxNodeListed)],
		Fallbacks:   r.Fallbacks(p),
	}

	entry.Healthy, entry.Problems = r.problems(p.Functions)
	if p.Err != nil {
		entry.Error = bounded(p.Err.Error(), v1alpha1.MaxNodeMessage)
	}

	return entry
}

// problems counts the Functions without problems, and the others by their first problem, sorted by
// taint.
func (r *Reporter) problems(
	functions []function.Function,
) (healthy int32, problems []v1alpha1.FunctionProblem) {
	for _, f := range functions {
		all := r.Problems(f)
		if len(all) == 0 {
			healthy++
			continue
		}

		i := slices.IndexFunc(problems, func(p v1alpha1.FunctionProblem) bool {
			return p.Taint == all[0].Taint
		})
		if i < 0 {
			i = len(problems)
			message := bounded(all[0].Message, v1alpha1.MaxNodeMessage)
			problems = append(problems,
				v1alpha1.FunctionProblem{Taint: all[0].Taint, Message: message})
		}

		problems[i].Functions++
	}

	slices.SortFunc(problems, func(a, b v1alpha1.FunctionProblem) int {
		return cmp.Compare(a.Taint, b.Taint)
	})

	return healthy, problems
}

// bounded cuts a text to the given number of bytes, and drops bytes that the API does not accept.
func bounded(text string, most int) string {
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}

// merge combines the Shortages of VFs and of SFs: one for each PF, sorted by PF, with the message
// about VFs first.
func merge(vfs, sfs []v1alpha1.Shortage) []v1alpha1.Shortage {
	merged := slices.Clone(vfs)
	for _, s := range sfs {
		i := slices.IndexFunc(merged, func(have v1alpha1.Shortage) bool { return have.PF == s.PF })
		if i < 0 {
			merged = append(merged, s)
			continue
		}
		merged[i].Message += "; " + s.Message
	}

	slices.SortFunc(merged, func(a, b v1alpha1.Shortage) int { return cmp.Compare(a.PF, b.PF) })
	return merged
}
