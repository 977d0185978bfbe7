package agent

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources"
)

// failingReleaser cannot bring anything back.
type failingReleaser struct {
	err       error
	recovered int
}

func (r *failingReleaser) Release(context.Context, inventory.ID, func(journal.Attachment) bool) error {
	return r.err
}

func (r *failingReleaser) Detach(context.Context, inventory.ID, string) error { return r.err }

func (r *failingReleaser) Free(context.Context, inventory.ID) error { return r.err }

func (r *failingReleaser) Recover(context.Context) error {
	r.recovered++
	return r.err
}

func openJournal(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { j.Close() })
	return j
}

func put(t *testing.T, j *journal.Journal, a journal.Attachment) {
	t.Helper()
	if err := j.Put(a); err != nil {
		t.Fatal(err)
	}
}

var vf = inventory.ID{Address: "0000:3b:00.2"}

// TestReleaseTellsOfHealth: at once, and again when a Function that is not back counts as unhealthy everywhere.
func TestReleaseTellsOfHealth(t *testing.T) {
	for name, call := range map[string]func(*releases) error{
		"release": func(r *releases) error { return r.Release(t.Context(), vf, journal.ClaimIs("c")) },
		"detach":  func(r *releases) error { return r.Detach(t.Context(), vf, "s") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				told := 0
				r := &releases{
					releaser: &failingReleaser{err: errors.New("busy")}, journal: openJournal(t), changed: func() { told++ }, log: testr.New(t),
				}
				if err := call(r); err == nil || told != 1 {
					t.Errorf("error %v, told %d times; want the releaser's error and once", err, told)
				}
				put(t, r.journal, journal.Attachment{Function: vf, State: journal.Releasing, StoppedAt: time.Now()})
				if err := call(r); err == nil || told != 2 {
					t.Errorf("error %v, told %d times; want the releaser's error and twice", err, told)
				}
				if message := r.pending(vf); message != "" {
					t.Errorf("pending at once: %s", message)
				}
				time.Sleep(releaseGrace)
				synctest.Wait()
				if message := r.pending(vf); message == "" || told != 3 {
					t.Errorf("pending %q, told %d times; want a message and three times", message, told)
				}
			})
		})
	}
}

// TestPending: for DRA only a Function that takes longer than usual to come back is unhealthy, for the device plugin
// every one whose pod is gone.
func TestPending(t *testing.T) {
	r := &releases{journal: openJournal(t), changed: func() {}, log: testr.New(t)}
	if pending, releasing := r.pending(vf), r.releasing(vf); pending+releasing != "" {
		t.Errorf("a free Function is pending: %s, releasing: %s", pending, releasing)
	}
	hooks := &journal.Hooks{Next: "port", Error: "XPU xpu-1 is away"}
	for _, test := range []struct {
		state              journal.State
		hooks              *journal.Hooks
		stopped            time.Duration // since
		pending, releasing bool
		text               string
	}{
		{journal.Reserved, nil, 0, false, false, ""},
		{journal.Attaching, nil, 0, false, false, ""},
		{journal.Detaching, nil, releaseGrace / 2, false, false, ""}, // the pod gets another sandbox
		{journal.Releasing, nil, releaseGrace / 2, false, true, "is not back from pod default/pod1"},
		{journal.Releasing, nil, 2 * releaseGrace, true, true, "is not back from pod default/pod1"},
		{journal.Releasing, hooks, 0, false, true, "hook port, which is tried again: XPU xpu-1 is away"},
		{journal.Releasing, hooks, 2 * releaseGrace, true, true, "hook port, which is tried again: XPU xpu-1 is away"},
		{journal.Detaching, nil, 2 * releaseGrace, true, true, "is not back from pod default/pod1"},
	} {
		a := journal.Attachment{Function: vf, State: test.state, Pod: journal.Pod{Namespace: "default", Name: "pod1"},
			Before: &link.Snapshot{}, StoppedAt: time.Now().Add(-test.stopped), Hooks: test.hooks}
		if test.hooks != nil {
			a.RestoredAt = time.Now()
		}
		put(t, r.journal, a)
		for _, source := range []struct {
			name, message string
			want          bool
		}{{"pending", r.pending(vf), test.pending}, {"releasing", r.releasing(vf), test.releasing}} {
			if (source.message != "") != source.want || source.want && !strings.Contains(source.message, test.text) {
				t.Errorf("%s for %s: %s says %q, want something: %t, with %q",
					test.state, test.stopped, source.name, source.message, source.want, test.text)
			}
		}
	}
}

func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failingReleaser{err: errors.New("busy")}
		told := 0
		r := &releases{releaser: f, journal: openJournal(t), changed: func() { told++ }, log: testr.New(t)}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- r.run(ctx) }()
		time.Sleep(2*sweepInterval + time.Second)
		synctest.Wait()
		if f.recovered != 2 || told != 2 {
			t.Errorf("recovered %d and told %d times in two intervals, want 2", f.recovered, told)
		}
		stop()
		if err := <-done; err != nil {
			t.Errorf("run = %v, want nil when its context ends", err)
		}
	})
}

