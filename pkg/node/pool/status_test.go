// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// supplies has the Supply of each DevicePool by name.
type supplies map[string]Supply

func (s supplies) Supply(devicePool string) (Supply, bool) {
	supply, known := s[devicePool]
	return supply, known
}

// undeclared is a node whose XPUNode cannot be read, or that is gone.
type undeclared struct {
	*node
	err, nodeErr error
}

func (u undeclared) XPUNode(context.Context) (*v1alpha1.XPUNodeStatus, error) { return nil, u.err }

func (u undeclared) NodeLabels(context.Context) (map[string]string, error) { return nil, u.nodeErr }

// tracked returns the tracker of a node whose Functions and DevicePools have been read.
func tracked(t *testing.T, n *node) *Tracker {
	t.Helper()
	tracker := NewTracker(n, n, nil, testr.New(t))
	ctx, cancel := context.WithCancel(t.Context())
	if err := tracker.Run(ctx, nil, cancel); err != nil {
		t.Fatal(err)
	}
	return tracker
}

// healthy is the health of Functions without problems.
func healthy(function.Function) []function.Problem { return nil }

func noCard(pci.Address) (c function.Card, answered bool) { return c, true }

func noMAC(function.ID) (mac function.MAC, answered bool) { return "", true }

func unverified() (c metav1.Condition, known bool) { return c, false }

func TestReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := devicePool("fast", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0-1"}})
		empty := devicePool("empty", v1alpha1.FunctionSelector{PFNames: []string{"ens9"}})
		wide := devicePool("wide", v1alpha1.FunctionSelector{Devices: []string{"101e"}})
		n := &node{functions: oneCard(), devicePools: []v1alpha1.DevicePool{fast, empty, wide}}
		tracker := NewTracker(n, n, nil, logr.Discard())
		trackerChanges, changes, declared := make(chan struct{}, 1), make(chan struct{},
			1), make(chan struct{}, 1)
		reporter := &Reporter{Fallbacks: none, Tracker: tracker, API: n, Problems: healthy,
			Card: noCard, MAC: noMAC, Verified: unverified, Log: testr.New(t)}
		go reporter.Run(t.Context(), changes, declared)

		wrote := func(what string, want int) {
			t.Helper()
			synctest.Wait()
			if got := n.takeWrites(); got != want {
				t.Errorf("%s: %d writes, want %d", what, got, want)
			}
		}

		wrote("before the pools are known", 0)
		go tracker.Run(t.Context(), trackerChanges, func() { changes <- struct{}{} })
		wrote("at first", 1)

		want := []v1alpha1.XPUNodePool{
			{Name: "fast", Functions: 2, Healthy: 2},
			{Name: "wide", Functions: 6, Healthy: 6,
				Overlapping: []string{"0000:3b:00.2 in fast", "0000:3b:00.3 in fast"}},
		}

		if diff := cmp.Diff(want, n.pools()); diff != "" {
			t.Errorf("pools: -want +got\n%s", diff)
		}
		if n.status.Functions != int32(len(n.functions)) {
			t.Errorf("%d Functions, want %d", n.status.Functions, len(n.functions))
		}

		changes <- struct{}{}
		wrote("nothing changed", 0)

		// A change of the spec is a change of the entry.
		n.set(func() { n.devicePools[0].Generation, want[0].ObservedGeneration = 2, 2 })
		trackerChanges <- struct{}{}
		wrote("another spec", 1)
		if diff := cmp.Diff(want, n.pools()); diff != "" {
			t.Errorf("pools: -want +got\n%s", diff)
		}

		// The XPUNode is deleted with the Node, and created again with it.
		n.set(func() {
			n.labelsErr, n.status = apierrors.NewNotFound(schema.GroupResource{}, "node1"), nil
		})
		declared <- struct{}{}
		wrote("there is no Node", 0)
		n.set(func() { n.labelsErr = nil })
		declared <- struct{}{}
		wrote("the Node is back", 1)

		// The entries disappear with the last Function. A write that fails is repeated.
		n.set(func() { n.functions, n.writeErr = nil, errors.New("the API server is away") })
		trackerChanges <- struct{}{}
		wrote("the write fails", 1)
		n.set(func() { n.writeErr = nil })
		waitFor(retry)
		wrote("again", 1)
		if got := n.pools(); got != nil {
			t.Errorf("pools %+v, want none", got)
		}
	})
}

