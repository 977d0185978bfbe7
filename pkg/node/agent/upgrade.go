// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
)

// queuePatience is how long requests of the CNI plugin wait for the pools after the node was handed
// over.
const queuePatience = 5 * time.Second

// awaitSuccessor waits for a successor that asks for the node. Then it ends the work of this agent
// by [upgrade.ErrSucceeded].
func (a *agent) awaitSuccessor(ctx context.Context, successor **upgrade.Successor) error {
	found, err := upgrade.AwaitSuccessor(ctx, upgrade.Socket(a.config.StateDir),
		a.log.WithName("handover"))
	if err != nil || found == nil {
		return err
	}

	// A rolling update would end this agent if it were not ready before the successor is.
	a.readiness.SetReady()
	a.succeeded.Store(true)
	a.plugins.StandAside()
	*successor = found

	return upgrade.ErrSucceeded
}

// followPredecessor waits until the process of the predecessor has ended. Kubelets before 1.37 then
// consider the endpoints gone that this agent has registered for the same resources.
func (a *agent) followPredecessor(ctx context.Context) error {
	if a.predecessor != nil {
		a.predecessor.AwaitEnd(ctx)
		a.plugins.Reconnect(ctx)
	}
	return nil
}

// standAside gives the node to the successor, and forwards calls of the kubelet to it until ctx
// ends. It returns an error if the successor ends first.
func (a *agent) standAside(ctx context.Context, successor *upgrade.Successor) error {
	defer successor.Close()
	socket := a.cni.Socket()
	defer socket.Close() // does nothing if there is no socket
	if err := successor.Give(socket); err != nil {
		return err
	}

	a.log.Info("Another agent has the node; this one waits for its end")
	successor.AwaitEnd(ctx)
	var err error
	if ctx.Err() == nil {
		err = errors.New("the agent that took the node over is gone; starting again")
	}

	a.stopLingering()
	return errors.Join(err, a.lingering.Wait())
}

// serveCNI serves the CNI plugin. Requests in the queue of a socket that was handed over wait until
// the pools are known, because an ADD would fail without them. They wait only for a while, because
// DELs need no API server.
func (a *agent) serveCNI(ctx context.Context) error {
	if a.cni.Inherited != nil {
		patience, cancel := context.WithTimeout(ctx, queuePatience)
		_ = loop.Until(patience, a.outputs.Subscribe, func() bool { return a.poolsKnown() == nil })
		cancel()
	}
	return a.cni.Run(ctx)
}

// causeOf returns why other has ended, or nil when ctx ends.
func causeOf(ctx, other context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-other.Done():
		return context.Cause(other)
	}
}
