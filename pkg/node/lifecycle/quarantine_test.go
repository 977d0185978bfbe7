// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var errLeak = fmt.Errorf("macvlan evil0 of the pod hangs on it in another namespace: %w",
	netdev.ErrLeaks)

// ward has an agent whose Functions may fail to come back.
type ward struct {
	*Manager
	t       *testing.T
	journal *journal.Journal
	engine  *engine
	// driver is the Function's driver, and driverErr the error of reading it.
	driver    string
	driverErr error
	// missing says that the Function has no netdev anywhere.
	missing bool
	seen    map[function.ID]function.Function
	// port is the name of the first hook, and queued has the Functions whose hooks were queued.
	port   string
	queued []function.ID
	events []string
	// tornDown counts how often a setup was undone, and tearDownErr is the error of undoing it.
	tornDown    int
	tearDownErr error
}

func (w *ward) First(a journal.Attachment) string {
	if a.Quarantined() || a.Hooks != nil && slices.Contains(a.Hooks.Done, w.port) {
		return ""
	}
	return w.port
}

func (w *ward) Add(id function.ID) { w.queued = append(w.queued, id) }

func newWard(t *testing.T) *ward {
	t.Helper()
	w := &ward{
		t: t, journal: openJournal(t), engine: &engine{parent: string(vf.Address), dead: true},
		driver: "igbvf", seen: map[function.ID]function.Function{vf: {Driver: "igbvf"}},
	}
	w.start()
	return w
}

// start starts another run of the agent.
func (w *ward) start() {
	w.Manager = New(w.journal, w.engine, w, Options{
		BootID: "boot-1", Hooks: w, Setup: wardSetup{w},
		Driver: func(function.ID) (string, error) { return w.driver, w.driverErr },
		Seen: func(id function.ID) (function.Function, bool) {
			f, exists := w.seen[id]
			return f, exists
		},
		Quarantined: func(a journal.Attachment) {
			w.events = append(w.events, "quarantined "+string(a.Quarantine.Reason)+": "+
				a.Quarantine.Message)
		},
		Unquarantined: func(_ journal.Attachment, outcome string) {
			w.events = append(w.events, outcome)
		},
	}, testr.New(w.t))
}

// Netdev implements [NetdevFinder].
func (w *ward) Netdev(id function.ID) (string, error) {
	if w.missing && id == vf {
		return "", inventory.ErrNoNetdev
	}
	return netdevs{vf: "v", pf: "p"}.Netdev(id)
}

// wardSetup is a setup that can only be undone.
type wardSetup struct{ *ward }

func (wardSetup) Plan(context.Context, journal.Attachment) (*journal.Setup, error) {
	return nil, nil
}

func (wardSetup) SetUp(context.Context, journal.Attachment) error { return nil }

func (s wardSetup) TearDown(context.Context, journal.Attachment) error {
	s.tornDown++
	return s.tearDownErr
}

// attached records that the Function is in a pod.
func (w *ward) attached(a journal.Attachment) journal.Attachment {
	w.t.Helper()
	a.State, a.Sandbox, a.BootID, a.Driver, a.ReservedAt = journal.Attached, "c1", "boot-1", "igbvf", time.Now().UTC()
	a.Pod = journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"}
	a.Before, a.Observed = &netdev.Snapshot{Name: "v"}, &netdev.Observed{Name: "net1"}
	w.put(a)
	return a
}

func (w *ward) put(a journal.Attachment) {
	w.t.Helper()
	if err := w.Manager.put(a); err != nil {
		w.t.Fatal(err)
	}
}

// want fails the test unless the Function is in the state, and quarantined or not. It returns the
// record.
func (w *ward) want(state journal.State, quarantined bool) journal.Attachment {
	w.t.Helper()
	a, _ := w.journal.Get(vf)
	if a.State != state || a.Quarantined() != quarantined {
		w.t.Fatalf("state %q, quarantine %+v; want state %q, quarantined: %t", a.State,
			a.Quarantine, state, quarantined)
	}
	return a
}

func (w *ward) restores() int {
	return int(atomic.LoadInt64(&w.engine.restores))
}

