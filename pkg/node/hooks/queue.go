// Package hooks runs post-delete hooks: what is to be done after a Function was taken back from a pod and before another
// pod may have it. The Port is deleted at the xPU, and then the administrator's executables are run. The journal says
// which hooks are done, so that every hook runs at least once, whatever ends the agent.
//
// There is no hook that resets the Function: package lifecycle resets and verifies it before it hands the Function over.
package hooks

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

const (
	// portHook is the name of the built-in hook that deletes the Port.
	portHook = "port"
	// directoryHook stands for executables that are not known because their directory cannot be read.
	directoryHook = "(directory)"

	// portTimeout is how long one attempt to delete a Port waits for the xPU to say that it is gone.
	portTimeout = 2 * time.Minute
	// writeRetry is when a hook is run again whose end could not be written down.
	writeRetry = 10 * time.Second
)

// Journal is the durable record of attachments.
type Journal interface {
	Get(function.ID) (journal.Attachment, bool)
	Put(journal.Attachment) error
	Delete(function.ID) error
	GiveUp(letter journal.DeadLetter, next journal.Attachment) error
	All() []journal.Attachment
	Lock(context.Context, function.ID) (unlock func(), err error)
}

// Functions knows the node's Functions.
type Functions interface {
	Get(function.ID) (function.Function, bool)
}

// Ports deletes Ports.
type Ports interface {
	// Deprovision returns nil once the xPU serves no Port of the Function any more, also if it never did.
	Deprovision(context.Context, function.Function) error
}

// Recorder writes events; it is client-go's EventRecorder of package events.
type Recorder interface {
	Eventf(regarding, related runtime.Object, eventtype, reason, action, note string, args ...any)
}

// Options of a [Queue]. All but Parallel and Recorder must be set.
type Options struct {
	Journal   Journal
	Functions Functions
	Ports     Ports
	Log       logr.Logger
	// Node is the name of the node's Node object.
	Node string
	// Dir has the administrator's executables; it need not exist.
	Dir string
	// Timeout is how long one run of an executable may take.
	Timeout time.Duration
	// Attempts is how often an executable is run that does not succeed, at most.
	Attempts int
	// Parallel is how many executables run at once, at most; 0 is 8.
	Parallel int
	// Recorder, where set, tells of hooks that are given up.
	Recorder Recorder
	// Changed is called when a Function became free, or what it waits for changed. It must not block.
	Changed func()
}

// hook is one thing to be done after a release.
type hook struct {
	name string
	run  func(context.Context, journal.Attachment) error
	// attempts is how often it is run at most, 0 for ever.
	attempts int
	// slowest is the longest pause before it is run again.
	slowest time.Duration
}

// final is an error of a hook that need not be run again.
type final struct{ error }

// executables are the administrator's hooks.
type executables interface {
	list() ([]string, error)
	run(ctx context.Context, name string, a journal.Attachment) error
}

// Queue runs hooks: those of one Function one after the other, those of different Functions at the same time.
type Queue struct {
	Options
	executables executables
	metrics     *metrics
	// work only says which Functions to look at, each by one goroutine at a time; the journal has the rest.
	work workqueue.TypedDelayingInterface[function.ID]
}

// New makes a queue, whose Run must be called. It fails if the directory of executables is there and must not be used.
func New(options Options, registry prometheus.Registerer) (*Queue, error) {
	d := newDirectory(options)
	if _, err := d.list(); err != nil {
		return nil, err
	}
	return newQueue(options, d, registry), nil
}

func newQueue(options Options, e executables, registry prometheus.Registerer) *Queue {
	q := &Queue{Options: options, executables: e, work: workqueue.NewTypedDelayingQueue[function.ID]()}
	q.metrics = newMetrics(registry, q.length)
	return q
}

// length is how many Functions wait for hooks.
func (q *Queue) length() float64 {
	count := 0
	for _, a := range q.Journal.All() {
		if a.Restored() {
			count++
		}
	}
	return float64(count)
}

// First is the name of the first hook that runs after the release of this attachment, "" if none does.
func (q *Queue) First(a journal.Attachment) string {
	a.Hooks = nil
	h, _ := q.next(a)
	return h.name
}

