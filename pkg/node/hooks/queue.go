// SPDX-License-Identifier: Apache-2.0

// Package hooks runs post-delete hooks, after a Function was taken back from a pod and before
// another pod may have it. First the Port is deleted from the xPU, and then the administrator's
// executables run. The journal has the hooks that are done, so that every hook runs at least once,
// whenever the agent ends.
//
// No hook resets the Function. Package lifecycle resets and verifies it before its hooks run.
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
	// directoryHook stands for executables that are unknown because their directory cannot be read.
	directoryHook = "(directory)"

	// portTimeout limits one attempt to delete a Port, until the xPU says that it is gone.
	portTimeout = 2 * time.Minute
	// writeRetry is the pause before a hook runs again whose result could not be written to the
	// journal.
	writeRetry = 10 * time.Second
)

// Options of a [Queue]. All fields except Recorder must be set.
type Options struct {
	Journal journal.Records
	// Deprovision returns nil once the xPU serves no Port of the Function, even if it never did.
	Deprovision func(context.Context, journal.Attachment) error
	Log         logr.Logger
	// Node is the name of the node's Node object.
	Node string
	// Dir has the administrator's executables. It need not exist.
	Dir string
	// Timeout limits one run of an executable.
	Timeout time.Duration
	// Attempts limits the runs of an executable that fails; 0 means no limit.
	Attempts int
	// Recorder records events about hooks that are given up.
	Recorder events.EventRecorder
	// Changed is called when a Function became free, or when the reason why it is not free has
	// changed. It must not block.
	Changed func()
}

// errChanged is returned if nothing was written because the record has changed in the meantime.
var errChanged = errors.New("its hooks have gone on meanwhile")

// final is an error after which a hook need not run again.
type final struct{ error }

// executables runs the administrator's hooks.
type executables interface {
	list() ([]string, error)
	run(ctx context.Context, name string, a journal.Attachment) error
}

// Queue runs hooks. The hooks of one Function run one after the other. Hooks of different Functions
// run in parallel.
type Queue struct {
	Options
	executables executables
	// work has the Functions to process, each by one goroutine at a time. All other state is in the
	// journal.
	work workqueue.TypedDelayingInterface[function.ID]
	// running has the [context.CancelFunc] of each Function's running hook. It is called when the
	// hook is given up.
	running sync.Map

	runs, deadLetters *prometheus.CounterVec
	seconds           *prometheus.HistogramVec
}

// New returns a queue, whose Run must be called. It fails if the directory of executables exists
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

// waiting returns the matching attachments whose hooks run or wait for another run.
func (q *Queue) waiting(is func(journal.Attachment) bool) []journal.Attachment {
	return slices.DeleteFunc(q.Journal.All(), func(a journal.Attachment) bool { return !is(a) })
}

// due reports whether hooks of a Function may run.
//
// All hooks of a Function that is [journal.Attachment.Restored] may run. For a quarantined Function
// whose reservation has ended, only [portHook] may run: its pod is gone, so that the Port is not
// needed. The administrator's hooks rely on a Function that is as it was before its pod, and run
// after the quarantine.
func due(a journal.Attachment) bool {
	return a.Restored() || a.State == journal.Releasing && a.Quarantined()
}

// Add queues a Function, so that its due hooks run.
func (q *Queue) Add(id function.ID) { q.work.Add(id) }

// Run runs hooks until ctx ends. It starts with those that an earlier agent left.
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

// process runs the Function's hooks, until all are done or one must wait before it runs again.
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
			// A longer pause means that the clock was set in the meantime.
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

// progress returns the progress of an attachment's hooks. Its failures are the failures of the
// given hook.
func progress(a journal.Attachment, hook string) journal.Hooks {
	hooks := ptr.Deref(a.Hooks, journal.Hooks{})
	if hooks.Next != hook {
		return journal.Hooks{Next: hook, Done: hooks.Done}
	}
	return hooks
}

// First returns the name of the first hook of an attachment that is due and not done, or "" if
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

// execute runs a hook once.
func (q *Queue) execute(ctx context.Context, a journal.Attachment, hook string) error {
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

// run runs a hook and writes the result to the journal. An error means that the result was not
// written.
func (q *Queue) run(ctx context.Context, a journal.Attachment, hook string) error {
	begin := time.Now()
	doing, stop := context.WithCancel(ctx)
	defer stop()

	q.running.Store(a.Function, stop)
	failure := q.execute(doing, a, hook)
	q.running.Delete(a.Function)

	switch {
	case ctx.Err() != nil:
		return nil // the agent ends, and the next agent runs the hook again
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

// after returns the attachment as it is once the hook is done or given up.
func (q *Queue) after(a journal.Attachment, hook string) journal.Attachment {
	a.Hooks = &journal.Hooks{Done: append(slices.Clone(progress(a, hook).Done), hook)}
	a.Hooks.Next = q.First(a)
	return a
}

// giveUp writes a dead letter for the hook that failed, and continues without the hook.
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

// event records an event for the dead letter on the pod, or on the node if the pod is unknown.
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

// GiveUp gives up a hook for an administrator. The Function must be waiting for this hook. If the
// hook runs, it is stopped. The Function's other hooks run after that. An error means that the hook
// was not given up.
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

// write calls change with the current record, under the Function's lock.
//
// Only the queue changes the hooks of a record after RestoredAt was set, or of a quarantined
// Function. But an administrator can give up the hook that runs, and a quarantine can end. If the
// hooks or RestoredAt have changed since a was read, write returns errChanged without a call of
// change. Other parts of the record may have changed, because the lifecycle may have retried a
// quarantined Function.
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

// slowest returns the longest pause before a hook runs again.
func slowest(hook string) time.Duration {
	if hook == portHook {
		return 30 * time.Second
	}
	return 5 * time.Minute
}

// delay returns the pause after the given number of failed attempts, 1 or more: 1 s, 2 s, 4 s, ...
// slowest, each with up to a fifth more.
func delay(attempts int, slowest time.Duration) time.Duration {
	doubled := time.Second << min(attempts-1, 30)
	return wait.Jitter(min(doubled, slowest), 0.2)
}