// TestLeakLetsThePodGo: a Function with a leftover that could reach the next owner is quarantined
// by the first attempt. The call that ends the pod succeeds.
func TestLeakLetsThePodGo(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		record journal.Attachment
		end    func(ctx context.Context, w *ward) error
		state  journal.State
	}{
		"CNI DEL": {requested("c1"), func(ctx context.Context, w *ward) error {
			return w.EndRequest(ctx, "c1", "net1", nil)
		}, journal.Releasing},
		"Unprepare": {claimedVF(), func(ctx context.Context, w *ward) error {
			return w.Unprepare(ctx, "claim-1")
		}, journal.Releasing},
		"StopPodSandbox": {claimedVF(), func(ctx context.Context, w *ward) error {
			return w.Detach(ctx, vf, "c1")
		}, journal.Detaching},
		"start of the agent": {claimedVF(), func(ctx context.Context, w *ward) error {
			return w.Recover(ctx)
		}, journal.Detaching},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t)
			w.attached(test.record)
			w.engine.restore = errLeak
			for range 3 { // callers repeat themselves
				if err := test.end(t.Context(), w); err != nil {
					t.Fatal(err)
				}
			}

			a := w.want(test.state, true)
			if a.Quarantine.Reason != journal.MayLeak ||
				!strings.Contains(a.Quarantine.Message, "evil0") || w.restores() != 1 {
				t.Errorf("quarantine %+v after %d tries", a.Quarantine, w.restores())
			}
			if diff := cmp.Diff([]string{"quarantined MayLeak: " + errLeak.Error()},
				w.events); diff != "" {
				t.Errorf("events (-want +got):\n%s", diff)
			}

			if w.Quarantined(vf) == "" || w.Releasing(vf)+w.Overdue(vf) != "" {
				t.Errorf("quarantined %q, releasing %q, overdue %q", w.Quarantined(vf),
					w.Releasing(vf), w.Overdue(vf))
			}

			other := claimedVF()
			other.Claim.UID, other.Pod.UID = "claim-2", "pod-2"
			for _, want := range []journal.Attachment{
				other, {Function: vf, Resource: "xpu.opiproject.org/fast"},
			} {
				err := w.Reserve(t.Context(), want)
				if !errors.As(err, new(TakenError)) || !strings.Contains(err.Error(), "evil0") {
					t.Errorf("another owner: error %v, want at once why it is quarantined", err)
				}
			}
		})
	}
}

// TestLeakEndsWithSF: leftovers of a pod on an SF that was made for it end with the SF. The SF is
// quarantined only if it cannot be deleted.
func TestLeakEndsWithSF(t *testing.T) {
	t.Parallel()
	errBusy := errors.New("busy")
	for name, test := range map[string]struct {
		stopped bool // the sandbox, before the claim ends
		err     error
	}{
		"claim ends":        {},
		"sandbox stops":     {stopped: true},
		"cannot be deleted": {err: errBusy},
		"neither":           {stopped: true, err: errBusy},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t)
			a := claimedVF()
			a.Setup = &journal.Setup{SF: true}
			w.attached(a)
			w.engine.restore, w.tearDownErr = errLeak, test.err
			if test.stopped {
				if err := w.Detach(t.Context(), vf, "c1"); err != nil {
					t.Fatal(err)
				}
				if w.want(journal.Detaching, true); w.tornDown > 0 {
					t.Error("the claim lost its SF")
				}
			}

			if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
				t.Fatal(err)
			}
			if w.tornDown != 1 {
				t.Errorf("torn down %d times", w.tornDown)
			}
			if test.err == nil {
				w.want("", false)
				return
			}

			q := w.want(journal.Releasing, true).Quarantine
			if q.Reason != journal.NotTornDown || !strings.Contains(q.Message, "busy") ||
				!strings.Contains(q.Message, "evil0") {
				t.Errorf("quarantine %+v", q)
			}
		})
	}
}

// TestFailingReleaseEnds: a release that fails for another reason is retried for a while. Then the
// Function is quarantined, and the pod ends.
func TestFailingReleaseEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWard(t)
		w.attached(claimedVF())
		w.engine.restore = errors.New("PF does not tell")
		for range 2 {
			if err := w.Unprepare(t.Context(), "claim-1"); !errors.Is(err, w.engine.restore) {
				t.Errorf("error %v, want the engine's", err)
			}
			w.want(journal.Releasing, false)
			time.Sleep(quarantineAfter / 2)
		}

		if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
			t.Fatal(err)
		}
		if a := w.want(journal.Releasing, true); a.Quarantine.Reason != journal.NotRestored {
			t.Errorf("quarantine %+v", a.Quarantine)
		}
		if got := testutil.ToFloat64(only{w.Manager, string(journal.NotRestored)}); got != 1 {
			t.Errorf("metric %v, want 1", got)
		}
	})
}

