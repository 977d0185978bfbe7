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

// drainTimeout is how long calls that run may go on when a gate closes. Then the kubelet asks the
// agent that has the node by then.
const drainTimeout = 2 * time.Second

var (
	errStarting = errors.New("this agent has not begun to work yet")
	errClosed   = errors.New("this agent ends, or another one has the node; the kubelet asks again")
)

// Gate lets the kubelet know the driver before the agent can work: calls wait until [Gate.Open].
// The kubelet fails a call for which there is no driver, and repeats it much later. A Gate
// implements [kubeletplugin.DRAPlugin].
type Gate struct {
	opened chan struct{}
	driver *Driver // set when opened is closed

	ended context.Context // of the calls; ends when Close has waited long enough
	end   context.CancelCauseFunc

	mutex  sync.Mutex
	closed bool
	calls  sync.WaitGroup
}

// NewGate makes a gate that is not open.
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

// Close refuses new calls, and returns when those that run have ended, for which it gives them 2 s.
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
// closed; stop must be called.
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

// PrepareResourceClaims is [Driver.PrepareResourceClaims].
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

// UnprepareResourceClaims is [Driver.UnprepareResourceClaims].
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

// WatchHealthStatus is [Driver.WatchHealthStatus]. Close does not wait for it.
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

// HandleError is [Driver.HandleError]. What goes wrong before the gate is open concerns the
// registration only.
func (g *Gate) HandleError(ctx context.Context, err error, msg string) {
	select {
	case <-g.opened:
		g.driver.HandleError(ctx, err, msg)
	default:
	}
}
