// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func vf(i int) function.ID { return function.SubfunctionID("0000:3b:00.0", uint32(i)) }

// released returns the record of a Function that is back and has a Port.
func released(i int) journal.Attachment {
	at := time.Unix(1e9, 0).UTC()
	return journal.Attachment{
		Function: vf(i), PF: "0000:3b:00.0", PFName: "ens3f0", VFIndex: i,
		Resource: "xpu.opiproject.org/fast",
		Pod:      journal.Pod{Namespace: "default", Name: "pod1", UID: "pod1-uid"},
		Port:     &journal.Port{Network: "blue", MAC: "02:00:00:00:00:01"},
		CNI:      &journal.CNI{ContainerID: "c1", IfName: "net1"},
		State:    journal.Releasing, ReservedAt: at, Sandbox: "c1", AttachedAt: at.Add(time.Second),
		StoppedAt:  at.Add(time.Minute),
		RestoredAt: at.Add(time.Minute + time.Millisecond), Hooks: &journal.Hooks{Next: portHook},
	}
}

// node is the subject of hooks. It plays the xPU and the directory of executables.
type node struct {
	t       *testing.T
	journal *journal.Journal

	mutex   sync.Mutex
	names   []string
	listErr error
	// fails returns the error of a run, by the name of the hook.
	fails map[string]func() error
	// hangs is the name of the hook that runs until it is stopped.
	hangs string
	ran   []string // "function hook"

	// event, if set, is called at every point where the agent could end. dead says that the agent
	// has ended.
	event func(what string) (dead bool)
}

func newNode(t *testing.T, names ...string) *node {
	t.Helper()
	j, err := journal.Open(filepath.Join(t.TempDir(), "journal.db"))
	must.Succeed(t, err)
	t.Cleanup(func() { j.Close() })
	return &node{t: t, journal: j, names: names, fails: map[string]func() error{}}
}

func (n *node) Deprovision(ctx context.Context, a journal.Attachment) error {
	if a.PF != "0000:3b:00.0" || a.PFName != "ens3f0" || vf(a.VFIndex) != a.Function {
		n.t.Errorf("attachment %+v, want what the journal knows", a)
	}
	return n.hook(ctx, a.Function, portHook)
}

func (n *node) list() ([]string, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.names, n.listErr
}

func (n *node) run(ctx context.Context, name string, a journal.Attachment) error {
	return n.hook(ctx, a.Function, name)
}

func (n *node) hook(ctx context.Context, id function.ID, name string) error {
	if n.happens("before " + name) {
		return errDead
	}
	defer n.happens("after " + name)

	n.mutex.Lock()
	n.ran = append(n.ran, id.String()+" "+name)
	fails := n.fails[name]
	n.mutex.Unlock()
	if fails != nil {
		return fails()
	}

	if name == n.hangs {
		<-ctx.Done()
	}

	return ctx.Err()
}

func (n *node) happens(what string) (dead bool) { return n.event != nil && n.event(what) }

// runs returns the hooks that ran for a Function.
func (n *node) runs(i int) []string {
	n.mutex.Lock()
	defer n.mutex.Unlock()

	var list []string
	for _, run := range n.ran {
		if name, is := strings.CutPrefix(run, vf(i).String()+" "); is {
			list = append(list, name)
		}
	}

	return list
}

func (n *node) wantRuns(i int, want ...string) {
	n.t.Helper()
	if diff := cmp.Diff(want, n.runs(i)); diff != "" {
		n.t.Errorf("runs for Function %s (-want +got):\n%s", vf(i), diff)
	}
}

func (n *node) wantFree(i int, want bool) {
	n.t.Helper()
	if a, exists := n.journal.Get(vf(i)); exists == want {
		n.t.Errorf("Function %s is free: %t, want %t: %+v", vf(i), !exists, want, a.Hooks)
	}
}

var errDead = errors.New("the agent was killed")