// TestWaiterHearsOfQuarantine: a caller that waits for a release returns when the Function is
// quarantined.
func TestWaiterHearsOfQuarantine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWard(t)
		w.attached(claimedVF())
		w.engine.restore = errors.New("PF does not tell")
		if err := w.Unprepare(t.Context(), "claim-1"); err == nil {
			t.Fatal("released")
		}

		done := make(chan error)
		go func() { done <- w.Reserve(t.Context(), claimedVF()) }()
		time.Sleep(time.Second)
		synctest.Wait()
		w.engine.restore = errLeak
		if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.As(err, new(TakenError)) ||
			!strings.Contains(err.Error(), "evil0") {
			t.Errorf("error %v, want why it is quarantined", err)
		}
	})
}

// TestTriedAtLeisure: a quarantined Function is retried after growing pauses, and at once when its
// device changes. It is free when a retry succeeds.
func TestTriedAtLeisure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWard(t)
		w.attached(claimedVF())
		w.engine.restore = errLeak
		if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
			t.Fatal(err)
		}

		ctx, stop := context.WithCancel(t.Context())
		changes, done := make(chan struct{}), make(chan error)
		var after []int // minutes
		begin, before := time.Now(), w.restores()
		go func() { done <- w.Run(ctx, changes) }()

		for time.Since(begin) < 5*time.Hour {
			time.Sleep(time.Minute)
			synctest.Wait()
			if now := w.restores(); now != before {
				before, after = now, append(after, int(time.Since(begin)/time.Minute))
			}
		}

		if want := []int{1, 3, 7, 15, 31, 63, 123, 183, 243}; !cmp.Equal(want,
			after[:min(len(after), len(want))]) {
			t.Errorf("tried again after %v minutes, want %v", after, want)
		}

		// the device was registered again
		w.seen[vf] = function.Function{Driver: "igbvf", Netdev: "v"}
		changes <- struct{}{}
		time.Sleep(time.Second)
		synctest.Wait()
		if w.restores() != before+1 {
			t.Errorf("%d tries after the device changed, want one", w.restores()-before)
		}

		changes <- struct{}{}
		time.Sleep(2 * changePause)
		synctest.Wait()
		if w.restores() != before+1 {
			t.Errorf("%d tries although nothing changed any more", w.restores()-before-1)
		}

		w.engine.restore = nil
		delete(w.seen, pf) // any change will do
		w.seen[vf] = function.Function{Driver: "igbvf", Netdev: "w"}
		changes <- struct{}{}
		time.Sleep(time.Second)
		synctest.Wait()
		w.want(Free, false)
		if last := w.events[len(w.events)-1]; last != "is as it was" {
			t.Errorf("events %q", w.events)
		}

		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestNextAgentTriesAtOnce: a new agent does not know when the last attempt was, and makes one when
// it starts.
func TestNextAgentTriesAtOnce(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.attached(claimedVF())
	w.engine.restore = errLeak
	if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
		t.Fatal(err)
	}

	w.start()
	for range 3 {
		if err := w.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	if a := w.want(journal.Releasing, true); w.restores() != 2 || a.Quarantine.Attempts != 1 {
		t.Errorf("%d restores, %d more attempts; want one more", w.restores(),
			a.Quarantine.Attempts)
	}
	if len(w.events) != 1 {
		t.Errorf("events %q, want one", w.events)
	}

	w.start()
	w.options.BootID = "boot-2" // nothing of a pod survives a reboot
	if err := w.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}

	w.want(Free, false)
}

// TestQuarantineOfAClaim: the claim of a quarantined Function keeps its reservation, and a new
// sandbox causes an attempt. Unprepare ends the reservation without an attempt, and the Port is
// deleted.
func TestQuarantineOfAClaim(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.port = "port"
	w.attached(claimedVF())
	w.engine.restore = errLeak
	if err := w.Detach(t.Context(), vf, "c1"); err != nil {
		t.Fatal(err)
	}

	w.want(journal.Detaching, true)
	next := Sandbox{
		ID: "c2", NetNS: t.TempDir(),
		Pod: journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"},
	}

	_, err := w.Attach(t.Context(), vf, next)
	if err == nil || !strings.Contains(err.Error(), "evil0") || w.restores() != 2 {
		t.Errorf("error %v after %d tries; want why it is quarantined, after another try", err,
			w.restores())
	}

	if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
		t.Fatal(err)
	}

	w.want(journal.Releasing, true)
	if w.restores() != 2 || len(w.queued) != 1 {
		t.Errorf("%d tries, and the hooks of %v; want no other try, and the Port to go",
			w.restores(), w.queued)
	}
	if _, err := w.Attach(t.Context(), vf, next); err == nil || w.restores() != 2 {
		t.Errorf("error %v after %d tries, want a refusal without a try", err, w.restores())
	}
}

