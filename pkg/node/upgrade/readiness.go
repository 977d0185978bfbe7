// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// Readiness serves whether this agent is ready, at a socket of its own. Two agents that replace
// each other share a port, so that the port cannot be used for this. A rolling update ends the
// predecessor if the predecessor is not ready, or if the successor is.
type Readiness struct {
	// reason returns why the agent is not ready.
	reason atomic.Pointer[func() error]
	server http.Server
}

// ServeReadiness serves the readiness of an agent that is starting, until Close is called. If the
// path of the socket is "", nothing is served.
func ServeReadiness(ctx context.Context, socket string) (*Readiness, error) {
	r := &Readiness{}
	r.Set(func() error { return errors.New("is starting") })
	if socket == "" {
		return r, nil
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}

	listener, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}

	mux := http.NewServeMux()
	mux.Handle("GET "+nodestate.ReadyPath, monitoring.ReadyHandler(func() error {
		return (*r.reason.Load())()
	}))

	r.server.Handler, r.server.ReadHeaderTimeout = mux, 5*time.Second
	go func() { _ = r.server.Serve(listener) }() // until it is closed

	return r, nil
}

// Set replaces the function that returns why the agent is not ready, or nil if it is ready.
func (r *Readiness) Set(reason func() error) { r.reason.Store(&reason) }

// SetReady makes the agent ready whatever it does, because the upgrade would not go on otherwise.
func (r *Readiness) SetReady() { r.Set(func() error { return nil }) }

// Close ends the server.
func (r *Readiness) Close() error { return r.server.Close() }