// mortal is a journal that ignores writes after the agent's end.
type mortal struct {
	*journal.Journal
	n *node
}

func (m mortal) around(what string, write func() error) error {
	if m.n.happens("before " + what) {
		return errDead
	}
	if err := write(); err != nil {
		return err
	}
	if m.n.happens("after " + what) {
		return errDead
	}

	return nil
}

func (m mortal) Put(a journal.Attachment) error {
	return m.around("put", func() error { return m.Journal.Put(a) })
}

func (m mortal) Delete(id function.ID) error {
	return m.around("delete", func() error { return m.Journal.Delete(id) })
}

func (m mortal) GiveUp(letter journal.DeadLetter, next journal.Attachment) error {
	return m.around("give up", func() error { return m.Journal.GiveUp(letter, next) })
}

// agent is one run of the agent.
type agent struct {
	*Queue
	recorder *events.FakeRecorder
	changed  int
	registry *prometheus.Registry
	stop     func()
}

// start starts a queue. stop waits for its end.
func (n *node) start(attempts int) *agent {
	n.t.Helper()
	a := &agent{recorder: events.NewFakeRecorder(100), registry: prometheus.NewRegistry()}
	options := Options{
		Journal: mortal{n.journal, n}, Deprovision: n.Deprovision, Log: logr.Discard(),
		Node: "node1", Attempts: attempts, Timeout: 30 * time.Second, Recorder: a.recorder,
		Changed: func() { n.mutex.Lock(); defer n.mutex.Unlock(); a.changed++ },
	}

	a.Queue = newQueue(options, n, a.registry)
	ctx, cancel := context.WithCancel(n.t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()

	a.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Errorf("Run = %v, want nil when its context ends", err)
		}
	})

	n.t.Cleanup(a.stop)
	return a
}

// bubble runs a test with a clock of its own.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func TestFirst(t *testing.T) {
	t.Parallel()
	noPort := released(0)
	noPort.Port, noPort.Hooks = nil, nil
	for name, test := range map[string]struct {
		a       journal.Attachment
		names   []string
		listErr error
		want    string
	}{
		"Port":                      {released(0), []string{"10-a"}, nil, "port"},
		"executable":                {noPort, []string{"10-a", "20-b"}, nil, "10-a"},
		"neither":                   {noPort, nil, nil, ""},
		"directory cannot be read":  {noPort, nil, errors.New("I/O error"), directoryHook},
		"Port of a later directory": {released(0), nil, errors.New("I/O error"), "port"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				n := newNode(t, test.names...)
				n.listErr = test.listErr
				if got := n.start(10).First(test.a); got != test.want {
					t.Errorf("first hook %q, want %q", got, test.want)
				}
			})
		})
	}
}

func TestRunsAllInOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a", "20-b")
		must.Succeed(t, n.journal.Put(released(0))) // left by an earlier run of the agent
		a := n.start(10)
		synctest.Wait()
		n.wantRuns(0, "port", "10-a", "20-b")
		n.wantFree(0, true)
		if a.changed == 0 {
			t.Error("nobody was told that the Function is free")
		}

		must.Succeed(t, n.journal.Put(released(1)))
		if got := len(a.waiting(journal.Attachment.Restored)); got != 1 {
			t.Errorf("queue length %v, want 1", got)
		}

		a.Add(vf(1))
		a.Add(vf(1))
		synctest.Wait()
		n.wantRuns(1, "port", "10-a", "20-b")
		n.wantFree(1, true)

		must.Succeed(t, testutil.GatherAndCompare(a.registry, strings.NewReader(`
# HELP xpu_hook_queue_length Functions that are back from their pods and not free yet: their post-delete hooks run or wait to be run again.
# TYPE xpu_hook_queue_length gauge
xpu_hook_queue_length 0
# HELP xpu_hook_runs_total Runs of post-delete hooks, by hook and result: done, retry (will be run again) or failed (given up).
# TYPE xpu_hook_runs_total counter
xpu_hook_runs_total{hook="10-a",result="done"} 2
xpu_hook_runs_total{hook="20-b",result="done"} 2
xpu_hook_runs_total{hook="port",result="done"} 2
`), "xpu_hook_queue_length", "xpu_hook_runs_total"))
	})
}