// TestNewSandboxAfterAll: a pod gets its quarantined Function back if an attempt for its new
// sandbox succeeds.
func TestNewSandboxAfterAll(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.attached(claimedVF())
	w.engine.restore = errLeak
	if err := w.Detach(t.Context(), vf, "c1"); err != nil {
		t.Fatal(err)
	}

	w.engine.restore = nil
	next := Sandbox{
		ID: "c2", NetNS: t.TempDir(),
		Pod: journal.Pod{Namespace: "default", Name: "p", UID: "pod-1"},
	}
	if _, err := w.Attach(t.Context(), vf, next); err != nil {
		t.Fatal(err)
	}

	w.want(journal.Attached, false)
}

// TestAdministratorReleases: the administrator makes the agent retry a Function, or ends its
// quarantine as it is.
func TestAdministratorReleases(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		asItIs, mended bool
		outcome, err   string
		restores       int
	}{
		"tried in vain": {false, false, "", "is still quarantined: " + errLeak.Error() +
			"; if its next owner", 2},
		"mended": {false, true, "is as it was", "", 2},
		"as it is": {
			true, false, "is let go as it is, by an administrator: " + errLeak.Error(), "", 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t)
			w.port = "port"
			w.attached(claimedVF())
			if _, err := w.Release(t.Context(), vf, test.asItIs); err == nil ||
				!strings.Contains(err.Error(), "is not quarantined") {
				t.Errorf("a Function in a pod: error %v", err)
			}

			w.engine.restore = errLeak
			if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
				t.Fatal(err)
			}

			a := w.want(journal.Releasing, true)
			a.Hooks = &journal.Hooks{Done: []string{"port"}} // by the queue
			w.put(a)

			if test.mended {
				w.engine.restore = nil
			}

			outcome, err := w.Release(t.Context(), vf, test.asItIs)
			if outcome != test.outcome || (err == nil) != (test.err == "") || err != nil &&
				!strings.Contains(err.Error(), test.err) {
				t.Errorf("outcome %q, error %v; want %q, %q", outcome, err, test.outcome, test.err)
			}

			if _, exists := w.journal.Get(vf); exists != (test.err != "") ||
				w.restores() != test.restores {
				t.Errorf("there is a record: %t; %d restores, want %d", exists, w.restores(),
					test.restores)
			}
		})
	}
}

// TestDriverIsCompared: a Function with another driver than before is kept from the next pod until
// it has its own driver again. An unknown driver does not count as equal. A device that is gone has
// no driver to compare.
func TestDriverIsCompared(t *testing.T) {
	t.Parallel()
	byAgent := func(a *journal.Attachment) {
		a.Setup = &journal.Setup{Driver: "vfio-pci", Own: "iavf"}
	}
	for name, test := range map[string]struct {
		change func(*journal.Attachment)
		driver string
		err    error
		// message is the message of the quarantine, "" for none.
		message string
		fails   bool
	}{
		"the same": {nil, "igbvf", nil, "", false},
		"a VM runtime left another": {
			nil, "vfio-pci", nil, "driver is vfio-pci, was igbvf", false,
		},
		"none is bound":             {nil, "", nil, "has no driver, was igbvf", false},
		"the device is gone":        {nil, "", fs.ErrNotExist, "", false},
		"the device cannot be read": {nil, "", errors.New("input/output error"), "", true},
		"an older agent wrote nothing": {func(a *journal.Attachment) {
			a.Driver = ""
		}, "vfio-pci", nil, "", false},
		"bound by the agent, undone": {byAgent, "iavf", nil, "", false},
		"bound by the agent, not back": {
			byAgent, "vfio-pci", nil, "driver is vfio-pci, was iavf", false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t)
			a := w.attached(claimedVF())
			if test.change != nil {
				test.change(&a)
				w.put(a)
			}

			w.driver, w.driverErr = test.driver, test.err
			if err := w.Unprepare(t.Context(), "claim-1"); (err != nil) != test.fails {
				t.Errorf("error %v, want one: %t", err, test.fails)
			}

			switch {
			case test.fails:
				w.want(journal.Releasing, false)
				return
			case test.message == "":
				w.want(Free, false)
				return
			}

			a = w.want(journal.Releasing, true)
			if a.Quarantine.Message != test.message || a.Quarantine.Reason != journal.WrongDriver {
				t.Errorf("quarantine %+v, want %s", a.Quarantine, test.message)
			}

			w.driver, _ = a.OwnDriver()
			if _, err := w.Release(t.Context(), vf, false); err != nil {
				t.Error(err)
			}

			w.want(Free, false)
		})
	}
}

