package provisioning

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

const (
	// verifyTimeout bounds one attempt to verify a Port or a network, which holds the lock of the Function or network.
	verifyTimeout = 15 * time.Second
	// verifyAtOnce is how many Ports are verified at the same time; in direct mode, how many of each xPU.
	verifyAtOnce = 8
	// undeclaredFor is how long to wait for a network or an XPU that is not declared. It may be created together with the
	// pod. If the pod names it by mistake, the user should learn that soon.
	undeclaredFor = 5 * time.Second
)

// retries are the pauses between attempts for one Function: 100 ms, then longer and longer up to 10 s.
func retries() *wait.Backoff { return loop.Backoff(100*time.Millisecond, 10*time.Second) }

// wantsPort says whether the xPU must serve a Port for the attachment. An attachment that is being released keeps its Port
// until it is deprovisioned, but if the Port is missing, it is not created again.
func wantsPort(a journal.Attachment) bool { return a.Port != nil && a.State != journal.Releasing }

// progress is the result of a step. The zero value says that all is done.
type progress struct {
	// missing is what has to happen.
	missing error
	// refused says that the API server refused a request. The step is repeated after a pause only, and not after a change.
	refused bool
	// undeclared says that an administrator has to declare something first.
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
		// The error of a step that ctx cut short says less than the one before.
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

// verifyAll calls verify for the Functions, several at once, and returns the errors of those for which it failed; none if
// ctx has ended.
func verifyAll(ctx context.Context, ids []function.ID, verify func(context.Context, function.ID) error) map[function.ID]error {
	errs := make([]error, len(ids))
	workqueue.ParallelizeUntil(ctx, verifyAtOnce, len(ids), func(i int) { errs[i] = verify(ctx, ids[i]) })
	failed := map[function.ID]error{}
	for i, err := range errs {
		if err != nil && ctx.Err() == nil {
			failed[ids[i]] = err
		}
	}
	return failed
}