// The queue works only on Functions that are back, and nothing else changes their records.
func TestNotRestored(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a")
		away := released(0)
		away.RestoredAt, away.Hooks = time.Time{}, nil
		must.Succeed(t, n.journal.Put(away))
		reserved := released(1).BackToReserved()
		must.Succeed(t, n.journal.Put(reserved))
		a := n.start(10)
		for i := range 3 {
			a.Add(vf(i))
		}

		synctest.Wait()
		if len(n.ran) > 0 {
			t.Errorf("ran %q", n.ran)
		}

		n.wantFree(0, false)
		n.wantFree(1, false)
	})
}

// TestPortIsNeverGivenUp: the Function is not free before the xPU says that the Port is gone,
// however long this takes.
func TestPortIsNeverGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a")
		n.fails[portHook] = func() error { return errors.New("xPU xpu-1 is away") }
		must.Succeed(t, n.journal.Put(released(0)))
		a := n.start(3)
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		n.wantFree(0, false)
		record, _ := n.journal.Get(vf(0))
		if h := record.Hooks; h.Next != portHook || h.Error != "xPU xpu-1 is away" ||
			h.Attempts < 24*60 || h.Attempts > 24*60*2+10 {
			t.Errorf("hooks %+v, want some thousand attempts at the Port", h)
		}

		if letters := n.journal.DeadLetters(); len(letters) > 0 ||
			slices.Contains(n.runs(0), "10-a") {
			t.Errorf("dead letters %+v, runs of 10-a: %t", letters,
				slices.Contains(n.runs(0), "10-a"))
		}

		n.mutex.Lock()
		n.fails = nil
		n.mutex.Unlock()
		time.Sleep(time.Minute)
		synctest.Wait()
		n.wantFree(0, true)
		if len(a.recorder.Events) > 0 {
			t.Errorf("event %q", <-a.recorder.Events)
		}
	})
}

// TestGivenUp: an executable that fails is retried up to the limit, or never if the error is final.
// Then the other hooks run.
func TestGivenUp(t *testing.T) {
	for name, test := range map[string]struct {
		failure  error
		attempts int
	}{
		"tried again": {errors.New("exit status 75: busy"), 4},
		"final":       {final{errors.New("exit status 1: busy")}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				n := newNode(t, "10-a", "20-b")
				n.fails["10-a"] = func() error { return test.failure }
				must.Succeed(t, n.journal.Put(released(0)))
				a := n.start(4)
				time.Sleep(time.Hour)
				synctest.Wait()
				n.wantFree(0, true)
				want := append([]string{"port"}, slices.Repeat([]string{"10-a"}, test.attempts)...)
				n.wantRuns(0, append(want, "20-b")...)
				letters := n.journal.DeadLetters()
				if len(letters) != 1 {
					t.Fatalf("dead letters %+v, want one", letters)
				}

				letter := letters[0]
				if letter.Hook != "10-a" || letter.Attempts != test.attempts ||
					letter.Error != test.failure.Error() ||
					letter.Attachment.Pod.Name != "pod1" || letter.Attachment.Sandbox != "c1" ||
					letter.At.IsZero() {
					t.Errorf("dead letter %+v", letter)
				}

				event := <-a.recorder.Events
				for _, text := range []string{
					"Warning PostDeleteHookFailed", "10-a", "0000:3b:00.0/sf0", "node1",
					fmt.Sprintf("%d attempts", test.attempts), "busy",
				} {
					if !strings.Contains(event, text) {
						t.Errorf("event %q, want %q in it", event, text)
					}
				}

				if got := testutil.ToFloat64(a.deadLetters.WithLabelValues("10-a")); got != 1 {
					t.Errorf("%v dead letters counted, want 1", got)
				}

				for result, want := range map[string]float64{
					"retry": float64(test.attempts - 1), "failed": 1, "done": 0,
				} {
					if got := testutil.ToFloat64(a.runs.WithLabelValues("10-a",
						result)); got != want {
						t.Errorf("%v runs counted with result %s, want %v", got, result, want)
					}
				}
			})
		})
	}
}