// TestKilledWhileRebinding: an agent that ends after it unbound a driver leaves the driver's name
// in the journal, so that the next agent binds it. Another driver that is bound then is not
// mistaken for it.
func TestKilledWhileRebinding(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		// driver is bound when the next agent starts.
		driver string
		reason journal.QuarantineReason
	}{
		"none is bound":        {"", ""},
		"it was not unbound":   {"igbvf", ""},
		"another one is bound": {"vfio-pci", journal.WrongDriver},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t)
			a := w.attached(claimedVF())
			a.Before = &netdev.Snapshot{
				Name: "v", Identity: netdev.Identity{Bus: "pci", Parent: string(vf.Address)},
			}
			w.put(a)
			w.killedWhileRebinding()
			if a := w.want(journal.Releasing, false); a.Rebinding != "igbvf" {
				t.Fatalf("the journal has driver %q", a.Rebinding)
			}

			w.driver = test.driver
			w.missing = true
			w.start()

			w.engine.rebinding = func(r *netdev.Rebinding) error {
				if w.driver == "" {
					w.driver = r.Driver
					return netdev.ErrGone // the driver makes its netdev a moment later
				}
				if w.driver != "igbvf" {
					return netdev.ErrGone
				}

				w.missing = false
				return nil
			}

			must.Succeed(t, w.Recover(t.Context()))
			if test.reason == "" {
				w.want(Free, false)
				return
			}
			if a := w.want(journal.Releasing, true); a.Quarantine.Reason != test.reason ||
				a.Rebinding != "igbvf" {
				t.Errorf("quarantine %+v, driver %q", a.Quarantine, a.Rebinding)
			}
		})
	}
}

// killedWhileRebinding releases the Function, and kills the agent when the driver is unbound.
func (w *ward) killedWhileRebinding() {
	w.t.Helper()
	type killed struct{}

	defer func() {
		if p := recover(); p != (killed{}) {
			w.t.Fatalf("ended by %v", p)
		}
	}()

	w.engine.rebinding = func(r *netdev.Rebinding) error {
		if err := r.Intend("igbvf"); err != nil {
			return err
		}
		panic(killed{})
	}

	err := w.Unprepare(w.t.Context(), "claim-1")
	w.t.Errorf("not killed: %v", err)
}

// TestReboundNetdevIsAwaited: a driver that was bound again makes its netdev a moment later. The
// Function must not be free before, because the properties of the netdev could not be restored
// then.
func TestReboundNetdevIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWard(t)
		a := w.attached(claimedVF())
		a.Before = &netdev.Snapshot{
			Name: "v", Identity: netdev.Identity{Bus: "pci", Parent: string(vf.Address)},
		}
		w.put(a)
		w.missing = true
		w.engine.rebinding = func(r *netdev.Rebinding) error {
			if r.Driver == "" {
				must.Succeed(t, r.Intend("igbvf"))
			}
			return netdev.ErrGone
		}

		if err := w.Unprepare(t.Context(), "claim-1"); !errors.Is(err, netdev.ErrGone) {
			t.Errorf("error %v, want that the netdev is not there yet", err)
		}

		w.want(journal.Releasing, false)

		w.engine.rebinding = func(*netdev.Rebinding) error { return nil }
		must.Succeed(t, w.Unprepare(t.Context(), "claim-1"))
		w.want(Free, false)
	})
}