// TestReporterProblems: each kind of problem of Functions is reported once.
func TestReporterProblems(t *testing.T) {
	functions := oneCard()
	problems := map[function.ID][]function.Problem{
		functions[1].ID: {
			{Taint: "link-down", Message: "no cable"}, {Taint: "fault", Message: "broken"},
		},
		functions[2].ID: {{Taint: "link-down", Message: "no cable"}},
		functions[3].ID: {{Taint: "fault", Message: strings.Repeat("ü", v1alpha1.MaxNodeMessage)}},
	}

	reporter := &Reporter{Fallbacks: none, Problems: func(f function.Function) []function.Problem {
		return problems[f.ID]
	}}
	entry := reporter.entry(Pool{Name: "fast", Functions: functions[1:6]}, Supply{})

	want := []v1alpha1.FunctionProblem{
		{Taint: "fault", Functions: 1, Message: strings.Repeat("ü", v1alpha1.MaxNodeMessage/2)},
		{Taint: "link-down", Functions: 2, Message: "no cable"},
	}

	if diff := cmp.Diff(want, entry.Problems); diff != "" || entry.Functions != 5 ||
		entry.Healthy != 2 {
		t.Errorf("%d of %d are healthy, problems (-want +got):\n%s", entry.Healthy,
			entry.Functions, diff)
	}
}

// TestHardware: as many PFs are described as fit.
func TestHardware(t *testing.T) {
	reporter := &Reporter{
		Fallbacks: none,
		Card: func(pci.Address) (function.Card, bool) {
			return function.Card{
				Serial: strings.Repeat("7", v1alpha1.MaxNodeText+1), Board: "MT_0000000884",
				MAC: "02:00:00:00:00:01",
			}, true
		},
		MAC: func(id function.ID) (function.MAC, bool) {
			if id.Address == "0000:3b:00.4" {
				return "02:00:00:00:00:04", true
			}
			return "", true
		},
	}

	count, pfs := reporter.hardware(oneCard(), nil)
	want := []v1alpha1.XPUNodePF{{
		Address: "0000:3b:00.0", Name: "ens3f0", Vendor: "15b3", Device: "a2dc",
		Driver: "mlx5_core",
		Serial: strings.Repeat("7", v1alpha1.MaxNodeText), Board: "MT_0000000884",
		MAC: "02:00:00:00:00:01", VFMACs: []string{"", "", "02:00:00:00:00:04"},
	}}

	if diff := cmp.Diff(want, pfs); diff != "" || int(count) != len(oneCard()) {
		t.Errorf("%d Functions, PFs (-want +got):\n%s", count, diff)
	}

	var many []function.Function
	for i := range v1alpha1.MaxNodePFs + 1 {
		many = append(many, function.Function{
			Kind: function.PF, PF: pci.Address(fmt.Sprintf("0000:%02x:00.0", i)),
		})
	}

	if count, pfs := reporter.hardware(many, nil); len(pfs) != v1alpha1.MaxNodePFs ||
		int(count) != len(many) {
		t.Errorf("%d PFs of %d, want %d", len(pfs), count, v1alpha1.MaxNodePFs)
	}
}

// TestHardwareBeforeCardsAnswer checks that what a card has not said yet stays as it was reported,
// and that another card does not get it.
func TestHardwareBeforeCardsAnswer(t *testing.T) {
	reporter := &Reporter{
		Fallbacks: none,
		Card:      func(pci.Address) (c function.Card, answered bool) { return c, false },
		MAC:       func(function.ID) (mac function.MAC, answered bool) { return "", false },
	}
	reported := v1alpha1.XPUNodePF{
		Address: "0000:3b:00.0", Name: "ens3f0", Vendor: "15b3", Device: "a2dc",
		Driver: "mlx5_core", Serial: "7", Board: "MT_0000000884", MAC: "02:00:00:00:00:01",
		VFMACs: []string{"", "02:00:00:00:00:03"},
	}
	before := &v1alpha1.XPUNodeStatus{PFs: []v1alpha1.XPUNodePF{reported}}

	_, pfs := reporter.hardware(oneCard(), before)
	if diff := cmp.Diff(before.PFs, pfs); diff != "" {
		t.Errorf("PFs (-want +got):\n%s", diff)
	}

	before.PFs[0].Device = "1021"
	_, pfs = reporter.hardware(oneCard(), before)
	if pfs[0].Serial != "" || pfs[0].MAC != "" {
		t.Errorf("got %+v, want nothing of another card", pfs[0])
	}
}

