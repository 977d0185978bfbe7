package agent

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/journal"
)

const (
	// sweepInterval is how often what is half done is continued though nobody asks: a release of an earlier run, or one
	// that the kubelet gave up. Everything else is driven by calls.
	sweepInterval = time.Minute
	// releaseGrace is how long a release may take before the Function counts as unhealthy. A usual one takes
	// milliseconds; telling the API server about each would cost two writes for every pod.
	releaseGrace = 10 * time.Second
)

// releaser brings Functions back.
type releaser interface {
	Release(ctx context.Context, id inventory.ID, claim types.UID) error
	Recover(ctx context.Context) error
}

// releases watches over Functions that are on their way back.
type releases struct {
	releaser releaser
	journal  *journal.Journal
	// changed is called when a Function may have become healthy or unhealthy.
	changed func()
	log     logr.Logger
}

// Release is that of the releaser.
func (r *releases) Release(ctx context.Context, id inventory.ID, claim types.UID) error {
	defer r.changed()
	return r.releaser.Release(ctx, id, claim)
}

// pending is a [health.Source]: it knows Functions that should be back by now.
func (r *releases) pending(id inventory.ID) string {
	a, exists := r.journal.Get(id)
	if !exists || a.State != journal.Releasing && a.State != journal.Detaching || time.Since(a.StoppedAt) < releaseGrace {
		return ""
	}
	return fmt.Sprintf("the Function is not back from pod %s/%s, which ended at %s: the log of this node's xpu-agent says why",
		a.Pod.Namespace, a.Pod.Name, a.StoppedAt.Format(time.RFC3339))
}

// run continues what is half done, until ctx ends.
func (r *releases) run(ctx context.Context) error {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if err := r.releaser.Recover(ctx); err != nil {
			r.log.Error(err, "Functions are not back yet; trying again", "after", sweepInterval.String())
		}
		r.changed()
	}
}
