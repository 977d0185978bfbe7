// SPDX-License-Identifier: Apache-2.0

// Package admin answers the administrators of a node, over a unix socket that only root and the
// agent's own user may use: what is on the node, which hooks are to be given up, and which
// Functions are to be freed that are quarantined.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// releaseTimeout is how long a quarantined Function may take to come back while an administrator
// waits.
const releaseTimeout = 30 * time.Second

// Records are the methods of a [journal.Journal] that tell who has which Function.
type Records interface {
	All() []journal.Attachment
	DeadLetters() []journal.DeadLetter
}

// Server answers requests. All fields must be set.
type Server struct {
	Socket string // of which the directory must be the agent's own
	Node   string

	Functions func() []function.Function // of the node, sorted
	Pools     func() (pools []pool.Pool, known bool)
	Problems  func(pool.Pool, function.Function) []function.Problem
	Card      func(pf pci.Address) function.Card
	Journal   Records
	// GiveUp gives up the hook that a Function waits for.
	GiveUp func(ctx context.Context, id function.ID, hook string) error
	// Release tries a quarantined Function again, or lets it go as it is, and says in words what
	// became of it.
	Release func(ctx context.Context, id function.ID, asItIs bool) (outcome string, err error)
	Log     logr.Logger
}

// Run answers until ctx ends. It returns an error only if it cannot answer at all.
func (s *Server) Run(ctx context.Context) error {
	// The journal lets one agent run, so nobody uses a socket that is there.
	if err := os.Remove(s.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket for administrators: %w", err)
	}

	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: s.Socket, Net: "unix"})
	if err != nil {
		return fmt.Errorf("socket for administrators: %w", err)
	}
	if err := os.Chmod(s.Socket, 0o600); err != nil {
		listener.Close()
		return fmt.Errorf("socket for administrators: %w", err)
	}

	mux := http.NewServeMux()
	mux.HandleFunc("GET "+nodestate.StatePath, s.state)
	mux.HandleFunc("POST "+nodestate.ReleasePath, s.release)
	server := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { server.Close() })()

	if err := server.Serve(checked{listener, s.Log}); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("socket for administrators: %w", err)
	}

	return nil
}

// checked is a listener for those that [peer.Check] lets in.
type checked struct {
	*net.UnixListener
	log logr.Logger
}

func (l checked) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}

		if err := peer.Check(conn); err != nil {
			l.log.Error(err, "Connection to the socket for administrators refused")
			conn.Close()
			continue
		}

		return conn, nil
	}
}

func (s *Server) state(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(s.State()); err != nil {
		s.Log.V(1).Info("An administrator did not wait for the state of the node", "error",
			err.Error())
	}
}

func (s *Server) release(w http.ResponseWriter, r *http.Request) {
	var wanted nodestate.Release
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&wanted); err != nil {
		http.Error(w, "request: "+err.Error(), http.StatusBadRequest)
		return
	}
	if wanted.Hook == "" {
		s.releaseQuarantined(w, r, wanted)
		return
	}

	if wanted.Hook == nodestate.PortHook && !wanted.PortGone {
		http.Error(w,
			fmt.Sprintf("Function %s: the xPU may still serve its Port, and its next owner would "+
				"share it: make sure that it does "+
				"not, and say so by --port-gone", wanted.Function), http.StatusConflict)
		return
	}

	if err := s.GiveUp(r.Context(), wanted.Function, wanted.Hook); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}

	s.Log.Info("An administrator gave a post-delete hook up", "function", wanted.Function.String(),
		"hook", wanted.Hook)
	fmt.Fprintf(w, "Function %s: hook %s is given up\n", wanted.Function, wanted.Hook)
}

// releaseQuarantined ends a quarantine.
func (s *Server) releaseQuarantined(
	w http.ResponseWriter, r *http.Request, wanted nodestate.Release,
) {
	ctx, cancel := context.WithTimeout(r.Context(), releaseTimeout)
	defer cancel()

	outcome, err := s.Release(ctx, wanted.Function, wanted.AsItIs)
	if err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}

	s.Log.Info("An administrator had a quarantined Function released", "function",
		wanted.Function.String(), "outcome", outcome)
	fmt.Fprintf(w, "Function %s: %s\n", wanted.Function, outcome)
}