// TestRebindingFails: a driver that was unbound and cannot be bound is retried until it is bound,
// by the next agent too.
func TestRebindingFails(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.attached(claimedVF())

	w.engine.rebinding = func(r *netdev.Rebinding) error {
		must.Succeed(t, r.Intend("igbvf"))
		w.driver = ""
		return fmt.Errorf("bind igbvf: no such device: %w", netdev.ErrLeaks)
	}

	must.Succeed(t, w.Unprepare(t.Context(), "claim-1"))
	w.want(journal.Releasing, true)

	w.start()
	w.engine.rebinding = func(r *netdev.Rebinding) error {
		w.driver = r.Driver
		return nil
	}

	_, err := w.Release(t.Context(), vf, false)
	must.Succeed(t, err)
	w.want(Free, false)
}

// TestRebindingEndsWithTheSandbox: the driver that was bound again for one owner has no effect on
// the release of the next owner.
func TestRebindingEndsWithTheSandbox(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.attached(claimedVF())
	w.engine.rebinding = func(r *netdev.Rebinding) error { return r.Intend("igbvf") }
	must.Succeed(t, w.Detach(t.Context(), vf, "c1"))
	if a := w.want(journal.Reserved, false); a.Rebinding != "" {
		t.Errorf("driver %q is still to be bound", a.Rebinding)
	}
}

// TestDriverIsRecorded: the record keeps the driver of the first reservation when the owner
// reserves again.
func TestDriverIsRecorded(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	for _, driver := range []string{"igbvf", "vfio-pci"} {
		w.driver = driver
		if err := w.Reserve(t.Context(), claimedVF()); err != nil {
			t.Fatal(err)
		}
		if a := w.want(journal.Reserved, false); a.Driver != "igbvf" || !a.Made.Known() {
			t.Errorf("driver %q, made %v", a.Driver, a.Made)
		}
	}
}

// TestLongMessages: the journal does not grow with the names that a pod gives to devices on its
// netdev.
func TestLongMessages(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	w.attached(claimedVF())
	w.engine.restore = fmt.Errorf("%s: %w", strings.Repeat("ü", 1<<20), netdev.ErrLeaks)
	if err := w.Unprepare(t.Context(), "claim-1"); err != nil {
		t.Fatal(err)
	}
	if a := w.want(journal.Releasing, true); len(a.Quarantine.Message) > maxMessage+3 {
		t.Errorf("message of %d bytes", len(a.Quarantine.Message))
	}
}

// TestClockJumps: reservations are swept, and late releases are reported, after the same time,
// whatever the machine's clock is set to.
func TestClockJumps(t *testing.T) {
	for name, jump := range map[string]time.Duration{
		"back": -time.Hour, "forward": time.Hour, "not at all": 0,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWard(t)
				w.options.Kubelet = &kubelet{}
				// it was right when the record was made
				w.options.Now = func() time.Time { return time.Now().Add(jump) }
				reserved := requested("c1")
				reserved.State, reserved.ReservedAt = journal.Reserved, time.Now().Add(-2*jump)
				w.put(reserved)
				w.sweep(t.Context())
				time.Sleep(w.options.AbandonedAfter - time.Second)
				w.sweep(t.Context())
				w.sweep(t.Context())
				w.want(journal.Reserved, false)
				time.Sleep(time.Second)
				w.sweep(t.Context())
				w.sweep(t.Context())
				w.want(Free, false)

				w.attached(claimedVF())
				w.engine.restore = errors.New("busy")
				if err := w.Detach(t.Context(), vf, "c1"); err == nil {
					t.Error("detached")
				}

				w.wantLate(w.Overdue)
				lost := claimedVF()
				lost.State, lost.LostAt = journal.Lost, w.options.Now()
				lost.Before, lost.Observed = &netdev.Snapshot{}, &netdev.Observed{}
				w.put(lost)
				w.wantLate(w.Lost)
			})
		})
	}
}

// wantLate fails the test unless the Function is late after releaseGrace, and not before.
func (w *ward) wantLate(late func(function.ID) string) {
	w.t.Helper()
	for _, now := range []bool{false, true} {
		if got := late(vf); (got != "") != now {
			w.t.Errorf("late %q, want late: %t", got, now)
		}
		time.Sleep(releaseGrace)
	}
}

// only collects the metric of one reason.
type only struct {
	*Manager
	reason string
}

func (o only) Collect(to chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric, len(journal.QuarantineReasons))
	o.Manager.Collect(all)
	close(all)

	for m := range all {
		var written dto.Metric
		if m.Write(&written) == nil && written.GetLabel()[0].GetValue() == o.reason {
			to <- m
		}
	}
}
