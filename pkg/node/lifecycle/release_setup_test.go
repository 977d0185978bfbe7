// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// order records the order of the steps of a release. Its netdev is on the host.
type order struct {
	attachesNothing
	steps []string
	// refuse is the error of Undo.
	refuse error
}

func (o *order) Restore(
	context.Context, netdev.Device, netdev.Snapshot, netdev.Place,
) (netdev.Restored, error) {
	o.steps = append(o.steps, "restore")
	return netdev.Restored{Name: "ens3f0v1"}, nil
}

func (o *order) Alive(netdev.Place) (bool, error) { return false, nil }

func (o *order) Holds(netdev.Place, netdev.Identity) (bool, error) { return false, nil }

// orderedSetup is the Setup of an order.
type orderedSetup struct{ *order }

func (o orderedSetup) Plan(context.Context, journal.Attachment) (*journal.Setup, error) {
	return nil, nil
}

func (o orderedSetup) SetUp(context.Context, journal.Attachment) error { return nil }

func (o orderedSetup) TearDown(_ context.Context, a journal.Attachment) error {
	o.steps = append(o.steps, "undo "+a.Setup.Driver)
	return o.refuse
}

// orderedHooks is the Queue of an order.
type orderedHooks struct{ *order }

func (o orderedHooks) First(journal.Attachment) string { return "hook" }

func (o orderedHooks) Add(function.ID) { o.steps = append(o.steps, "hooks") }

// withSetup returns the record of a Function in the state, with the driver that its pod asked for.
func withSetup(state journal.State) journal.Attachment {
	a := claimed(0)
	a.Setup, a.State, a.ReservedAt = &journal.Setup{
		Driver: "vfio-pci", Own: "iavf",
	}, state, time.Unix(1e9, 0).UTC()
	if state == journal.Attached {
		a.Sandbox, a.BootID, a.AttachedAt = "s1", "boot-1", time.Unix(1e9, 0).UTC()
		a.Before, a.Observed = &netdev.Snapshot{Name: "ens3f0v1"}, &netdev.Observed{Name: "net0"}
	}

	return a
}

// The setup of a Function is undone with its reservation: after the netdev is back, and before the
// hooks.
func TestReleaseTearsDown(t *testing.T) {
	t.Parallel()
	bare := withSetup(journal.Reserved)
	bare.Setup = nil
	for name, test := range map[string]struct {
		have   journal.Attachment
		bootID string
		want   []string
	}{
		"attached": {
			withSetup(journal.Attached), "boot-1", []string{"restore", "undo vfio-pci", "hooks"},
		},
		"never attached": {
			withSetup(journal.Reserved), "boot-1", []string{"undo vfio-pci", "hooks"},
		},
		"before another boot": {
			withSetup(journal.Attached), "boot-2", []string{"undo vfio-pci", "hooks"},
		},
		"not set up": {bare, "boot-1", []string{"hooks"}},
	} {
		t.Run(name, func(t *testing.T) {
			j, o := openJournal(t), &order{}
			must.Succeed(t, j.Put(test.have))
			netdevs := finderFunc(func(function.ID) (string, error) { return "ens3f0v1", nil })
			r := lifecycle.New(j, o, netdevs,
				lifecycle.Options{
					BootID: test.bootID, Setup: orderedSetup{o}, Hooks: orderedHooks{o},
				}, logr.Discard())

			must.Succeed(t, r.Unprepare(t.Context(), "claim-1"))
			if diff := cmp.Diff(test.want, o.steps); diff != "" {
				t.Errorf("steps (-want +got):\n%s", diff)
			}
		})
	}
}

// A Function whose setup cannot be undone is not free until it is undone.
func TestReleaseContinuesUndoing(t *testing.T) {
	t.Parallel()
	j, o := openJournal(t), &order{refuse: errors.New("busy")}
	a := withSetup(journal.Attached)
	must.Succeed(t, j.Put(a))
	netdevs := finderFunc(func(function.ID) (string, error) { return "ens3f0v1", nil })
	r := lifecycle.New(j, o, netdevs, lifecycle.Options{BootID: "boot-1", Setup: orderedSetup{o}},
		logr.Discard())
	if err := r.Unprepare(t.Context(), "claim-1"); !errors.Is(err, o.refuse) {
		t.Errorf("error %v, want %v", err, o.refuse)
	}
	if record, ok := j.Get(a.Function); !ok || record.State != journal.Releasing ||
		record.Restored() {
		t.Errorf("record %v %+v", ok, record)
	}

	o.refuse = nil
	must.Succeed(t, r.Recover(t.Context()))
	if record, ok := j.Get(a.Function); ok {
		t.Errorf("not free: %+v", record)
	}
}

// A pod that gets another sandbox has the Function with the setup that it asked for.
func TestDetachKeepsSetup(t *testing.T) {
	t.Parallel()
	j, o := openJournal(t), &order{}
	a := withSetup(journal.Attached)
	must.Succeed(t, j.Put(a))
	netdevs := finderFunc(func(function.ID) (string, error) { return "ens3f0v1", nil })
	r := lifecycle.New(j, o, netdevs, lifecycle.Options{BootID: "boot-1", Setup: orderedSetup{o}},
		logr.Discard())
	must.Succeed(t, r.Detach(t.Context(), a.Function, a.Sandbox))
	record, _ := j.Get(a.Function)
	if diff := cmp.Diff(a.Setup, record.Setup); diff != "" || record.State != journal.Reserved {
		t.Errorf("state %s, setup (-want +got):\n%s", record.State, diff)
	}
	if !slices.Equal(o.steps, []string{"restore"}) {
		t.Errorf("steps %q", o.steps)
	}
}