// regarded is a recorder that collects the objects of events.
type regarded struct{ objects []string }

func (r *regarded) Eventf(regarding, _ runtime.Object, _, _, _, _ string, _ ...any) {
	o := regarding.(*corev1.ObjectReference)
	r.objects = append(r.objects,
		strings.Join([]string{o.Kind, o.Namespace, o.Name, string(o.UID)}, " "))
}

// TestEventRegards: the event is on the pod, where users look for it, or on the node if the pod is
// unknown.
func TestEventRegards(t *testing.T) {
	t.Parallel()
	var r regarded
	q := &Queue{Options: Options{Node: "node1", Recorder: &r}}
	unknown := released(1)
	unknown.Pod = journal.Pod{}
	for _, a := range []journal.Attachment{released(0), unknown} {
		q.event(journal.DeadLetter{Attachment: a, Hook: "10-a"})
	}

	if want := []string{
		"Pod default pod1 pod1-uid", "Node  node1 node1",
	}; !slices.Equal(r.objects, want) {
		t.Errorf("events regard %q, want %q", r.objects, want)
	}
}

// TestRestartDuringBackOff: the next agent continues the count of attempts and the pauses.
func TestRestartDuringBackOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a")
		n.fails["10-a"] = func() error { return errors.New("busy") }
		must.Succeed(t, n.journal.Put(released(0)))
		first := n.start(5)
		time.Sleep(8 * time.Second) // attempts at about 0, 1.1, 3.3 and 7.7 s
		synctest.Wait()
		before := len(n.runs(0))
		record, _ := n.journal.Get(vf(0))
		if record.Hooks.Attempts < 3 || record.Hooks.Attempts != before-1 {
			t.Fatalf("hooks %+v after %d runs", record.Hooks, before)
		}

		first.stop()
		n.start(5)
		synctest.Wait()
		if got := len(n.runs(0)); got != before {
			t.Errorf("%d runs right after the restart, want none before %s", got-before,
				record.Hooks.RetryAt)
		}

		time.Sleep(time.Hour)
		synctest.Wait()
		n.wantRuns(0, append([]string{"port"}, slices.Repeat([]string{"10-a"}, 5)...)...)
		n.wantFree(0, true)
		if letters := n.journal.DeadLetters(); len(letters) != 1 || letters[0].Attempts != 5 {
			t.Errorf("dead letters %+v, want one after 5 attempts", letters)
		}
	})
}

// TestClockSetBack: a next run that is far in the future does not delay the Function for so long.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	bubble(t, func(t *testing.T) {
		n := newNode(t)
		a := released(0)
		a.Hooks = &journal.Hooks{
			Next: portHook, Attempts: 1, Error: "away", RetryAt: time.Now().AddDate(1, 0, 0),
		}
		must.Succeed(t, n.journal.Put(a))
		n.start(5)
		begin := time.Now()
		for exists := true; exists &&
			time.Since(begin) < 24*time.Hour; _, exists = n.journal.Get(vf(0)) {
			time.Sleep(time.Second)
		}

		if took := time.Since(begin); took > 2*time.Minute {
			t.Errorf("took %s", took)
		}
	})
}

// TestDirectoryChanges: the content of the directory counts when the hook's turn comes.
func TestDirectoryChanges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a", "30-c")
		n.fails["10-a"] = func() error {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			n.names = []string{"20-b", "30-c"}
			return errors.New("busy")
		}

		must.Succeed(t, n.journal.Put(released(0)))
		n.start(10)
		synctest.Wait()
		n.wantRuns(0, "port", "10-a", "20-b", "30-c")
		n.wantFree(0, true)
	})
}