func TestReporterListsAFewOverlaps(t *testing.T) {
	overlaps := slices.Repeat([]string{"0000:3b:00.2 in fast"}, v1alpha1.MaxNodeListed+5)
	entry := (&Reporter{Fallbacks: none, Problems: healthy}).entry(Pool{
		Name: "wide", Overlaps: overlaps,
	}, Supply{})
	if entry == nil || entry.Functions != 0 || len(entry.Overlapping) != v1alpha1.MaxNodeListed {
		t.Errorf("entry = %+v, want %d overlaps", entry, v1alpha1.MaxNodeListed)
	}
}

func TestPoolErrorIsReported(t *testing.T) {
	entry := (&Reporter{Fallbacks: none, Problems: healthy}).entry(
		Pool{Name: "wide", Err: errors.New("resource a.example/b belongs to DevicePool fast")},
		Supply{})
	if entry == nil || entry.Error != "resource a.example/b belongs to DevicePool fast" {
		t.Errorf("entry = %+v, want the error", entry)
	}
}

// TestReporterErrors: if something cannot be read, an error is returned, so that it is retried.
// Nothing is written for a Node that is gone.
func TestReporterErrors(t *testing.T) {
	n := &node{}
	tracker := tracked(t, n)
	away := errors.New("the API server is away")
	for name, test := range map[string]struct{ err, nodeErr, want error }{
		"the XPUNode":       {away, nil, away},
		"the Node is gone":  {away, apierrors.NewNotFound(schema.GroupResource{}, "node1"), nil},
		"the Node, for now": {nil, away, away},
	} {
		reporter := &Reporter{
			Fallbacks: none, Tracker: tracker, API: undeclared{n, test.err, test.nodeErr},
			Problems: healthy, Card: noCard, Verified: unverified, Log: testr.New(t),
		}
		if err := reporter.write(t.Context()); !errors.Is(err, test.want) ||
			(test.want == nil) != (err == nil) {
			t.Errorf("%s: error %v, want %v", name, err, test.want)
		}
	}
}

