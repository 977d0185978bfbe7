// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// TestLostIsReported: a Function that a program lost is reported at once. A Function that goes back
// to its pod is reported after a while.
func TestLostIsReported(t *testing.T) {
	record := claimedVF()
	record.State, record.Before, record.Observed = journal.Lost, &netdev.Snapshot{}, &netdev.Observed{}
	record.Pod = journal.Pod{Namespace: "default", Name: "p"}
	for _, test := range []struct {
		name      string
		state     journal.State
		userspace bool
		ago       time.Duration
		want      string
	}{
		{"just now", journal.Lost, false, 0, ""},
		{"for long", journal.Lost, false, time.Minute,
			"gets it back when the device and its Port are there"},
		{"on its way back for long", journal.Reattaching, false, time.Minute, "gets it back"},
		{"a program", journal.Lost, true, 0, "delete the pod"},
		{"attached", journal.Attached, false, time.Minute, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := New(openJournal(t), nil, nil, Options{}, logr.Discard())
				a := record
				a.State, a.Interface.Userspace, a.LostAt = test.state, test.userspace, time.Now()
				if err := m.put(a); err != nil {
					t.Fatal(err)
				}

				time.Sleep(test.ago)
				if got := m.Lost(vf); got == "" != (test.want == "") ||
					!strings.Contains(got, test.want) {
					t.Errorf("lost %q, want %q", got, test.want)
				}
			})
		})
	}
}

// TestOtherPod: the kubelet's answer counts for pods that it knows, and names the resource by which
// the pod has the Function.
func TestOtherPod(t *testing.T) {
	t.Parallel()
	by := func(namespace, pod string) *kubelet {
		return &kubelet{
			have: map[string]podresources.Assignment{
				vf.String(): {Namespace: namespace, Pod: pod, Resource: "r"},
			},
		}
	}

	asks := trigger{event: Add, pod: journal.Pod{Namespace: "default", Name: "p"}}
	for _, test := range []struct {
		name     string
		kubelet  *kubelet
		trigger  trigger
		want     string
		resource string
	}{
		{"nobody", &kubelet{}, asks, "", ""},
		{"the pod", by("default", "p"), asks, "", "r"},
		{"another", by("default", "q"), asks, "the kubelet gave it to pod default/q", ""},
		{"of another namespace", by("other", "p"), asks, "the kubelet gave it to pod other/p", ""},
		{"one that is not known", by("", ""), asks, "", "r"},
		{"whoever asks is not known", by("default", "q"), trigger{event: Add}, "", "r"},
		{"the kubelet is away", &kubelet{err: errDead}, asks, "", ""},
	} {
		m := New(openJournal(t), nil, nil, Options{Kubelet: test.kubelet}, logr.Discard())
		d := decision{id: vf}
		none, err := m.noOtherPod(t.Context(), test.trigger, &d)
		got := ""
		if !none {
			got = d.refusal.Error()
		}

		if err != nil {
			t.Errorf("%s: %v", test.name, err)
		}

		if got == "" != (test.want == "") || !strings.Contains(got, test.want) ||
			d.resource != test.resource {
			t.Errorf("%s: %q by %q, want %q by %q", test.name, got, d.resource, test.want,
				test.resource)
		}
	}
}

// TestTableIsShown: the documentation is generated from the lists, which must have every row and
// every cell of the table.
func TestTableIsShown(t *testing.T) {
	t.Parallel()
	for event, byOwner := range Table {
		if !slices.Contains(Events, event) {
			t.Errorf("%s is not shown", event)
		}
		for owner, row := range byOwner {
			if !slices.Contains(Owners, owner) {
				t.Errorf("%s, %s is not shown", event, owner)
			}
			for phase := range row {
				if !slices.Contains(Phases, phase) {
					t.Errorf("%s, %s: the rule of phase %s is not shown", event, owner, phase)
				}
			}
		}
	}
}
