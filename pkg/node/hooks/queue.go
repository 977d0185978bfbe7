// SPDX-License-Identifier: Apache-2.0

// Package hooks runs post-delete hooks, after a Function was taken back from a pod and before
// another pod may have it: first the Port is deleted at the xPU, and then the administrator's
// executables run. The journal has the hooks that are done, so that every hook runs at least once,
// whatever ends the agent.
//
// There is no hook that resets the Function: package lifecycle resets and verifies it before it
// hands the Function over.
package hooks

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

const (
	portHook = nodestate.PortHook
	// stands for executables that are not known because their directory cannot be read
	directoryHook = "(directory)"

	// for one attempt to delete a Port, until the xPU says that it is gone
	portTimeout = 2 * time.Minute
	// before a hook is run again whose end could not be written to the journal
	writeRetry = 10 * time.Second
)

// Options of a [Queue]. All but Recorder must be set.
type Options struct {
	Journal journal.Records
	// Deprovision returns nil once the xPU serves no Port of the Function any more, also if it
	// never did.
	Deprovision func(context.Context, journal.Attachment) error
	Log         logr.Logger
	Node        string        // name of the node's Node object
	Dir         string        // of the administrator's executables; it need not exist
	Timeout     time.Duration // of one run of an executable
	// runs of an executable that fails, at most; 0 is without a limit
	Attempts int
	Recorder events.EventRecorder // tells of hooks that are given up
	// Changed is called when a Function became free, or what it waits for changed. It must not
	// block.
	Changed func()
}

// errChanged is the error of a write that was not made, as the record is another one by now.
var errChanged = errors.New("its hooks have gone on meanwhile")

// final is an error of a hook that need not be run again.
type final struct{ error }

// executables are the administrator's hooks.
type executables interface {
	list() ([]string, error)
	run(ctx context.Context, name string, a journal.Attachment) error
}

// Queue runs hooks: those of one Function one after the other, those of different Functions at the
// same time.
type Queue struct {
	Options
	executables executables
	// work only says which Functions to look at, each by one goroutine at a time; the journal has
	// the rest.
	work workqueue.TypedDelayingInterface[function.ID]
	// running has the [context.CancelFunc] of each Function's hook that runs. It is called when the
	// hook was given up.
	running sync.Map

	runs, deadLetters *prometheus.CounterVec
	seconds           *prometheus.HistogramVec
}

// New makes a queue, whose Run must be called. It fails if the directory of executables is there
// and must not be used.
func New(options Options, registry prometheus.Registerer) (*Queue, error) {
	d := newDirectory(options)
	if _, err := d.list(); err != nil {
		return nil, err
	}
	return newQueue(options, d, registry), nil
}

func newQueue(options Options, e executables, registry prometheus.Registerer) *Queue {
	factory := promauto.With(registry)
	q := &Queue{
		Options: options, executables: e, work: workqueue.NewTypedDelayingQueue[function.ID](),
		runs: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_hook_runs_total",
			Help: "Runs of post-delete hooks, by hook and result: done, retry (will be run " +
				"again) or failed (given up).",
		}, []string{"hook", "result"}),
		seconds: factory.NewHistogramVec(prometheus.HistogramOpts{
			Name:                           "xpu_hook_run_seconds",
			Help:                           "How long runs of post-delete hooks took, by hook.",
			Buckets:                        prometheus.ExponentialBuckets(0.001, 4, 9),
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}, []string{"hook"}),
		deadLetters: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_hook_dead_letters_total",
			Help: "Post-delete hooks that were given up, by hook.",
		}, []string{"hook"}),
	}

	factory.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "xpu_hook_queue_length",
		Help: "Functions that are back from their pods and not free yet: " +
			"their post-delete hooks run or wait to be run again.",
	}, func() float64 { return float64(len(q.waiting(journal.Attachment.Restored))) })

	return q
}

// waiting are the attachments of a kind whose hooks run or wait to be run again.
func (q *Queue) waiting(is func(journal.Attachment) bool) []journal.Attachment {
	return slices.DeleteFunc(q.Journal.All(), func(a journal.Attachment) bool { return !is(a) })
}

