// SPDX-License-Identifier: Apache-2.0

package soak

import (
	"math/rand/v2"
	"net"
	"reflect"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestClockIsShifted checks that a change of the clock shifts all times of a copied record and
// nothing else, and leaves the original record unchanged.
func TestClockIsShifted(t *testing.T) {
	at := time.Unix(1e9, 0).UTC()
	record := journal.Attachment{
		Function: function.ID{Address: "0000:3b:02.1"}, State: journal.Releasing, ReservedAt: at,
		RestoredAt: at,
		Ended:      &journal.Ended{Sandbox: "s", StoppedAt: at}, Hooks: &journal.Hooks{
			Next: "port", Attempts: 2, RetryAt: at,
		},
	}

	got := record
	shift(reflect.ValueOf(&got).Elem(), time.Hour)

	want := record
	later := at.Add(time.Hour)
	want.ReservedAt, want.RestoredAt = later, later
	want.Ended = &journal.Ended{Sandbox: "s", StoppedAt: later}
	want.Hooks = &journal.Hooks{Next: "port", Attempts: 2, RetryAt: later}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if !record.Ended.StoppedAt.Equal(at) || !record.Hooks.RetryAt.Equal(at) {
		t.Error("the record itself was changed")
	}
}

// TestHarm checks that a hostile pod does what its comment says.
func TestHarm(t *testing.T) {
	if !netns.Isolated() {
		t.Skip("needs root, for a network namespace of its own")
	}

	pod, xpu := netns.New(t), netns.New(t)
	netns.Connect(t, pod, "net1", xpu, "port1")

	l := &life{
		node: &node{t: t, dir: t.TempDir()}, random: rand.New(rand.NewPCG(1, 2)), way: hostile,
		name: "pod-1",
	}

	must.Succeed(t, l.harm(sandbox{pod, "s1"}))
	defer l.accomplice.Close()

	spy, err := l.accomplice.Handle().LinkByName("spy")
	must.Succeed(t, err)
	if spy.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("the macvlan has flags %s", spy.Attrs().Flags)
	}

	renamed, err := pod.Handle().LinkByName("eth7")
	must.Succeed(t, err)
	if a := renamed.Attrs(); len(a.AltNames) != manyNames || a.Promisc == 0 || a.MTU == 1500 {
		t.Errorf("%d names, promiscuous %d, MTU %d", len(a.AltNames), a.Promisc, a.MTU)
	}
}
