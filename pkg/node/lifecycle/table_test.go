// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// triggers are what an event can be about, at a Function of any owner.
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

// recordsOf are what the journal can say of a Function in a phase.
func recordsOf(phase Phase) []journal.Attachment {
	allocated, claimedByCNI, ofPod := requested("c1"), claimedVF(), claimedVF()
	allocated.CNI, allocated.Pod = nil, journal.Pod{}
	claimedByCNI.CNI, claimedByCNI.Pod = requested("c1").CNI, requested("c1").Pod
	ofPod.Pod = requested("c1").Pod
	records := []journal.Attachment{
		requested("c1"), requested("c3"), claimedByCNI, claimedVF(), ofPod, allocated,
	}
	owners := len(records)

	if phase == Releasing { // one that is being released may be back already
		records = append(records, records...)
	}

	for i := range records {
		r := &records[i]
		r.State = phase
		switch phase {
		case DetachingKept:
			r.State, r.Quarantine = journal.Detaching, &journal.Quarantine{
				Reason: journal.MayLeak, Message: "macvlan",
			}
		case ReleasingKept:
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

// TestTableIsWhole: whatever happens, and whosever the Function is, the table says what follows;
// and it says nothing of what cannot be.
func TestTableIsWhole(t *testing.T) {
	reached := map[string]bool{}
	for _, p := range triggers() {
		if _, ok := Table[p.event][Nobodys][Free]; !ok && p.event != Sweep {
			t.Errorf("%s of a free Function: the table says nothing", p.event)
		}
		for _, phase := range Phases[1:] {
			for _, record := range recordsOf(phase) {
				whose := p.whose(record)
				if _, ok := Table[p.event][whose][phase]; !ok {
					t.Errorf("%s while %s, %s: the table says nothing", p.event, phase, whose)
				}
				reached[fmt.Sprint(p.event, whose)] = true
			}
		}
	}

	for event, byWhose := range Table {
		for whose, row := range byWhose {
			if whose != Nobodys && !reached[fmt.Sprint(event, whose)] {
				t.Errorf("%s, %s: cannot be", event, whose)
			}
			for phase, rule := range row {
				if (rule.If == "") != (rule.Else == "") || rule.Step == "" || rule.If != "" &&
					gather[rule.If] == nil {
					t.Errorf("%s, %s, %s: rule %+v", event, whose, phase, rule)
				}
			}
		}
	}
}

// TestIsClaim: a record is for the event's claim by the claim's UID, and an event without a claim
// is about none.
func TestIsClaim(t *testing.T) {
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

// TestNoOwnerLosesAFunctionUnshown: of what is in a pod's sandbox nothing is taken for somebody
// else without evidence about the one that has it.
func TestNoOwnerLosesAFunctionUnshown(t *testing.T) {
	takes := map[Step]bool{BringBack: true, EndRequest: true, Release: true, Attach: true}
	for _, event := range Events {
		for _, whose := range []Whose{AnotherClaims, AnotherRequests} {
			for _, phase := range []Phase{Attaching, Attached, Detaching, DetachingKept} {
				rule := Table[event][whose][phase]
				if takes[rule.Step] && rule.If != NamespaceGone || takes[rule.Else] {
					t.Errorf("%s while %s, %s: %+v", event, phase, whose, rule)
				}
			}
		}
	}
}
