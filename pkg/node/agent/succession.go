// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/handover"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// registerPatience is how long a successor waits for the kubelet to register it before it asks for
// the node.
const registerPatience = 5 * time.Second

// queuePatience is how long requests of the CNI plugin wait for the pools after the node was handed
// over.
const queuePatience = 5 * time.Second

// errSucceeded ends the work of an agent when a successor has asked for the node.
var errSucceeded = errors.New("another agent has the node")

// handoverSocket returns the path of the socket at which the running agent can be asked for the
// node.
func (a *agent) handoverSocket() string { return filepath.Join(a.config.StateDir, "handover.sock") }

// takeOver asks the running agent for the node, and returns the predecessor once it has ended its
// work. It returns nil if there is no other agent, or if the other agent does not support
// handovers, so that this agent has to wait for its end.
func (a *agent) takeOver(ctx context.Context) (*handover.Predecessor, error) {
	a.setReadiness(func() error {
		return errors.New("does not have the node yet: another agent has it, and was asked to " +
			"hand over")
	})

	p, err := handover.Dial(ctx, a.handoverSocket())
	if err == nil && p != nil {
		if a.draPlugin != nil {
			a.draPlugin.awaitRegistered(ctx, cmp.Or(a.config.times.register, registerPatience))
		}
		begin := time.Now()
		if err = p.Take(ctx, version.String()); err == nil {
			a.log.Info("Another agent has handed the node over", "took", time.Since(begin).String())
			return p, nil
		}
	}

	if err != nil && ctx.Err() == nil {
		a.log.Error(err, "The agent that has the node does not hand over; waiting for its end")
	}

	return nil, ctx.Err()
}

// readyToWait makes this agent ready while it waits for the other agent to end, because a rolling
// update does not end the other agent before this one is ready.
func (a *agent) readyToWait() { a.setReadiness(func() error { return nil }) }

// awaitSuccessor waits for a successor that asks for the node. Then it ends the work of this agent
// by errSucceeded.
func (a *agent) awaitSuccessor(ctx context.Context, successor **handover.Successor) error {
	found, err := handover.Holder{
		Socket: a.handoverSocket(), Log: a.log.WithName("handover"),
	}.Await(ctx)
	if err != nil || found == nil {
		return err
	}

	// A rolling update would end this agent if it were not ready before the successor is.
	a.setReadiness(func() error { return nil })
	a.succeeded.Store(true)
	a.plugins.StandAside()
	*successor = found

	return errSucceeded
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
func (a *agent) standAside(ctx context.Context, successor *handover.Successor) error {
	defer successor.Close()
	var files []*os.File
	if socket := a.cni.Socket(); socket != nil {
		defer socket.Close()
		files = append(files, socket)
	}
	if err := successor.Give(files...); err != nil {
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

// inheritedSocket returns the listening socket of the CNI plugin that the predecessor gave; nil if
// it gave none.
func (a *agent) inheritedSocket() (*net.UnixListener, error) {
	if a.predecessor == nil || len(a.predecessor.Files) == 0 {
		return nil, nil
	}

	file := a.predecessor.Files[0]
	defer file.Close()

	listener, err := net.FileListener(file)
	if err != nil {
		return nil, fmt.Errorf("CNI socket that was handed over: %w", err)
	}

	socket, ok := listener.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("CNI socket that was handed over: is a %T", listener),
			listener.Close())
	}

	return socket, nil
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

// setReadiness replaces the function that returns why the agent is not ready.
func (a *agent) setReadiness(ready func() error) { a.readiness.Store(&ready) }

// serveReadiness serves the readiness of this agent at a socket of its own, until closed is called.
// Two agents that replace each other share a port, so that the port cannot be used for this.
func (a *agent) serveReadiness(ctx context.Context) (closed func(), err error) {
	a.setReadiness(func() error { return errors.New("is starting") })
	if a.config.ReadySocket == "" {
		return func() {}, nil
	}
	if err := os.Remove(a.config.ReadySocket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("--ready-socket: %w", err)
	}

	listener, err := new(net.ListenConfig).Listen(ctx, "unix", a.config.ReadySocket)
	if err != nil {
		return nil, fmt.Errorf("--ready-socket: %w", err)
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET "+nodestate.ReadyPath, answerReady(func() error {
		return (*a.readiness.Load())()
	}))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = server.Serve(listener) }() // until it is closed

	return func() { server.Close() }, nil
}

// answerReady returns a handler that reports by HTTP whether the agent is ready.
func answerReady(ready func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	}
}