func TestDirectoryCannotBeRead(t *testing.T) {
	for name, test := range map[string]struct {
		heals bool
		runs  []string
	}{
		"for ever": {false, []string{"port"}},
		"a while":  {true, []string{"port", "10-a"}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				n := newNode(t, "10-a")
				n.listErr = errors.New("may be writable for root only")
				must.Succeed(t, n.journal.Put(released(0)))
				n.start(5)
				time.Sleep(5 * time.Second)
				synctest.Wait()
				n.wantFree(0, false)

				if test.heals {
					n.mutex.Lock()
					n.listErr = nil
					n.mutex.Unlock()
				}

				time.Sleep(time.Hour)
				synctest.Wait()
				n.wantFree(0, true)
				n.wantRuns(0, test.runs...)
				if letters := n.journal.DeadLetters(); len(letters) == 0 != test.heals {
					t.Errorf("dead letters %+v", letters)
				}
			})
		})
	}
}

// TestParallel: Functions do not wait for each other, and the hooks of one Function never run in
// parallel.
func TestParallel(t *testing.T) {
	t.Parallel()
	const functions = 64
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a", "20-b")
		slow := func() error { time.Sleep(10 * time.Second); return nil }
		n.fails = map[string]func() error{"port": slow, "10-a": slow, "20-b": slow}
		begin := time.Now()
		a := n.start(10)
		for i := range functions {
			must.Succeed(t, n.journal.Put(released(i)))
			a.Add(vf(i))
		}

		for len(n.journal.All()) > 0 && time.Since(begin) < time.Hour {
			time.Sleep(time.Second)
			for i := range functions {
				a.Add(vf(i)) // as the sweep does
			}
		}

		if took := time.Since(begin); took < 30*time.Second || took > 32*time.Second {
			t.Errorf("took %s for %d Functions, want 30 s as for one", took, functions)
		}

		for i := range functions {
			n.wantRuns(i, "port", "10-a", "20-b")
		}
	})
}

// TestNewGeneration: if the record was changed otherwise while a hook ran, the queue does not
// change it.
func TestNewGeneration(t *testing.T) {
	next := released(0).BackToReserved()
	next.Pod.Name = "pod2"
	later := released(0)
	later.RestoredAt = later.RestoredAt.Add(time.Second)
	for name, test := range map[string]struct {
		put  journal.Attachment
		runs []string
	}{
		"reserved": {next, []string{"10-a"}},
		"released": {later, []string{"10-a", "port", "10-a"}}, // all hooks for the new record
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				n := newNode(t, "10-a")
				changed := false
				n.fails["10-a"] = func() error {
					if !changed {
						changed = true
						must.Succeed(t, n.journal.Put(test.put))
					}
					return nil
				}

				first := released(0)
				first.Hooks = &journal.Hooks{Done: []string{portHook}, Next: "10-a"}
				must.Succeed(t, n.journal.Put(first))
				n.start(10)
				synctest.Wait()
				n.wantRuns(0, test.runs...)
				if a, exists := n.journal.Get(vf(0)); test.put.State == journal.Reserved &&
					(!exists || a.Pod.Name != "pod2") {
					t.Errorf("record %+v", a)
				}
			})
		})
	}
}

// TestWriteFails: a hook whose result cannot be written runs again.
func TestWriteFails(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a")
		must.Succeed(t, n.journal.Put(released(0)))
		full := true
		n.event = func(what string) bool {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			return full && what == "before put"
		}

		n.start(10)
		synctest.Wait()
		n.wantRuns(0, "port")
		n.mutex.Lock()
		full = false
		n.mutex.Unlock()
		time.Sleep(writeRetry)
		synctest.Wait()
		n.wantRuns(0, "port", "port", "10-a")
		n.wantFree(0, true)
	})
}

