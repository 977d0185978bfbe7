// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/provisioning"
)

// asked is a provisioner that records its calls.
type asked struct {
	provisioning.Provisioner
	requests []journal.Attachment
	err      error
}

func (a *asked) Provision(
	_ context.Context, r journal.Attachment,
) (provisioning.Provisioned, error) {
	a.requests = append(a.requests, r)
	return provisioning.Provisioned{}, a.err
}

// refusing is a claimPorts that returns an error.
type refusing struct{ error }

func (r refusing) Serves(context.Context, string, types.UID, function.ID) error { return r.error }

// TestServedAgain: a Function that came back is served as its record says, by the agent or the
// controller.
func TestServedAgain(t *testing.T) {
	const pf = pci.Address("0000:3b:00.0")
	vf, sf := function.ID{Address: "0000:3b:02.1"}, function.SubfunctionID(pf, 88)
	refusal, ofClaim := errors.New("the xPU is away"), errors.New("its claim's Port is not up")
	own := &journal.Port{DevicePool: "fast", Network: "lab", MAC: "02:00:00:00:00:01"}
	pod := journal.Pod{Namespace: "default", Name: "p", UID: "p-uid"}
	for _, test := range []struct {
		name   string
		record journal.Attachment
		err    error
		want   error
		asks   bool
	}{
		{"no Port", journal.Attachment{Function: vf}, nil, nil, false},
		{"of a claim", journal.Attachment{Function: vf, Claim: journal.Claim{UID: "c"}}, nil,
			ofClaim, false},
		{"its own", journal.Attachment{Function: vf, PF: pf, Port: own, Pod: pod}, nil, nil, true},
		{"of an SF that is gone, refused", journal.Attachment{Function: sf, PF: pf, Port: own},
			refusal, refusal, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			xpu := &asked{err: test.err}
			b := &backend{provisioner: xpu, claimPorts: refusing{ofClaim}}
			if err := b.serve(t.Context(), test.record); !errors.Is(err, test.want) {
				t.Errorf("error %v, want %v", err, test.want)
			}

			var want []journal.Attachment
			if test.asks {
				want = append(want, test.record)
			}
			if diff := cmp.Diff(want, xpu.requests); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
		})
	}
}

// reported records the claims that were reported.
type reported []journal.Claim

func (r *reported) Report(c journal.Claim) { *r = append(*r, c) }

// TestPodAndClaimAreInformed: a pod gets an event, and a claim a status, about the fate of a
// Function.
func TestPodAndClaimAreInformed(t *testing.T) {
	recorder, claims := events.NewFakeRecorder(10), &reported{}
	node := &reports{claim: claims.Report, recorder: recorder, node: "node1"}

	a := journal.Attachment{
		Function: function.ID{Address: "0000:3b:02.1"}, Interface: function.Interface{Name: "net1"},
		Pod:   journal.Pod{Namespace: "default", Name: "p", UID: "p-uid"},
		Claim: journal.Claim{Name: "c", UID: "c-uid"},
	}

	a.State = journal.Lost
	node.loss(a)
	a.State = journal.Attached
	node.loss(a)
	a.State, a.Interface.Userspace, a.Claim = journal.Lost, true, journal.Claim{}
	node.loss(a)

	for _, want := range []string{
		"Warning FunctionLost Function 0000:3b:02.1 on node node1: the device of interface net1 " +
			"went: it comes back to the pod with the device",
		"Normal FunctionBack Function 0000:3b:02.1 on node node1: interface net1 is in the pod again",
		"Warning FunctionLost Function 0000:3b:02.1 on node node1: its device went, and a " +
			"program that had it cannot get it back: delete the pod",
	} {
		if got := <-recorder.Events; got != want {
			t.Errorf("event %q, want %q", got, want)
		}
	}

	if diff := cmp.Diff(reported{{Name: "c", UID: "c-uid"}, {Name: "c", UID: "c-uid"}, {}},
		*claims); diff != "" {
		t.Errorf("claims told (-want +got):\n%s", diff)
	}

	(&reports{claim: claims.Report}).loss(a) // without an API server
}

// TestQuarantineIsReported: the pod and the node get an event about a quarantine, and the node
// another one about its end.
func TestQuarantineIsReported(t *testing.T) {
	recorder := events.NewFakeRecorder(10)
	node := &reports{recorder: recorder, node: "node1"}

	a := journal.Attachment{
		Function:   function.ID{Address: "0000:3b:02.1"},
		Pod:        journal.Pod{Namespace: "default", Name: "p", UID: "p-uid"},
		Quarantine: &journal.Quarantine{Message: "driver is vfio-pci, was igbvf"},
	}

	node.quarantine(a)
	a.Pod = journal.Pod{}
	node.quarantine(a)
	node.release(a, "is as it was")

	for _, want := range []string{
		"Warning FunctionQuarantined Function 0000:3b:02.1 on node node1: is kept from other " +
			"pods: driver is vfio-pci, was igbvf",
		"Warning FunctionQuarantined Function 0000:3b:02.1 on node node1: did not come back from " +
			"its pod as it was, and is kept from others: driver is vfio-pci, was igbvf",
		"Warning FunctionQuarantined Function 0000:3b:02.1 on node node1: did not come back from " +
			"its pod as it was, and is kept from others: driver is vfio-pci, was igbvf",
		"Normal FunctionReleased Function 0000:3b:02.1 on node node1: was quarantined, and is as it was",
	} {
		if got := <-recorder.Events; got != want {
			t.Errorf("event %q, want %q", got, want)
		}
	}

	(&reports{}).quarantine(a) // without an API server
}