// Add has the hooks of a Function run. Those of a Function that is not [journal.Attachment.Restored] are not.
func (q *Queue) Add(id function.ID) { q.work.Add(id) }

// Run runs hooks until ctx ends, those that an earlier run of the agent left first.
func (q *Queue) Run(ctx context.Context) error {
	defer q.work.ShutDown()
	defer context.AfterFunc(ctx, q.work.ShutDown)()
	for _, a := range q.Journal.All() {
		if a.Restored() {
			q.Add(a.Function)
		}
	}
	var running sync.WaitGroup
	defer running.Wait()
	for {
		id, ended := q.work.Get()
		if ended {
			return nil
		}
		running.Go(func() {
			defer q.work.Done(id)
			q.process(ctx, id)
		})
	}
}

// process runs the Function's hooks, until all are done or one must wait before it is run again.
func (q *Queue) process(ctx context.Context, id function.ID) {
	for ctx.Err() == nil {
		a, exists := q.Journal.Get(id)
		if !exists || !a.Restored() {
			return
		}
		h, more := q.next(a)
		var err error
		if more {
			if pause := untilRetry(a, h); pause > 0 {
				q.work.AddAfter(id, pause)
				return
			}
			err = q.run(ctx, a, h)
		} else {
			err = q.free(ctx, a)
		}
		if err != nil && ctx.Err() == nil {
			q.Log.Error(err, "What a post-delete hook did cannot be written down; it will be run again", "function", id.String())
			q.work.AddAfter(id, writeRetry)
			return
		}
		q.Changed()
	}
}

// progress is how far the hooks of an attachment are.
func progress(a journal.Attachment) journal.Hooks {
	if a.Hooks == nil {
		return journal.Hooks{}
	}
	return *a.Hooks
}

// next is the first hook of a released attachment that is not done; more is false if all are. The Port is deleted first,
// then the executables run in the order of the directory.
func (q *Queue) next(a journal.Attachment) (h hook, more bool) {
	done := progress(a).Done
	if a.Port != nil && !slices.Contains(done, portHook) {
		return hook{name: portHook, run: q.deletePort, slowest: 30 * time.Second}, true
	}
	names, err := q.executables.list()
	if err != nil {
		names = []string{directoryHook}
	}
	for _, name := range names {
		if slices.Contains(done, name) {
			continue
		}
		run := func(ctx context.Context, a journal.Attachment) error {
			if err != nil {
				return err
			}
			return q.executables.run(ctx, name, a)
		}
		return hook{name: name, run: run, attempts: q.Attempts, slowest: 5 * time.Minute}, true
	}
	return hook{}, false
}

// deletePort returns nil once the xPU serves no Port of the Function any more.
func (q *Queue) deletePort(ctx context.Context, a journal.Attachment) error {
	ctx, cancel := context.WithTimeout(ctx, portTimeout)
	defer cancel()
	f, exists := q.Functions.Get(a.Function)
	if !exists { // the xPU may serve it nevertheless
		f = function.Function{ID: a.Function, Kind: kind(a), PF: a.PF, PFName: a.PFName, Index: a.VFIndex}
	}
	return q.Ports.Deprovision(ctx, f)
}

func kind(a journal.Attachment) function.Kind {
	switch {
	case a.Function.Subfunction != "":
		return function.SF
	case a.IsVF():
		return function.VF
	}
	return function.PF
}

// untilRetry is how long a hook that failed must wait still. A time that is further away than any pause lasts is ignored:
// the clock was set meanwhile.
func untilRetry(a journal.Attachment, h hook) time.Duration {
	p := progress(a)
	pause := time.Until(p.RetryAt)
	if p.Next != h.name || p.RetryAt.IsZero() || pause > 2*h.slowest {
		return 0
	}
	return pause
}

// free ends a release.
func (q *Queue) free(ctx context.Context, a journal.Attachment) error {
	err := q.write(ctx, a, func() error { return q.Journal.Delete(a.Function) })
	if err == nil {
		q.Log.Info("Function released", "function", a.Function.String(), "claim", a.Claim.Name,
			"hooksTook", time.Since(a.RestoredAt))
	}
	return err
}

