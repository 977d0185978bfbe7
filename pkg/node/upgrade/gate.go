// SPDX-License-Identifier: Apache-2.0

package upgrade

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

// gate is the DRA driver that the kubelet knows before the agent has the node: calls wait until
// open is called. Otherwise the kubelet would fail calls for lack of a driver, and repeat them much
// later.
type gate struct {
	opened chan struct{}
	// driver is set before opened is closed.
	driver kubeletplugin.DRAPlugin

	// ended is the context of the calls. It ends when close has waited long enough.
	ended context.Context
	end   context.CancelCauseFunc

	mutex  sync.Mutex
	closed bool
	calls  sync.WaitGroup
}

// newGate returns a gate that is not open.
func newGate() *gate {
	g := &gate{opened: make(chan struct{})}
	g.ended, g.end = context.WithCancelCause(context.Background())
	return g
}

// open lets calls through to the driver. It must be called at most once.
func (g *gate) open(driver kubeletplugin.DRAPlugin) {
	g.driver = driver
	close(g.opened)
}

// close refuses new calls, and returns when the running calls have ended. They have drainTimeout
// for that.
func (g *gate) close() {
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
func (g *gate) await(ctx context.Context) (_ context.Context, stop func(), err error) {
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

// pass is await for a call that close waits for. leave must be called.
func (g *gate) pass(ctx context.Context) (_ context.Context, leave func(), err error) {
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

// PrepareResourceClaims calls the method of the driver once the gate is open.
func (g *gate) PrepareResourceClaims(
	ctx context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	ctx, leave, err := g.pass(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return g.driver.PrepareResourceClaims(ctx, claims)
}

// UnprepareResourceClaims calls the method of the driver once the gate is open.
func (g *gate) UnprepareResourceClaims(
	ctx context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	ctx, leave, err := g.pass(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return g.driver.UnprepareResourceClaims(ctx, claims)
}

// WatchHealthStatus calls the method of the driver once the gate is open. close does not wait for
// it.
func (g *gate) WatchHealthStatus(
	ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport,
) error {
	ctx, stop, err := g.await(ctx)
	if err != nil {
		return nil // the kubelet is gone, or asks the other agent
	}
	defer stop()
	return g.driver.WatchHealthStatus(ctx, reports)
}

// HandleError calls the method of the driver. Errors before the gate is open concern only the
// registration, and are ignored.
func (g *gate) HandleError(ctx context.Context, err error, msg string) {
	select {
	case <-g.opened:
		g.driver.HandleError(ctx, err, msg)
	default:
	}
}
