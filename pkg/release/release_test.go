package release_test

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
	"github.com/opiproject/xpu-device-plugin/pkg/release"
)

// returning plays the kernel that ends a namespace in the background: the netdev is nowhere for some looks.
type returning struct {
	gone  int // looks that do not find it
	looks int
	fail  error
}

func (r *returning) Restore(context.Context, link.Device, link.Snapshot, link.Place) (link.Restored, error) {
	r.looks++
	if r.looks <= r.gone {
		return link.Restored{}, link.ErrGone
	}
	return link.Restored{Name: "ens3f0v1"}, r.fail
}

func (r *returning) Alive(link.Place) (bool, error) { return false, nil }

func TestNowhere(t *testing.T) {
	const never = 1 << 30
	hardware, virtual := link.Identity{Parent: "0000:3b:02.1", Bus: "pci"}, link.Identity{Kind: "veth", Peer: 3}
	there := finderFunc(func(inventory.ID) (string, error) { return "", nil })
	refusal := errors.New("refused")
	tests := map[string]struct {
		identity link.Identity
		gone     int
		fail     error
		netdevs  finderFunc
		stopped  time.Duration // since
		err      error
	}{
		"returns late":                  {hardware, 2, nil, there, 0, nil},
		"hardware is expected back":     {hardware, never, nil, there, 0, link.ErrGone},
		"hardware lost its driver":      {hardware, never, nil, there, time.Hour, nil},
		"the clock was set back":        {hardware, never, nil, there, -time.Hour, nil},
		"a veth ends with its pod":      {virtual, never, nil, there, 0, nil},
		"the Function is gone":          {hardware, never, nil, func(inventory.ID) (string, error) { return "", errors.New("is gone") }, 0, nil},
		"a property cannot be put back": {hardware, 0, refusal, there, time.Hour, refusal},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
			must(t, err)
			defer j.Close()
			a := journal.Attachment{
				Function: function(0), State: journal.Detaching, BootID: "boot-1", Sandbox: "s1",
				Before: &link.Snapshot{Name: "ens3f0v1", Identity: test.identity}, StoppedAt: time.Now().Add(-test.stopped),
			}
			must(t, j.Put(a))
			engine := &returning{gone: test.gone, fail: test.fail}
			r := release.New(j, engine, test.netdevs, release.Options{
				BootID: "boot-1", Patience: wait.Backoff{Duration: time.Millisecond, Steps: 4},
			}, logr.Discard())
			if err := r.Release(t.Context(), a.Function, everybodys); !errors.Is(err, test.err) {
				t.Errorf("error %v, want %v", err, test.err)
			}
			record, ok := j.Get(a.Function)
			if free := test.err == nil; ok == free {
				t.Errorf("free %v, want %v", !ok, free)
			}
			if ok && record.State != journal.Releasing {
				t.Errorf("state %s", record.State)
			}
		})
	}
}

// everybodys is the predicate of a caller to whom everything belongs.
func everybodys(journal.Attachment) bool { return true }

// A caller that gives up while a netdev is nowhere has not made it gone.
func TestNowhereCancelled(t *testing.T) {
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must(t, err)
	defer j.Close()
	must(t, j.Put(journal.Attachment{
		Function: function(0), State: journal.Detaching, BootID: "boot-1", Before: &link.Snapshot{Identity: link.Identity{Kind: "veth"}},
	}))
	ctx, cancel := context.WithCancel(t.Context())
	netdevs := finderFunc(func(inventory.ID) (string, error) { cancel(); return "", nil })
	r := release.New(j, &returning{gone: 1 << 30}, netdevs, release.Options{BootID: "boot-1"}, logr.Discard())
	if err := r.Release(ctx, function(0), everybodys); err == nil {
		t.Error("released")
	}
	if record, ok := j.Get(function(0)); !ok || record.State != journal.Releasing {
		t.Errorf("record %v, state %s", ok, record.State)
	}
}

func openJournal(t *testing.T) *journal.Journal {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "j"))
	must(t, err)
	t.Cleanup(func() { j.Close() })
	return j
}

// releasing is the record of a Function whose release waits for a hook.
func releasing(hooks *journal.Hooks) journal.Attachment {
	a := claimed(0)
	a.State, a.StoppedAt, a.RestoredAt, a.Hooks = journal.Releasing, time.Unix(1e9, 0).UTC(), time.Unix(1e9+1, 0).UTC(), hooks
	return a
}

func TestFreeAtOnce(t *testing.T) {
	j := openJournal(t)
	r := release.New(j, nil, nil, release.Options{}, logr.Discard())
	must(t, r.Free(t.Context(), function(0)))
	reserved := claimed(0)
	reserved.State = journal.Reserved
	must(t, j.Put(reserved))
	must(t, r.Free(t.Context(), function(0)))
}

func TestFreeWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := openJournal(t)
		queue := &hooks{name: "port"}
		r := release.New(j, nil, nil, release.Options{Hooks: queue}, logr.Discard())
		must(t, j.Put(releasing(&journal.Hooks{Next: "port"})))
		done := make(chan error, 1)
		go func() { done <- r.Free(t.Context(), function(0)) }()
		synctest.Wait()
		if len(queue.added) == 0 {
			t.Error("who waits for hooks does not see to it that they run")
		}
		must(t, j.Put(releasing(&journal.Hooks{Next: "10-tell", Done: []string{"port"}})))
		synctest.Wait()
		select {
		case err := <-done:
			t.Fatalf("Free = %v before the hooks are done", err)
		default:
		}
		must(t, j.Delete(function(0)))
		must(t, <-done)
	})
}

func TestFreeGivesUp(t *testing.T) {
	tests := map[string]struct {
		record journal.Attachment
		want   []string
	}{
		"a hook runs": {releasing(&journal.Hooks{Next: "port"}), []string{"pod default/pod", "waits for its post-delete hooks"}},
		"a hook fails": {releasing(&journal.Hooks{Next: "port", Attempts: 3, Error: "xPU xpu-1 cannot be reached"}),
			[]string{"pod default/pod", "hook port", "xPU xpu-1 cannot be reached"}},
		"the netdev is not back": {journal.Attachment{
			Function: function(0), State: journal.Releasing, BootID: "boot-1", StoppedAt: time.Now(),
			Before: &link.Snapshot{Name: "ens3f0v1", Identity: link.Identity{Parent: "0000:3b:02.1", Bus: "pci"}},
		}, []string{"is not back from its last pod", "refused"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				j := openJournal(t)
				must(t, j.Put(test.record))
				netdevs := finderFunc(func(inventory.ID) (string, error) { return "", nil })
				r := release.New(j, &returning{fail: errors.New("refused")}, netdevs, release.Options{
					BootID: "boot-1", Hooks: &hooks{}, Patience: wait.Backoff{Duration: time.Millisecond, Steps: 2},
				}, logr.Discard())
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				begin := time.Now()
				err := r.Free(ctx, function(0))
				if !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) != time.Minute {
					t.Errorf("error %v after %s, want the end of a minute", err, time.Since(begin))
				}
				for _, text := range append(test.want, "Function "+function(0).String()) {
					if !strings.Contains(err.Error(), text) {
						t.Errorf("error %q, want %q in it", err, text)
					}
				}
			})
		})
	}
}

// A way back that failed is continued for who waits.
func TestFreeContinues(t *testing.T) {
	j := openJournal(t)
	must(t, j.Put(journal.Attachment{
		Function: function(0), State: journal.Releasing, BootID: "boot-1", StoppedAt: time.Now(), Before: &link.Snapshot{Name: "ens3f0v1"},
	}))
	netdevs := finderFunc(func(inventory.ID) (string, error) { return "", nil })
	r := release.New(j, &returning{}, netdevs, release.Options{BootID: "boot-1"}, logr.Discard())
	must(t, r.Free(t.Context(), function(0)))
	if _, exists := j.Get(function(0)); exists {
		t.Error("not free")
	}
}

// TestDetachOfARequestThatFailed: a CNI request for a claim's Function that never got as far as the pod is over too. The
// Function is again what the claim wants.
func TestDetachOfARequestThatFailed(t *testing.T) {
	claimed := claimed(0)
	for name, test := range map[string]struct {
		request *journal.CNI
		over    bool
	}{
		"of this sandbox": {&journal.CNI{ContainerID: "s1", IfName: "net1", Claimed: &claimed.Interface}, true},
		"of another":      {&journal.CNI{ContainerID: "s2", IfName: "net1", Claimed: &claimed.Interface}, false},
		"without a claim": {&journal.CNI{ContainerID: "s1", IfName: "net1"}, false},
		"of nobody":       {nil, true},
	} {
		t.Run(name, func(t *testing.T) {
			j := openJournal(t)
			a := claimed
			a.State, a.CNI, a.Interface.Name = journal.Reserved, test.request, "net1"
			must(t, j.Put(a))
			r := release.New(j, &returning{}, nil, release.Options{BootID: "boot-1"}, logr.Discard())
			must(t, r.Detach(t.Context(), a.Function, "s1"))
			if got, _ := j.Get(a.Function); got.State != journal.Reserved || (got.CNI == nil) != test.over {
				t.Errorf("record %+v", got)
			}
		})
	}
}