// TestKilled ends the agent at every point of the queue's work, before and after each hook and each
// write. The next agent continues: every hook runs at least once, in order, and the Function
// becomes free.
func TestKilled(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		// fails is the error of a run of 10-a.
		fails func(run int) error
		// events is the number of events, before and after 3 hooks and 4 writes.
		events int
	}{
		"all well": {func(int) error { return nil }, 14},
		"failed twice": {func(run int) error {
			if run < 2 {
				return errors.New("busy")
			}
			return nil
		}, 22},
		"given up": {func(int) error { return final{errors.New("never")} }, 14},
	} {
		t.Run(name, func(t *testing.T) {
			for at := 1; ; at++ {
				killed := false
				bubble(t, func(t *testing.T) { killed = killAt(t, at, test.fails) })
				if t.Failed() {
					t.Fatalf("failed at event %d", at)
				}

				if !killed {
					if at-1 != test.events {
						t.Errorf("%d events, want %d", at-1, test.events)
					}
					return
				}
			}
		})
	}
}

func killAt(t *testing.T, at int, fails func(run int) error) (killed bool) {
	n := newNode(t, "10-a", "20-b")
	run := -1
	n.fails["10-a"] = func() error { run++; return fails(run) }
	must.Succeed(t, n.journal.Put(released(0)))
	count := 0
	var first *agent
	ready := make(chan struct{})
	n.event = func(string) bool {
		<-ready
		if killed {
			return true
		}

		if count++; count == at {
			killed = true
			go first.stop()
		}

		return killed
	}

	first = n.start(10)
	close(ready)
	time.Sleep(time.Minute)
	first.stop()
	n.event = nil
	n.start(10)
	time.Sleep(time.Minute)
	synctest.Wait()
	n.wantFree(0, true)
	runs := slices.Compact(n.runs(0))
	if want := []string{"port", "10-a", "20-b"}; !slices.Equal(runs, want) {
		t.Errorf("event %d: ran %q, want %q in this order, each once or more", at, n.runs(0), want)
	}
	if len(n.runs(0)) > 3+2+1 {
		t.Errorf("event %d: ran %q: more than one run in vain", at, n.runs(0))
	}

	return killed
}

func TestDelay(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		attempts       int
		atLeast, below time.Duration
	}{{1, time.Second, 1200 * time.Millisecond}, {2, 2 * time.Second, 2400 * time.Millisecond},
		{5, 16 * time.Second, 19200 * time.Millisecond},
		{10, 5 * time.Minute, 6 * time.Minute}, {1 << 40, 5 * time.Minute, 6 * time.Minute}} {
		if got := delay(test.attempts, 5*time.Minute); got < test.atLeast || got > test.below {
			t.Errorf("pause after %d attempts %s, want %s to %s", test.attempts, got, test.atLeast,
				test.below)
		}
	}
}

// TestGiveUpByHand: an administrator can give up a hook that waits for another run or that runs,
// and no other hook.
func TestGiveUpByHand(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-a", "20-b")
		n.fails[portHook] = func() error { return errors.New("xPU xpu-1 is away") }
		n.hangs = "10-a"
		must.Succeed(t, n.journal.Put(released(0)))
		a := n.start(3)
		time.Sleep(90 * time.Second)
		synctest.Wait()

		for hook, want := range map[string]string{
			"10-a": `waits for hook "port"`, "": `waits for hook "port"`,
		} {
			if err := a.GiveUp(t.Context(), vf(0), hook); err == nil ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("giving up %q: error %v, want %q", hook, err, want)
			}
		}

		if err := a.GiveUp(t.Context(), vf(1), portHook); err == nil ||
			!strings.Contains(err.Error(), "waits for no post-delete hook") {
			t.Errorf("a free Function: error %v", err)
		}

		must.Succeed(t, a.GiveUp(t.Context(), vf(0), portHook))
		synctest.Wait() // 10-a runs
		n.wantFree(0, false)
		must.Succeed(t, a.GiveUp(t.Context(), vf(0), "10-a"))
		synctest.Wait()
		n.wantFree(0, true)
		if runs := n.runs(0); !slices.Equal(runs[len(runs)-2:], []string{"10-a", "20-b"}) {
			t.Errorf("runs %v, want 10-a once, and then 20-b", runs)
		}

		letters := n.journal.DeadLetters()
		if len(letters) != 2 ||
			letters[0].Error != "given up by an administrator: xPU xpu-1 is away" ||
			letters[1].Hook != "10-a" || letters[1].Error != "given up by an administrator" {
			t.Errorf("dead letters %+v", letters)
		}
	})
}

