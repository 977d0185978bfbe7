package provisioning

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

const (
	// verifyTimeout bounds one attempt to verify a Port or a network, the lock of which is held meanwhile.
	verifyTimeout = 15 * time.Second
	// verifyAtOnce is how many Ports are verified at the same time, in direct mode of each xPU.
	verifyAtOnce = 8
	// undeclaredFor is for how long a network or an XPU that is not declared is waited for. It may come together with the
	// pod; if it is a mistake, the user should hear of it soon.
	undeclaredFor = 5 * time.Second
)

// retries are the pauses between attempts for one Function: 100 ms, then longer and longer up to 10 s.
func retries() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 10*time.Second) }

// wantsPort says whether the xPU is to serve a Port for the attachment. An attachment that is on its way out keeps its
// Port until it is deprovisioned, but a Port that is missing is not made again for it.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// progress is what came of a step. The zero value says that all is done.
type progress struct {
	// missing is what has to happen.
	missing error
	// refused says that the API server did not do what it was asked to. It is asked again after a pause, and not
	// whenever something else changes.
	refused bool
	// undeclared says that an administrator has to declare something first, which may be on its way or not.
	undeclared bool
	// never says that no further step can help.
	never bool
}

func waiting(format string, args ...any) progress {
	return progress{missing: fmt.Errorf(format, args...)}
}

// converge repeats the step until nothing is missing: after each change, for which it subscribes, and after pauses in
// case that none comes. It returns what is missing when ctx ends, or when further steps cannot help.
func converge(
	ctx context.Context, subscribe func(context.Context) <-chan struct{}, step func(context.Context) progress,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changes := subscribe(ctx)
	pauses := retries()
	var missing error
	var undeclared time.Time // since when
	for {
		now := step(ctx)
		if now.missing == nil {
			return nil
		}
		// An answer that was cut short says less than the one before.
		if missing == nil || ctx.Err() == nil && !errors.Is(now.missing, opi.ErrTimeout) {
			missing = now.missing
		}
		switch {
		case !now.undeclared:
			undeclared = time.Time{}
		case undeclared.IsZero():
			undeclared = time.Now()
		case time.Since(undeclared) >= undeclaredFor:
			return missing
		}
		relevant := changes
		if now.refused {
			relevant = nil
		}
		if now.never || !loop.Wait(ctx, relevant, pauses.Step()) {
			return missing
		}
	}
}

// verifyAll calls verify for the Functions, several at once, and returns the errors of those for which it failed while
// ctx had not ended.
func verifyAll(
	ctx context.Context, ids []function.ID, verify func(context.Context, function.ID) error,
) map[function.ID]error {
	failed := map[function.ID]error{}
	var mutex sync.Mutex // for failed
	var group errgroup.Group
	group.SetLimit(verifyAtOnce)
	for _, id := range ids {
		group.Go(func() error {
			if err := verify(ctx, id); err != nil && ctx.Err() == nil {
				mutex.Lock()
				defer mutex.Unlock()
				failed[id] = err
			}
			return nil
		})
	}
	_ = group.Wait() // the errors are in failed
	return failed
}
