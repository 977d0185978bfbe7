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

// registerPatience is how long an agent that replaces another one waits for the kubelet to know it,
// before it asks for the node.
const registerPatience = 5 * time.Second

// queuePatience is how long requests of the CNI plugin wait for the pools after the node was handed
// over.
const queuePatience = 5 * time.Second

// errSucceeded ends the work of an agent when another one has asked for the node.
var errSucceeded = errors.New("another agent has the node")

// handoverSocket is where the agent that has the node is asked for it.
func (a *agent) handoverSocket() string { return filepath.Join(a.config.StateDir, "handover.sock") }

// takeOver asks the agent that has the node for it, and returns once that one has ended its work;
// nil if there is none, or if it does not hand over, so that its end must be waited for.
func (a *agent) takeOver(ctx context.Context) (*handover.Predecessor, error) {
	a.setReadiness(func() error {
		return errors.New("does not have the node yet: another agent has it, and was asked to " +
			"hand over")
	})

	p, err := handover.Dial(ctx, a.handoverSocket())
	if err == nil && p != nil {
		if a.front != nil {
			a.front.awaitRegistered(ctx, cmp.Or(a.config.times.register, registerPatience))
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

// waitForTheOther makes this agent ready: it can do no more before the other one ends, which a
// rolling update ends only when this one is ready.
func (a *agent) waitForTheOther() { a.setReadiness(func() error { return nil }) }

// awaitSuccessor waits for another agent that asks for the node. Then it ends this one's work by
// errSucceeded.
func (a *agent) awaitSuccessor(ctx context.Context, successor **handover.Successor) error {
	found, err := handover.Holder{
		Socket: a.handoverSocket(), Log: a.log.WithName("handover"),
	}.Await(ctx)
	if err != nil || found == nil {
		return err
	}

	// else a rolling update would end it before the successor is ready
	a.setReadiness(func() error { return nil })
	a.succeeded.Store(true)
	a.plugins.StandAside()
	*successor = found

	return errSucceeded
}

// followPredecessor waits until the process of the predecessor has ended. Kubelets before 1.37 then
// take the endpoints of its resources for gone that this agent registered meanwhile.
func (a *agent) followPredecessor(ctx context.Context) error {
	if a.predecessor != nil {
		a.predecessor.AwaitEnd(ctx)
		a.plugins.Reconnect(ctx)
	}
	return nil
}

// standAside gives the node to the successor, and passes on what the kubelet still asks this agent
// for, until ctx ends. It returns an error when the successor is gone before.
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

// inheritedSocket is the listening socket of the CNI plugin that the predecessor gave; nil without
// one.
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

// serveCNI serves the CNI plugin. Requests in the queue of a socket that was handed over wait there
// until the pools are known, without which an ADD fails; for a while only, as DELs need no API
// server.
func (a *agent) serveCNI(ctx context.Context) error {
	if a.cni.Inherited != nil {
		patience, cancel := context.WithTimeout(ctx, queuePatience)
		_ = loop.Until(patience, a.outputs.Subscribe, func() bool { return a.poolsKnown() == nil })
		cancel()
	}
	return a.cni.Run(ctx)
}

// failure returns why other has ended, or nil when ctx ends.
func failure(ctx, other context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-other.Done():
		return context.Cause(other)
	}
}

// setReadiness replaces what says whether the agent is ready.
func (a *agent) setReadiness(ready func() error) { a.readiness.Store(&ready) }

// serveReadiness answers whether this agent is ready, at a socket of its own, until closed is
// called: two agents that replace each other share a port.
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

// answerReady says by HTTP whether something is ready.
func answerReady(ready func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	}
}
