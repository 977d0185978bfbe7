// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// drainTimeout is how long running calls may continue when a gate closes. After that, the kubelet
// repeats them at the agent that has the node then.
const drainTimeout = 2 * time.Second

var (
	errStarting = errors.New("this agent has not begun to work yet")
	errClosed   = errors.New("this agent ends, or another one has the node; the kubelet asks again")
)

// Gate registers the driver with the kubelet before the agent is ready: calls wait until
// [Gate.Open]. Otherwise the kubelet would fail calls for lack of a driver, and repeat them much
// later. A Gate implements [kubeletplugin.DRAPlugin].
type Gate struct {
	opened chan struct{}
	// driver is set before opened is closed.
	driver *Driver

	// ended is the context of the calls. It ends when Close has waited long enough.
	ended context.Context
	end   context.CancelCauseFunc

	mutex  sync.Mutex
	closed bool
	calls  sync.WaitGroup
}

// NewGate returns a gate that is not open.
func NewGate() *Gate {
	g := &Gate{opened: make(chan struct{})}
	g.ended, g.end = context.WithCancelCause(context.Background())
	return g
}

// Open lets calls through to the driver. It must be called at most once.
func (g *Gate) Open(d *Driver) {
	g.driver = d
	close(g.opened)
}

// Close refuses new calls, and returns when the running calls have ended. They have 2 s for that.
func (g *Gate) Close() {
	g.mutex.Lock()
	g.closed = true
	g.mutex.Unlock()
	over := time.AfterFunc(drainTimeout, func() { g.end(errClosed) })
	defer over.Stop()
	g.calls.Wait()
	g.end(errClosed)
}

// await waits until the gate is open. The context that it returns ends when the gate has been
// closed. stop must be called.
func (g *Gate) await(ctx context.Context) (_ context.Context, stop func(), err error) {
	select {
	case <-g.opened:
	case <-ctx.Done():
		return nil, nil, fmt.Errorf("%w: %w", errStarting, ctx.Err())
	case <-g.ended.Done():
	}

	if g.ended.Err() != nil {
		return nil, nil, errClosed
	}

	ctx, cancel := context.WithCancelCause(ctx)
	detach := context.AfterFunc(g.ended, func() { cancel(errClosed) })
	return ctx, func() { detach(); cancel(nil) }, nil
}

// pass is await for a call that Close waits for. leave must be called.
func (g *Gate) pass(ctx context.Context) (_ context.Context, leave func(), err error) {
	ctx, stop, err := g.await(ctx)
	if err != nil {
		return nil, nil, err
	}

	g.mutex.Lock()
	defer g.mutex.Unlock()

	if g.closed {
		stop()
		return nil, nil, errClosed
	}

	g.calls.Add(1)
	return ctx, func() { stop(); g.calls.Done() }, nil
}

// PrepareResourceClaims calls [Driver.PrepareResourceClaims] once the gate is open.
func (g *Gate) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	ctx, leave, err := g.pass(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return g.driver.PrepareResourceClaims(ctx, claims)
}

// UnprepareResourceClaims calls [Driver.UnprepareResourceClaims] once the gate is open.
func (g *Gate) UnprepareResourceClaims(
	ctx context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	ctx, leave, err := g.pass(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return g.driver.UnprepareResourceClaims(ctx, claims)
}

// WatchHealthStatus calls [Driver.WatchHealthStatus] once the gate is open. Close does not wait for
// it.
func (g *Gate) WatchHealthStatus(
	ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport,
) error {
	ctx, stop, err := g.await(ctx)
	if err != nil {
		return nil // the kubelet is gone, or asks the other agent
	}
	defer stop()
	return g.driver.WatchHealthStatus(ctx, reports)
}

// HandleError calls [Driver.HandleError]. Errors before the gate is open concern the registration
// only, and are ignored.
func (g *Gate) HandleError(ctx context.Context, err error, msg string) {
	select {
	case <-g.opened:
		g.driver.HandleError(ctx, err, msg)
	default:
	}
}
