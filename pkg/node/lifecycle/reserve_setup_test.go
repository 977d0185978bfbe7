// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// workshop binds drivers, and checks the journal when it does.
type workshop struct {
	journal *journal.Journal
	own     string // the driver that is bound
	refuse  error
	undone  int

	mu    sync.Mutex // guards bound, because Functions are set up side by side
	bound map[function.ID]string
}

func (w *workshop) Plan(_ context.Context, want journal.Attachment) (*journal.Setup, error) {
	return &journal.Setup{Driver: want.Setup.Driver, Own: w.own}, w.refuse
}

func (w *workshop) SetUp(_ context.Context, a journal.Attachment) error {
	if record, ok := w.journal.Get(a.Function); !ok || !cmp.Equal(record, a) {
		return errors.New("the journal does not say so")
	}
	if w.refuse != nil {
		return w.refuse
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.bound[a.Function], w.own = a.Setup.Driver, a.Setup.Driver
	return nil
}

// driverOf returns the driver that is bound to a Function.
func (w *workshop) driverOf(f function.ID) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.bound[f]
}

func (w *workshop) TearDown(_ context.Context, a journal.Attachment) error {
	w.undone++
	delete(w.bound, a.Function)
	w.own = a.Setup.Own
	return nil
}

func fitting(t *testing.T) (*Manager, *workshop) {
	t.Helper()
	w := &workshop{journal: openJournal(t), own: "iavf", bound: map[function.ID]string{}}
	return w.attacher(), w
}

// attacher returns the Manager of a new run of the agent.
func (w *workshop) attacher() *Manager {
	return New(w.journal, &engine{}, netdevs{}, Options{Setup: w}, logr.Discard())
}

func withSetup() journal.Attachment {
	want := claimedVF()
	want.Setup = &journal.Setup{Driver: "vfio-pci"}
	return want
}

// wantBound fails the test unless the driver is bound and the record says how to undo it.
func (w *workshop) wantBound(t *testing.T, driver string) {
	t.Helper()
	if got := w.bound[vf]; got != driver {
		t.Errorf("bound %q, want %q", got, driver)
	}
	record, _ := w.journal.Get(vf)
	if diff := cmp.Diff(&journal.Setup{Driver: "vfio-pci", Own: "iavf"}, record.Setup); diff != "" {
		t.Errorf("setup (-want +got):\n%s", diff)
	}
}

// The setup is written to the journal before it is carried out, and the record of how the Function
// was before stays the same in every later reservation.
func TestReserveSetsUp(t *testing.T) {
	t.Parallel()
	a, w := fitting(t)
	for range 2 {
		if err := a.Reserve(t.Context(), withSetup()); err != nil {
			t.Fatal(err)
		}
		w.wantBound(t, "vfio-pci")
	}
}

// A setup that failed is continued by the next reservation, which knows how the Function was
// before.
func TestReserveContinuesSetup(t *testing.T) {
	t.Parallel()
	a, w := fitting(t)
	planned := withSetup()
	planned.Setup.Own, planned.State = "iavf", journal.Reserved
	if err := w.journal.Put(planned); err != nil {
		t.Fatal(err)
	}

	w.own, w.refuse = "", errors.New("refused") // the setup is half done
	if err := a.Reserve(t.Context(), withSetup()); !errors.Is(err, w.refuse) ||
		!strings.Contains(err.Error(), vf.String()) {
		t.Errorf("error %v, want one that names the Function: %v", err, w.refuse)
	}

	w.wantBound(t, "")
	w.refuse = nil
	if err := a.Reserve(t.Context(), withSetup()); err != nil {
		t.Fatal(err)
	}

	w.wantBound(t, "vfio-pci")
}

// A setup that cannot be carried out is not written to the journal.
func TestReserveRefusesSetup(t *testing.T) {
	t.Parallel()
	a, w := fitting(t)
	w.refuse = errors.New("refused")
	if err := a.Reserve(t.Context(), withSetup()); !errors.Is(err, w.refuse) {
		t.Errorf("error %v, want %v", err, w.refuse)
	}
	if all := w.journal.All(); len(all) > 0 {
		t.Errorf("records %+v", all)
	}
}

// The setup of an earlier Allocate, for a pod that never asked for the Function by CNI, is undone
// before the next pod gets it, because the kubelet allocates only what no pod has. A pod that did
// ask for it has it as it was allocated.
func TestReserveForTheNextPodReleasesFirst(t *testing.T) {
	t.Parallel()
	vfio, none := &journal.Setup{Driver: "vfio-pci"}, (*journal.Setup)(nil)
	for name, test := range map[string]struct {
		wish    *journal.Setup
		request *journal.CNI
		undone  int
		bound   string
	}{
		"the same":       {vfio, nil, 1, "vfio-pci"},
		"own driver":     {none, nil, 1, ""},
		"another driver": {&journal.Setup{Driver: "uio"}, nil, 1, "uio"},
		"pod that has it now": {
			none, &journal.CNI{ContainerID: "s1", IfName: "net1"}, 0, "vfio-pci",
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, w := fitting(t)
			want := withSetup()
			want.Claim, want.Setup = journal.Claim{}, vfio
			if err := a.Reserve(t.Context(), want); err != nil {
				t.Fatal(err)
			}

			want.Setup, want.CNI = test.wish, test.request
			if err := a.Reserve(t.Context(), want); err != nil {
				t.Fatal(err)
			}
			if w.undone != test.undone || w.bound[vf] != test.bound {
				t.Errorf("undone %d times, bound %q; want %d and %q", w.undone, w.bound[vf],
					test.undone, test.bound)
			}
		})
	}
}

// A reboot undoes the setup of Functions, and the kubelet starts pods on their old allocations.
func TestRecoverSetsUp(t *testing.T) {
	t.Parallel()
	a, w := fitting(t)
	if err := a.Reserve(t.Context(), withSetup()); err != nil {
		t.Fatal(err)
	}

	bare, releasing := claimedVF(), withSetup()
	bare.Function.Address, releasing.Function.Address = "0000:3b:02.2", "0000:3b:02.3"
	bare.State, releasing.State = journal.Reserved, journal.Releasing
	for _, other := range []journal.Attachment{bare, releasing} {
		if err := w.journal.Put(other); err != nil {
			t.Fatal(err)
		}
	}

	w.own, w.bound = "iavf", map[function.ID]string{}
	var isTold atomic.Bool // the publishers were told after the driver was bound
	changed := func() {
		if w.driverOf(vf) == "vfio-pci" {
			isTold.Store(true)
		}
	}
	again := New(w.journal, &engine{}, netdevs{}, Options{Setup: w, Changed: changed}, logr.Discard())
	if err := again.SetUp(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !isTold.Load() {
		t.Error("publishers were not told of the driver, and device nodes come with it")
	}

	w.wantBound(t, "vfio-pci")
	if len(w.bound) != 1 {
		t.Errorf("bound %v", w.bound)
	}

	w.refuse = errors.New("refused")
	if err := w.attacher().SetUp(t.Context()); !errors.Is(err, w.refuse) ||
		!strings.Contains(err.Error(), vf.String()) {
		t.Errorf("error %v, want one that names the Function: %v", err, w.refuse)
	}
}