// TestReporterSupply: missing VFs of a pool are reported. As long as the supply is unknown, the
// last entry stays, because it would disappear and come back at each start of the agent.
func TestReporterSupply(t *testing.T) {
	made := devicePool("made", v1alpha1.FunctionSelector{PFNames: []string{"ens9"}})
	made.Spec.NumVFs, made.Generation = ptr.To[int32](4), 2
	busy := v1alpha1.Shortage{PF: "0000:3b:00.0", Reason: v1alpha1.ReasonBusy}
	before := []v1alpha1.XPUNodePool{{Name: "made", Shortages: []v1alpha1.Shortage{busy}}}
	n := &node{devicePools: []v1alpha1.DevicePool{made},
		status: &v1alpha1.XPUNodeStatus{Pools: before}}
	vfs := supplies{}
	reporter := &Reporter{Fallbacks: none, Tracker: tracked(t, n), API: n, Problems: healthy,
		Card: noCard, Supply: vfs.Supply, Verified: unverified, Log: testr.New(t)}
	write := func(writes int, want ...v1alpha1.XPUNodePool) {
		t.Helper()
		if err := reporter.write(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := n.takeWrites(); got != writes {
			t.Errorf("%d writes, want %d", got, writes)
		}
		if diff := cmp.Diff(want, n.pools()); diff != "" {
			t.Errorf("status (-want +got):\n%s", diff)
		}
	}

	write(0, before...)
	inUse := v1alpha1.Shortage{
		PF: "0000:3b:00.0", Reason: v1alpha1.ReasonInUse, Message: "PF 0000:3b:00.0 is in use",
	}
	vfs["made"] = Supply{Generation: 1, PFs: 1, Shortages: []v1alpha1.Shortage{inUse}}
	write(1, v1alpha1.XPUNodePool{
		Name: "made", ObservedGeneration: 1, Shortages: []v1alpha1.Shortage{inUse},
	})
	write(0, v1alpha1.XPUNodePool{
		Name: "made", ObservedGeneration: 1, Shortages: []v1alpha1.Shortage{inUse},
	})
	vfs["made"] = Supply{Generation: 2, PFs: 1} // the node has such a PF, but no Functions
	write(1, v1alpha1.XPUNodePool{Name: "made", ObservedGeneration: 2})
	// for a DevicePool that has not been read yet
	vfs["made"] = Supply{Generation: 3, PFs: 1, Shortages: []v1alpha1.Shortage{inUse}}
	write(0, v1alpha1.XPUNodePool{Name: "made", ObservedGeneration: 2})
	vfs["made"] = Supply{Generation: 2}
	write(1)
}

// TestReporterShortages: there is one shortage for each PF, for VFs and SFs together, and not more
// than fit.
func TestReporterShortages(t *testing.T) {
	short := func(pf, message string) v1alpha1.Shortage {
		return v1alpha1.Shortage{PF: pf, Message: message}
	}
	entry := (&Reporter{Fallbacks: none, Problems: healthy}).entry(
		Pool{Shortages: []v1alpha1.Shortage{short("a", "no SFs"), short("b", "no SFs")}},
		Supply{PFs: 2, Shortages: []v1alpha1.Shortage{short("b", "no VFs"), short("c", "no VFs")}})
	want := []v1alpha1.Shortage{
		short("a", "no SFs"), short("b", "no VFs; no SFs"), short("c", "no VFs"),
	}
	if diff := cmp.Diff(want, entry.Shortages); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	var many []v1alpha1.Shortage
	for i := range v1alpha1.MaxNodeListed + 5 {
		many = append(many, short(fmt.Sprintf("%02d", i), ""))
	}
	if entry := (&Reporter{Fallbacks: none, Problems: healthy}).entry(Pool{},
		Supply{Shortages: many}); len(entry.Shortages) != v1alpha1.MaxNodeListed {
		t.Errorf("%d are listed, want %d", len(entry.Shortages), v1alpha1.MaxNodeListed)
	}
}

// none returns the fallbacks of a cluster that has all features.
func none(Pool) []v1alpha1.Fallback { return nil }

// TestReporterVerified: the earlier condition stays until the inventory is verified, and nothing is
// written if the next comparison says the same.
func TestReporterVerified(t *testing.T) {
	earlier := metav1.Condition{
		Type: v1alpha1.ConditionInventoryVerified, Status: metav1.ConditionTrue,
		Reason: v1alpha1.ReasonVerified, Message: "the same", LastTransitionTime: metav1.Unix(7, 0),
	}
	n := &node{status: &v1alpha1.XPUNodeStatus{Conditions: []metav1.Condition{earlier}}}
	said, known := earlier, false
	reporter := &Reporter{Fallbacks: none, Tracker: tracked(t, n), API: n, Problems: healthy,
		Card: noCard, Log: testr.New(t),
		Verified: func() (metav1.Condition, bool) { return said, known }}
	write := func(what string, writes int) metav1.Condition {
		t.Helper()
		if err := reporter.write(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := n.takeWrites(); got != writes || len(n.status.Conditions) != 1 {
			t.Fatalf("%s: %d writes, conditions %+v", what, got, n.status.Conditions)
		}
		return n.status.Conditions[0]
	}

	write("before the first comparison", 0)
	known, said.LastTransitionTime = true, metav1.Time{}
	write("the same", 0)
	said.Status, said.Reason = metav1.ConditionFalse, v1alpha1.ReasonDifferent
	said.Message = strings.Repeat("ü", v1alpha1.MaxNodeMessage)
	got := write("a difference", 1)
	if got.Status != metav1.ConditionFalse || !got.LastTransitionTime.After(time.Unix(7, 0)) ||
		got.Message != strings.Repeat("ü", v1alpha1.MaxNodeMessage/2) {
		t.Errorf("%+v", got)
	}
	write("the same difference", 0)
}