// due says whether hooks of a Function may run: all of one that is [journal.Attachment.Restored];
// and of one that is quarantined, whose reservation is over, [portHook] alone. Its pod is gone, so
// the Port is not needed. The administrator's hooks count on a Function that is as it was, and run
// when the quarantine is over.
func due(a journal.Attachment) bool {
	return a.Restored() || a.State == journal.Releasing && a.Quarantined()
}

// Add has the hooks of a Function run, as far as they are due.
func (q *Queue) Add(id function.ID) { q.work.Add(id) }

// Run runs hooks until ctx ends, those that an earlier run of the agent left first.
func (q *Queue) Run(ctx context.Context) error {
	defer q.work.ShutDown()
	defer context.AfterFunc(ctx, q.work.ShutDown)()

	for _, a := range q.waiting(due) {
		q.Add(a.Function)
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
		if !exists || !due(a) {
			return
		}

		var err error
		hook := q.First(a)
		if hook == "" && a.Quarantined() {
			return
		}

		pause := time.Until(progress(a, hook).RetryAt)
		switch {
		case hook == "":
			if err = q.write(ctx, a, func(journal.Attachment) error {
				return q.Journal.Delete(id)
			}); err == nil {
				q.Log.Info("Function released", "function", id.String(), "claim", a.Claim.Name,
					"hooksTook", time.Since(a.RestoredAt))
			}
		case pause > 0 && pause <= 2*slowest(hook):
			// no pause is longer, unless the clock was set meanwhile
			q.work.AddAfter(id, pause)
			return
		default:
			err = q.run(ctx, a, hook)
		}

		if err != nil && !errors.Is(err, errChanged) && ctx.Err() == nil {
			q.Log.Error(err,
				"What a post-delete hook did cannot be written down; it will be run again",
				"function", id.String())
			q.work.AddAfter(id, writeRetry)
			return
		}

		q.Changed()
	}
}

// progress is how far the hooks of an attachment are, and how often this hook failed.
func progress(a journal.Attachment, hook string) journal.Hooks {
	hooks := ptr.Deref(a.Hooks, journal.Hooks{})
	if hooks.Next != hook {
		return journal.Hooks{Next: hook, Done: hooks.Done}
	}
	return hooks
}

// First is the name of the first hook of a released attachment that is due and not done, "" if
// there is none.
func (q *Queue) First(a journal.Attachment) (hook string) {
	done := progress(a, "").Done
	if a.Port != nil && !slices.Contains(done, portHook) {
		return portHook
	}
	if a.Quarantined() {
		return ""
	}

	names, err := q.executables.list()
	if err != nil {
		names = []string{directoryHook}
	}

	for _, name := range names {
		if !slices.Contains(done, name) {
			return name
		}
	}

	return ""
}

