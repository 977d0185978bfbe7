package agent

import (
	"cmp"
	"context"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/release"
)

const (
	// sweepInterval is how often what is half done is continued though nobody asks: a release of an earlier run, or one
	// that the kubelet gave up. Everything else is driven by calls.
	sweepInterval = time.Minute
	// releaseGrace is how long a release may take before the Function counts as unhealthy. A usual one takes
	// milliseconds; telling the API server about each would cost two writes for every pod.
	releaseGrace = 10 * time.Second
	// abandonedGrace is how long a Function that the device plugin handed out may be reserved before it is asked whether
	// a pod still has it.
	abandonedGrace = 5 * time.Minute
	// askTimeout is how long the kubelet may take to say what pods have.
	askTimeout = 10 * time.Second
)

// times shortens what tests would wait for. Zero stands for the constant.
type times struct {
	sweep, abandoned, conflict, allocate, add time.Duration
}

func (t times) sweepInterval() time.Duration    { return cmp.Or(t.sweep, sweepInterval) }
func (t times) abandonedGrace() time.Duration   { return cmp.Or(t.abandoned, abandonedGrace) }
func (t times) conflictInterval() time.Duration { return cmp.Or(t.conflict, conflictInterval) }

// releaser brings Functions back.
type releaser interface {
	Release(ctx context.Context, id inventory.ID, belongs func(journal.Attachment) bool) error
	Detach(ctx context.Context, id inventory.ID, sandbox string) error
	Free(ctx context.Context, id inventory.ID) error
	Recover(ctx context.Context) error
}

// assigned knows which Functions the kubelet gave to pods, by [inventory.ID.String].
type assigned interface {
	Assigned(ctx context.Context) (map[string]podresources.Assignment, error)
}

// releases watches over Functions that are on their way back.
type releases struct {
	releaser releaser
	journal  *journal.Journal
	// assigned is nil where no extended resources are handed out.
	assigned assigned
	// changed is called when a Function may have become healthy or unhealthy.
	changed func()
	log     logr.Logger
	times   times

	// abandoned are the Functions that no pod had at the last look, with the time of their reservation. Only run uses it.
	abandoned map[inventory.ID]time.Time
}

// Release is that of the releaser.
func (r *releases) Release(ctx context.Context, id inventory.ID, belongs func(journal.Attachment) bool) error {
	err := r.releaser.Release(ctx, id, belongs)
	r.tell(id)
	return err
}

// Detach is that of the releaser.
func (r *releases) Detach(ctx context.Context, id inventory.ID, sandbox string) error {
	err := r.releaser.Detach(ctx, id, sandbox)
	r.tell(id)
	return err
}

// Free is that of the releaser.
func (r *releases) Free(ctx context.Context, id inventory.ID) error { return r.releaser.Free(ctx, id) }

// tell says that a Function's health may have changed, and again when it took too long to come back.
func (r *releases) tell(id inventory.ID) {
	r.changed()
	if a, exists := r.journal.Get(id); exists && (a.State == journal.Releasing || a.State == journal.Detaching) {
		time.AfterFunc(releaseGrace, r.changed)
	}
}

// releasing is a [health.Source]: it knows Functions that are not free yet after their last pod, at once. It is for the
// device plugin: the kubelet takes a Function for free as soon as the pod is gone, and hears of health by a stream that
// costs nothing.
func (r *releases) releasing(id inventory.ID) string {
	a, exists := r.journal.Get(id)
	if !exists || a.State != journal.Releasing {
		return r.pending(id)
	}
	return describe(a)
}

// pending is a [health.Source]: it knows Functions that should be back by now. It is for DRA, where telling is a write
// to the API server, and Prepare waits for a Function that is on its way.
func (r *releases) pending(id inventory.ID) string {
	a, exists := r.journal.Get(id)
	if !exists || a.State != journal.Releasing && a.State != journal.Detaching || time.Since(a.StoppedAt) < releaseGrace {
		return ""
	}
	return describe(a)
}

func describe(a journal.Attachment) string {
	return "the Function " + release.Pending(a)
}

// run continues what is half done, until ctx ends.
func (r *releases) run(ctx context.Context) error {
	tick := time.NewTicker(r.times.sweepInterval())
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := r.releaser.Recover(ctx); err != nil {
			r.log.Error(err, "Functions are not back yet; trying again", "after", r.times.sweepInterval().String())
		}
		if err := r.releaseAbandoned(ctx); err != nil {
			r.log.Error(err, "Pods' devices are not known, so nothing that pods lost is released; trying again",
				"after", r.times.sweepInterval().String())
		}
		r.changed()
	}
}

// releaseAbandoned releases what the device plugin handed out and no pod has any more. The kubelet says nothing when it
// takes an extended resource back from a pod that never ran; a Function that was attached comes back by CNI DEL. It is
// looked twice, so that a pod which the kubelet is just starting is not taken for gone.
func (r *releases) releaseAbandoned(ctx context.Context) error {
	candidates := r.reservedByResource()
	if r.assigned == nil || len(candidates) == 0 {
		r.abandoned = nil
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	pods, err := r.assigned.Assigned(ctx)
	if err != nil {
		r.abandoned = nil
		return err
	}
	before := r.abandoned
	r.abandoned = map[inventory.ID]time.Time{}
	for _, a := range candidates {
		if _, has := pods[a.Function.String()]; has {
			continue
		}
		r.abandoned[a.Function] = a.ReservedAt
		if seen, twice := before[a.Function]; twice && seen.Equal(a.ReservedAt) {
			r.releaseOne(ctx, a)
		}
	}
	return nil
}

// reservedByResource are the attachments that nobody may need.
func (r *releases) reservedByResource() []journal.Attachment {
	var list []journal.Attachment
	for _, a := range r.journal.All() {
		if isAbandonable(a) && time.Since(a.ReservedAt) > r.times.abandonedGrace() {
			list = append(list, a)
		}
	}
	return list
}

func isAbandonable(a journal.Attachment) bool {
	return a.Resource != "" && a.Claim.UID == "" && a.State == journal.Reserved
}

func (r *releases) releaseOne(ctx context.Context, abandoned journal.Attachment) {
	r.log.Info("No pod has the Function any more: it is released", "function", abandoned.Function.String(),
		"resource", abandoned.Resource, "reserved", abandoned.ReservedAt)
	err := r.Release(ctx, abandoned.Function, func(a journal.Attachment) bool {
		return isAbandonable(a) && a.ReservedAt.Equal(abandoned.ReservedAt)
	})
	if err != nil {
		r.log.Error(err, "The Function is not back yet; trying again", "after", r.times.sweepInterval().String())
	}
}