// quarantinedVF returns the record of a quarantined Function whose reservation has ended.
func quarantinedVF(i int) journal.Attachment {
	a := released(i)
	a.RestoredAt, a.Hooks = time.Time{}, nil
	a.Quarantine = &journal.Quarantine{
		Reason: journal.MayLeak, Message: "macvlan evil0", Since: a.StoppedAt,
	}
	return a
}

// TestQuarantinedPortGoes: the Port of a quarantined Function is deleted, even if the lifecycle
// retries the Function in the meantime. The administrator's hooks wait until the Function is back,
// and the record stays.
func TestQuarantinedPortGoes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t, "10-tell")
		must.Succeed(t, n.journal.Put(quarantinedVF(0)))
		tries := 0
		n.fails[portHook] = func() error {
			if tries++; tries > 1 {
				return nil
			}

			again, _ := n.journal.Get(vf(0)) // the lifecycle retries without success
			again.Quarantine = &journal.Quarantine{
				Reason: journal.MayLeak, Message: "macvlan evil1", Since: again.StoppedAt,
				Attempts: 1,
			}

			must.Succeed(t, n.journal.Put(again))
			return errors.New("xPU is away")
		}

		a := n.start(0)
		time.Sleep(time.Minute)
		synctest.Wait()
		n.wantRuns(0, portHook, portHook)
		got, exists := n.journal.Get(vf(0))
		want := &journal.Hooks{Done: []string{portHook}}
		if diff := cmp.Diff(want, got.Hooks); diff != "" || !exists || got.Quarantine == nil ||
			got.Quarantine.Attempts != 1 {
			t.Errorf("record %+v, hooks (-want +got):\n%s", got, diff)
		}

		got.Quarantine, got.RestoredAt = nil, time.Now().UTC()
		must.Succeed(t, n.journal.Put(got))
		a.Add(vf(0))
		time.Sleep(time.Minute)
		synctest.Wait()
		n.wantRuns(0, portHook, portHook, "10-tell")
		n.wantFree(0, true)
	})
}

// TestQuarantinedPortGivenUp: an administrator who knows that the Port is gone can give up its
// hook, as for any other Function.
func TestQuarantinedPortGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		n := newNode(t)
		must.Succeed(t, n.journal.Put(quarantinedVF(0)))
		n.fails[portHook] = func() error { return errors.New("xPU is away") }
		a := n.start(0)
		time.Sleep(time.Minute)
		must.Succeed(t, a.GiveUp(t.Context(), vf(0), portHook))
		synctest.Wait()
		got, exists := n.journal.Get(vf(0))
		if !exists || got.Quarantine == nil || !slices.Equal(got.Hooks.Done, []string{portHook}) {
			t.Errorf("record %+v", got)
		}
	})
}

// TestQueueLength: quarantined Functions are not counted here, because another metric counts them.
func TestQueueLength(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	must.Succeed(t, n.journal.Put(quarantinedVF(0)))
	must.Succeed(t, n.journal.Put(released(1)))
	q := &Queue{Options: Options{Journal: n.journal}}
	if length := len(q.waiting(journal.Attachment.Restored)); length != 1 {
		t.Errorf("%d Functions wait for hooks, want 1", length)
	}
}