// do runs a hook once.
func (q *Queue) do(ctx context.Context, a journal.Attachment, hook string) error {
	switch hook {
	case portHook:
		ctx, cancel := context.WithTimeout(ctx, portTimeout)
		defer cancel()
		return q.Deprovision(ctx, a)
	case directoryHook:
		_, err := q.executables.list()
		return err
	}
	return q.executables.run(ctx, hook, a)
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

// run runs a hook and writes down what came of it. An error means that it was not written.
func (q *Queue) run(ctx context.Context, a journal.Attachment, hook string) error {
	begin := time.Now()
	doing, stop := context.WithCancel(ctx)
	defer stop()

	q.running.Store(a.Function, stop)
	failure := q.do(doing, a, hook)
	q.running.Delete(a.Function)

	switch {
	case ctx.Err() != nil:
		return nil // the agent ends; the next one runs the hook again
	case doing.Err() != nil:
		return errChanged
	}

	took := time.Since(begin)
	log := q.Log.WithValues("function", a.Function.String(), "hook", hook)
	if failure == nil {
		log.Info("Post-delete hook done", "took", took)
		q.ran(hook, "done", took)
		return q.write(ctx, a, func(now journal.Attachment) error {
			return q.Journal.Put(q.after(now, hook))
		})
	}

	failed := progress(a, hook)
	failed.Attempts++
	failed.Error = failure.Error()
	failed.RetryAt = time.Now().Add(delay(failed.Attempts, slowest(hook))).UTC()
	limited := hook != portHook && q.Attempts > 0
	if errors.As(failure, new(final)) || limited && failed.Attempts >= q.Attempts {
		log.Error(failure, "Post-delete hook given up", "attempts", failed.Attempts,
			"pod", klog.KRef(a.Pod.Namespace, a.Pod.Name))
		q.ran(hook, "failed", took)
		return q.giveUp(ctx, a, failed)
	}

	log.Error(failure, "Post-delete hook failed and will be run again", "attempt", failed.Attempts,
		"at", failed.RetryAt)
	q.ran(hook, "retry", took)

	return q.write(ctx, a, func(now journal.Attachment) error {
		now.Hooks = &failed
		return q.Journal.Put(now)
	})
}

func (q *Queue) ran(hook, result string, took time.Duration) {
	q.runs.WithLabelValues(hook, result).Inc()
	q.seconds.WithLabelValues(hook).Observe(took.Seconds())
}

// after is the attachment once the hook is done or given up.
func (q *Queue) after(a journal.Attachment, hook string) journal.Attachment {
	a.Hooks = &journal.Hooks{Done: append(slices.Clone(progress(a, hook).Done), hook)}
	a.Hooks.Next = q.First(a)
	return a
}

// giveUp writes a dead letter for the hook that failed and goes on without it.
func (q *Queue) giveUp(ctx context.Context, a journal.Attachment, failed journal.Hooks) error {
	letter := journal.DeadLetter{
		Hook: failed.Next, Attachment: a, Attempts: failed.Attempts, Error: failed.Error,
		At: time.Now().UTC(),
	}

	err := q.write(ctx, a, func(now journal.Attachment) error {
		return q.Journal.GiveUp(letter, q.after(now, failed.Next))
	})
	if err != nil {
		return err
	}

	q.deadLetters.WithLabelValues(failed.Next).Inc()
	q.event(letter)

	return nil
}

// event tells of the dead letter at the pod, or at the node where the pod is not known.
func (q *Queue) event(letter journal.DeadLetter) {
	if q.Recorder == nil {
		return
	}

	node := &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Node", Name: q.Node, UID: types.UID(q.Node),
	}
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

// GiveUp gives up the hook that the Function waits for, which must be this one, as an administrator
// wishes. If it runs, it is stopped. The others run then.
func (q *Queue) GiveUp(ctx context.Context, id function.ID, hook string) error {
	a, exists := q.Journal.Get(id)
	if !exists || !due(a) {
		return fmt.Errorf("Function %s: waits for no post-delete hook", id)
	}
	if first := q.First(a); first != hook {
		return fmt.Errorf("Function %s: waits for hook %q, not for %q", id, first, hook)
	}

	failed := progress(a, hook)
	failed.Error = strings.TrimSuffix("given up by an administrator: "+failed.Error, ": ")
	if err := q.giveUp(ctx, a, failed); err != nil {
		return fmt.Errorf("Function %s: %w", id, err)
	}

	if stop, runs := q.running.Load(id); runs {
		stop.(context.CancelFunc)()
	}

	q.Changed()
	q.Add(id)

	return nil
}

// write changes the journal with the Function's lock. Only the queue changes the hooks of a record
// from RestoredAt on, or of a quarantined Function. An administrator can give up the hook that
// runs, and a quarantine can end: if the hooks or RestoredAt have changed since a was read, nothing
// is written, and the error is errChanged. change gets the record as it is now, because a
// quarantined Function may have been tried again meanwhile.
func (q *Queue) write(
	ctx context.Context, a journal.Attachment, change func(now journal.Attachment) error,
) error {
	unlock, err := q.Journal.Lock(ctx, a.Function)
	if err != nil {
		return err
	}
	defer unlock()

	now, exists := q.Journal.Get(a.Function)
	if !exists || !due(now) || !now.RestoredAt.Equal(a.RestoredAt) ||
		!reflect.DeepEqual(now.Hooks, a.Hooks) {
		return errChanged
	}

	return change(now)
}

// slowest is the longest pause before a hook is run again.
func slowest(hook string) time.Duration {
	if hook == portHook {
		return 30 * time.Second
	}
	return 5 * time.Minute
}

// delay is the pause after so many failed attempts, 1 or more: 1 s, 2 s, 4 s, ... slowest, each
// with up to a fifth more.
func delay(attempts int, slowest time.Duration) time.Duration {
	doubled := time.Second << min(attempts-1, 30)
	return wait.Jitter(min(doubled, slowest), 0.2)
}
