// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// triggers returns events from different subjects, for Functions of any owner.
func triggers() []trigger {
	pod, other := journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"}, journal.Pod{
		Namespace: "default", Name: "q", UID: "pod-2",
	}
	var all []trigger
	for _, event := range Events {
		for _, pod := range []journal.Pod{pod, other} {
			for _, id := range []string{"1", "2"} {
				all = append(all, trigger{
					event: event, pod: pod, claim: claimedVF().Claim.UID,
					resource: "xpu.opiproject.org/fast",
					ifName:   "net1", sandbox: "c" + id,
				})
			}
		}
	}

	for i := range all {
		if i%3 == 0 {
			all[i].claim = "claim-2"
		}
	}

	return all
}

// recordsOf returns records that the journal can have of a Function in the phase.
func recordsOf(phase Phase) []journal.Attachment {
	allocated, claimedByCNI, ofPod := requested("c1"), claimedVF(), claimedVF()
	allocated.CNI, allocated.Pod = nil, journal.Pod{}
	claimedByCNI.CNI, claimedByCNI.Pod = requested("c1").CNI, requested("c1").Pod
	ofPod.Pod = requested("c1").Pod
	records := []journal.Attachment{
		requested("c1"), requested("c3"), claimedByCNI, claimedVF(), ofPod, allocated,
	}
	owners := len(records)

	if phase == Releasing { // a Function in state Releasing may be back already
		records = append(records, records...)
	}

	for i := range records {
		r := &records[i]
		r.State = phase
		switch phase {
		case DetachingQuarantined:
			r.State, r.Quarantine = journal.Detaching, &journal.Quarantine{
				Reason: journal.MayLeak, Message: "macvlan",
			}
		case ReleasingQuarantined:
			r.State, r.Quarantine = journal.Releasing, &journal.Quarantine{
				Reason: journal.MayLeak, Message: "macvlan",
			}
		}

		if i >= owners {
			r.RestoredAt, r.Hooks = r.RestoredAt.AddDate(2000, 0, 0), &journal.Hooks{Next: "port"}
		}

		if r.State != journal.Reserved {
			r.Sandbox, r.BootID, r.Before, r.Observed = "c1", "boot-1", &netdev.Snapshot{}, &netdev.Observed{}
		}
	}

	return records
}

// TestTableIsWhole: the table has a rule for every combination of event, owner and phase that can
// occur, and no rule for any other.
func TestTableIsWhole(t *testing.T) {
	t.Parallel()
	reached := map[string]bool{}
	for _, p := range triggers() {
		if _, ok := Table[p.event][None][Free]; !ok && p.event != Sweep {
			t.Errorf("%s of a free Function: the table says nothing", p.event)
		}
		for _, phase := range Phases[1:] {
			for _, record := range recordsOf(phase) {
				owner := p.ownerOf(record)
				if _, ok := Table[p.event][owner][phase]; !ok {
					t.Errorf("%s while %s, %s: the table says nothing", p.event, phase, owner)
				}
				reached[fmt.Sprint(p.event, owner)] = true
			}
		}
	}

	for event, byOwner := range Table {
		for owner, row := range byOwner {
			if owner != None && !reached[fmt.Sprint(event, owner)] {
				t.Errorf("%s, %s: cannot be", event, owner)
			}
			for phase, rule := range row {
				if (rule.If == "") != (rule.Else == "") || rule.Step == "" || rule.If != "" &&
					gather[rule.If] == nil {
					t.Errorf("%s, %s, %s: rule %+v", event, owner, phase, rule)
				}
			}
		}
	}
}

// TestIsClaim: a record belongs to the event's claim if it has the claim's UID. An event without a
// claim is about no claim.
func TestIsClaim(t *testing.T) {
	t.Parallel()
	byRequest, allocated := claimedVF(), requested("c1")
	byRequest.CNI = allocated.CNI
	for uid, want := range map[types.UID]bool{"claim-1": true, "claim-2": false, "": false} {
		p := trigger{claim: uid}
		if p.isClaim(claimedVF()) != want || p.isClaim(byRequest) != want || p.isClaim(allocated) {
			t.Errorf("claim %q: %t, %t, %t", uid, p.isClaim(claimedVF()), p.isClaim(byRequest),
				p.isClaim(allocated))
		}
	}
}

// TestNoOwnerLosesAFunctionUnshown: a Function in a pod's sandbox is not taken for another owner
// without evidence about its current owner.
func TestNoOwnerLosesAFunctionUnshown(t *testing.T) {
	t.Parallel()
	takes := map[Step]bool{BringBack: true, EndRequest: true, Release: true, Attach: true}
	for _, event := range Events {
		for _, owner := range []Owner{OtherClaim, OtherRequest} {
			for _, phase := range []Phase{Attaching, Attached, Detaching, DetachingQuarantined} {
				rule := Table[event][owner][phase]
				if takes[rule.Step] && rule.If != NamespaceGone || takes[rule.Else] {
					t.Errorf("%s while %s, %s: %+v", event, phase, owner, rule)
				}
			}
		}
	}
}
