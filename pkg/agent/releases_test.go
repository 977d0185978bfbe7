package agent

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

// functions are released, or fail to be, and it is kept which ones were asked for.
type functions struct {
	mutex  sync.Mutex
	failed map[inventory.ID]error
	asked  []string
	all    []journal.Attachment
}

func (f *functions) Release(_ context.Context, id inventory.ID, claim types.UID) error {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	f.asked = append(f.asked, id.String()+" "+string(claim))
	return f.failed[id]
}

func (f *functions) All() []journal.Attachment { return f.all }

func (f *functions) takeAsked() []string {
	f.mutex.Lock()
	defer f.mutex.Unlock()
	asked := f.asked
	f.asked = nil
	return asked
}

var (
	busy = inventory.ID{Address: "0000:3b:00.2"}
	free = inventory.ID{Address: "0000:3b:00.3"}
)

func TestFailedReleaseIsRemembered(t *testing.T) {
	why := errors.New("netdev is in another namespace")
	f := &functions{failed: map[inventory.ID]error{busy: why}}
	told := 0
	p := &pendingReleases{releaser: f, changed: func() { told++ }}
	if err := p.Release(t.Context(), free, "c"); err != nil || told != 0 || p.message(free) != "" {
		t.Errorf("Release = %v, told %d times, message %q; want none of it", err, told, p.message(free))
	}
	if err := p.Release(t.Context(), busy, "c"); !errors.Is(err, why) || told != 1 {
		t.Errorf("Release = %v, told %d times; want %v, once", err, told, why)
	}
	if message := p.message(busy); !strings.Contains(message, "could not be taken back") || !strings.Contains(message, why.Error()) {
		t.Errorf("message %q, want %v in it", message, why)
	}
	f.failed = nil
	if err := p.Release(t.Context(), busy, "c"); err != nil || told != 2 || p.message(busy) != "" {
		t.Errorf("Release = %v, told %d times, message %q; want no error, twice, none", err, told, p.message(busy))
	}
}

func TestSweep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &functions{failed: map[inventory.ID]error{busy: errors.New("busy")}, all: []journal.Attachment{
			{Function: busy, State: journal.Releasing, Claim: journal.Claim{UID: "c1"}},
			{Function: free, State: journal.Releasing, Claim: journal.Claim{UID: "c2"}},
			{Function: inventory.ID{Address: "0000:3b:00.4"}, State: journal.Attached},
			{Function: inventory.ID{Address: "0000:3b:00.5"}, State: journal.Detaching},
		}}
		p := &pendingReleases{releaser: f, changed: func() {}}
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.run(ctx, f, testr.New(t)) }()
		want := []string{busy.String() + " c1", free.String() + " c2"}
		for _, when := range []string{"at once", "a sweep later"} {
			synctest.Wait()
			if diff := cmp.Diff(want, f.takeAsked()); diff != "" {
				t.Errorf("%s: released -want +got\n%s", when, diff)
			}
			if p.message(busy) == "" || p.message(free) != "" {
				t.Errorf("%s: messages %q and %q, want one for what is not back", when, p.message(busy), p.message(free))
			}
			time.Sleep(sweepInterval)
		}
		stop()
		if err := <-done; err != nil {
			t.Errorf("run = %v, want nil when its context ends", err)
		}
	})
}