// run runs a hook and writes down what came of it. An error means that it was not written.
func (q *Queue) run(ctx context.Context, a journal.Attachment, h hook) error {
	begin := time.Now()
	failure := h.run(ctx, a)
	if ctx.Err() != nil {
		return nil // the agent ends; the next one runs it again
	}
	took := time.Since(begin)
	log := q.Log.WithValues("function", a.Function.String(), "hook", h.name)
	if failure == nil {
		log.Info("Post-delete hook done", "took", took)
		q.metrics.ran(h.name, "done", took)
		return q.write(ctx, a, func() error { return q.Journal.Put(q.after(a, h)) })
	}
	next := failed(a, h, failure)
	if isFinal := errors.As(failure, new(final)); isFinal || h.attempts > 0 && next.Attempts >= h.attempts {
		log.Error(failure, "Post-delete hook given up", "attempts", next.Attempts,
			"pod", klog.KRef(a.Pod.Namespace, a.Pod.Name))
		q.metrics.ran(h.name, "failed", took)
		return q.giveUp(ctx, a, h, next)
	}
	log.Error(failure, "Post-delete hook failed and will be run again", "attempt", next.Attempts, "at", next.RetryAt)
	q.metrics.ran(h.name, "retry", took)
	a.Hooks = &next
	return q.write(ctx, a, func() error { return q.Journal.Put(a) })
}

// failed is how far the hooks are once this one failed again.
func failed(a journal.Attachment, h hook, failure error) journal.Hooks {
	p := progress(a)
	if p.Next != h.name {
		p.Next, p.Attempts = h.name, 0
	}
	p.Attempts++
	p.Error = failure.Error()
	p.RetryAt = time.Now().Add(delay(p.Attempts, h.slowest)).UTC()
	return p
}

// after is the attachment once the hook is done or given up.
func (q *Queue) after(a journal.Attachment, h hook) journal.Attachment {
	a.Hooks = &journal.Hooks{Done: append(slices.Clone(progress(a).Done), h.name)}
	next, _ := q.next(a)
	a.Hooks.Next = next.name
	return a
}

// giveUp writes a dead letter for the hook and goes on without it.
func (q *Queue) giveUp(ctx context.Context, a journal.Attachment, h hook, last journal.Hooks) error {
	letter := journal.DeadLetter{
		Hook: h.name, Attachment: a, Attempts: last.Attempts, Error: last.Error, At: time.Now().UTC(),
	}
	if err := q.write(ctx, a, func() error { return q.Journal.GiveUp(letter, q.after(a, h)) }); err != nil {
		return err
	}
	q.metrics.deadLetters.WithLabelValues(h.name).Inc()
	q.event(letter)
	return nil
}

// event tells of the dead letter at the pod, or at the node where the pod is not known.
func (q *Queue) event(letter journal.DeadLetter) {
	if q.Recorder == nil {
		return
	}
	node := &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: q.Node, UID: types.UID(q.Node)}
	regarding := node
	if pod := letter.Attachment.Pod; pod.Name != "" {
		regarding = &corev1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		}
	}
	q.Recorder.Eventf(regarding, node, corev1.EventTypeWarning, "PostDeleteHookFailed", "RunHook",
		"post-delete hook %s of Function %s on node %s was given up after %d attempts: %s",
		letter.Hook, letter.Attachment.Function, q.Node, letter.Attempts, letter.Error)
}

// write changes the journal while nobody else works on the Function. The record is the queue's own from RestoredAt on;
// should another hand have changed it, nothing is written.
func (q *Queue) write(ctx context.Context, a journal.Attachment, change func() error) error {
	unlock, err := q.Journal.Lock(ctx, a.Function)
	if err != nil {
		return err
	}
	defer unlock()
	if now, exists := q.Journal.Get(a.Function); !exists || !now.Restored() || !now.RestoredAt.Equal(a.RestoredAt) {
		return nil
	}
	return change()
}

// delay is the pause after so many failed attempts: 1 s, 2 s, 4 s and so on up to slowest, each with up to a fifth
// more.
func delay(attempts int, slowest time.Duration) time.Duration {
	backoff := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.2, Steps: attempts, Cap: slowest}
	var pause time.Duration
	for range min(attempts, 64) {
		pause = backoff.Step()
	}
	return pause
}