// pods plays the kubelet.
type pods struct {
	have map[string]podresources.Assignment
	err  error
	asks int
}

func (p *pods) Assigned(context.Context) (map[string]podresources.Assignment, error) {
	p.asks++
	return p.have, p.err
}

// freeing frees what belongs to the caller.
type freeing struct {
	failingReleaser
	journal *journal.Journal
}

func (f *freeing) Release(_ context.Context, id inventory.ID, belongs func(journal.Attachment) bool) error {
	if a, _ := f.journal.Get(id); belongs(a) {
		return f.journal.Delete(id)
	}
	return nil
}

func (f *freeing) Recover(context.Context) error { return nil }

// TestAbandoned: what the device plugin handed out is released once no pod has it any more, and nothing else.
func TestAbandoned(t *testing.T) {
	const resource = "xpu.opiproject.org/fast"
	has := map[string]podresources.Assignment{vf.String(): {Resource: resource, Namespace: "default", Pod: "pod1"}}
	for name, test := range map[string]struct {
		record journal.Attachment
		pods   pods
		after  time.Duration // free after so long; 0 for never
		asked  bool
	}{
		"no pod has it":       {journal.Attachment{Resource: resource, State: journal.Reserved}, pods{}, abandonedGrace + 2*sweepInterval, true},
		"a pod has it":        {journal.Attachment{Resource: resource, State: journal.Reserved}, pods{have: has}, 0, true},
		"kubelet away":        {journal.Attachment{Resource: resource, State: journal.Reserved}, pods{err: errors.New("no such socket")}, 0, true},
		"attached":            {journal.Attachment{Resource: resource, State: journal.Attaching, Before: &link.Snapshot{}}, pods{}, 0, false},
		"already on its way":  {journal.Attachment{Resource: resource, State: journal.Releasing}, pods{}, 0, false},
		"of a claim":          {journal.Attachment{Claim: journal.Claim{UID: "c"}, State: journal.Reserved}, pods{}, 0, false},
		"of a claim, by CNI":  {journal.Attachment{Claim: journal.Claim{UID: "c"}, Resource: resource, State: journal.Reserved}, pods{}, 0, false},
		"another has another": {journal.Attachment{Resource: resource, State: journal.Reserved}, pods{have: map[string]podresources.Assignment{"0000:3b:00.3": {}}}, abandonedGrace + 2*sweepInterval, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := openJournal(t)
				test.record.Function, test.record.ReservedAt = vf, time.Now()
				put(t, j, test.record)
				r := &releases{releaser: &freeing{journal: j}, journal: j, assigned: &test.pods, changed: func() {}, log: testr.New(t)}
				go r.run(t.Context())
				begin := time.Now()
				var took time.Duration
				for time.Since(begin) < time.Hour && took == 0 {
					time.Sleep(sweepInterval)
					synctest.Wait()
					if _, exists := j.Get(vf); !exists {
						took = time.Since(begin)
					}
				}
				if took != test.after {
					t.Errorf("free after %s, want %s", took, test.after)
				}
				if asked := test.pods.asks > 0; asked != test.asked {
					t.Errorf("kubelet asked %d times, want any: %t", test.pods.asks, test.asked)
				}
			})
		})
	}
}

// TestAbandonedTwice: the two looks must be at the same reservation, one after the other.
func TestAbandonedTwice(t *testing.T) {
	j := openJournal(t)
	kubelet := &pods{}
	r := &releases{releaser: &freeing{journal: j}, journal: j, assigned: kubelet, changed: func() {}, log: testr.New(t)}
	reserve := func(ago time.Duration) {
		put(t, j, journal.Attachment{Function: vf, Resource: "xpu.opiproject.org/fast", State: journal.Reserved, ReservedAt: time.Now().Add(-ago)})
	}
	look := func(wantErr bool) {
		t.Helper()
		if err := r.releaseAbandoned(t.Context()); (err != nil) != wantErr {
			t.Fatalf("error %v, want one: %t", err, wantErr)
		}
	}
	reserve(time.Hour)
	look(false)
	reserve(2 * time.Hour) // another reservation
	look(false)
	kubelet.err = errors.New("no such socket")
	look(true)
	kubelet.err = nil
	look(false)
	kubelet.have = map[string]podresources.Assignment{vf.String(): {}}
	look(false)
	kubelet.have = nil
	look(false)
	if _, exists := j.Get(vf); !exists {
		t.Fatal("released although it was never looked twice in a row")
	}
	look(false)
	if _, exists := j.Get(vf); exists {
		t.Error("not released")
	}
}
