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
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

// failingReleaser cannot bring anything back.
type failingReleaser struct {
	err       error
	recovered int
}

func (r *failingReleaser) Release(context.Context, inventory.ID, types.UID) error { return r.err }

func (r *failingReleaser) Recover(context.Context) error {
	r.recovered++
	return r.err
}

func TestReleaseTellsOfHealth(t *testing.T) {
	told := 0
	r := &releases{releaser: &failingReleaser{err: errors.New("busy")}, changed: func() { told++ }, log: testr.New(t)}
	if err := r.Release(t.Context(), inventory.ID{Address: "0000:3b:00.2"}, "c"); err == nil || told != 1 {
		t.Errorf("Release = %v, told %d times; want the releaser's error and once", err, told)
	}
}

// TestPending: only a Function that takes longer than usual to come back is unhealthy.
func TestPending(t *testing.T) {
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	id := inventory.ID{Address: "0000:3b:00.2"}
	r := &releases{journal: j, changed: func() {}, log: testr.New(t)}
	if message := r.pending(id); message != "" {
		t.Errorf("a free Function is pending: %s", message)
	}
	for _, test := range []struct {
		state   journal.State
		stopped time.Duration // since
		pending bool
	}{
		{journal.Reserved, 0, false},
		{journal.Releasing, releaseGrace / 2, false},
		{journal.Releasing, 2 * releaseGrace, true},
		{journal.Detaching, 2 * releaseGrace, true},
	} {
		if err := j.Put(journal.Attachment{Function: id, State: test.state, Pod: journal.Pod{Namespace: "default", Name: "pod1"},
			StoppedAt: time.Now().Add(-test.stopped)}); err != nil {
			t.Fatal(err)
		}
		if message := r.pending(id); (message != "") != test.pending || test.pending && !strings.Contains(message, "pod default/pod1") {
			t.Errorf("%s for %s: pending %q, want %t", test.state, test.stopped, message, test.pending)
		}
	}
}

func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &failingReleaser{err: errors.New("busy")}
		told := 0
		r := &releases{releaser: f, changed: func() { told++ }, log: testr.New(t)}
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
