// SPDX-License-Identifier: Apache-2.0

// Package admin serves the administrators of a node over a unix socket that only root and the
// agent's own user may use. Administrators can read the state of the node, give up hooks, and
// release quarantined Functions.
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

// releaseTimeout limits how long an administrator waits for the release of a quarantined Function.
const releaseTimeout = 30 * time.Second

// verifyTimeout limits how long an administrator waits for a comparison with sriovnet.
const verifyTimeout = 40 * time.Second

// Records reads the attachments of a node. [journal.Journal] implements it.
type Records interface {
	All() []journal.Attachment
	DeadLetters() []journal.DeadLetter
}

// Server answers the requests of administrators. All fields must be set.
type Server struct {
	Socket string // path of the socket, in a directory that belongs to the agent alone
	Node   string

	Functions func() []function.Function // all Functions of the node, sorted
	Pools     func() (pools []pool.Pool, known bool)
	Problems  func(pool.Pool, function.Function) []function.Problem
	Card      func(pf pci.Address) function.Card
	Journal   Records
	// GiveUp makes a Function stop waiting for a hook.
	GiveUp func(ctx context.Context, id function.ID, hook string) error
	// Release tries the release of a quarantined Function again. With asItIs, it ends the
	// quarantine without another try. outcome is a sentence about the result.
	Release func(ctx context.Context, id function.ID, asItIs bool) (outcome string, err error)
	// Verification returns the last comparison of the Functions with what sriovnet says; nil if
	// there was none yet. Verify compares again.
	Verification func() *nodestate.Verification
	Verify       func(ctx context.Context) (*nodestate.Verification, error)
	Log          logr.Logger
}

// Run serves requests until ctx ends. It returns an error only if it cannot serve at all.
func (s *Server) Run(ctx context.Context) error {
	// The journal ensures that only one agent runs, so that no process uses an existing socket.
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
	mux.HandleFunc("GET "+nodestate.VerifyPath, s.verify)
	mux.HandleFunc("POST "+nodestate.ReleasePath, s.release)
	server := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute}
	defer context.AfterFunc(ctx, func() { server.Close() })()

	if err := server.Serve(checked{listener, s.Log}); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("socket for administrators: %w", err)
	}

	return nil
}

// checked is a listener that accepts only connections that [peer.Check] allows.
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

// verify answers with the state of the node after a new comparison.
func (s *Server) verify(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), verifyTimeout)
	defer cancel()

	if _, err := s.Verify(ctx); err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}

	s.state(w, r)
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

// releaseQuarantined releases a quarantined Function.
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
