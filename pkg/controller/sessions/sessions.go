// SPDX-License-Identifier: Apache-2.0

package sessions

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Connection is what is known about the connection to an XPU's OPI agent.
type Connection struct {
	Agent   *opi.Session // nil unless connected
	Health  opi.Health   // if it is not Known, an event will come
	Refusal string       // why the XPU's configuration allows no session; empty if it does
	// the agent was compared during this connection and had no orphans
	Clean bool
}

// Lost reports whether the agent has not answered for the time Debounce, or cannot be reached with
// this configuration. An agent is not lost while nothing is known about it, for example just after
// the controller started.
func (c Connection) Lost() bool { return c.Agent == nil && (c.Health.Away || c.Refusal != "") }

// Change is a kind of change of an XPU's OPI agent.
type Change int

const (
	ConnectionChanged Change = iota // it came up or went down
	HealthChanged                   // see [opi.Health]
)

// Options configure the sessions.
type Options struct {
	// Debounce is how long an OPI agent may be away before it counts as lost.
	Debounce time.Duration
	// CheckInterval and CheckTimeout are the options of [opi.SessionOptions] with these names.
	CheckInterval, CheckTimeout time.Duration
	// Failed is called for each operation on an XPU's agent that failed, as long as the XPU has the
	// session.
	Failed func(xpu, operation string, err error)
	Log    logr.Logger
}

// Sessions holds a session with the OPI agent of each XPU, by the XPU's name, and enqueues requests
// when a session changes. Safe for concurrent use.
type Sessions struct {
	options Options

	mu        sync.Mutex
	byXPU     map[string]*session
	listeners []func(xpu string, c Change)
	running   sync.WaitGroup
	closed    bool
}

type session struct {
	*opi.Session // nil if there is a refusal
	fingerprint  [sha256.Size]byte
	stop         context.CancelFunc
	refusal      string // see [Connection]
	clean        bool   // see [Connection]
}

// New returns sessions that a manager must start. There are no sessions yet.
func New(o Options) *Sessions { return &Sessions{options: o, byXPU: map[string]*session{}} }

// Start closes every connection once the context ends.
func (s *Sessions) Start(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	for xpu := range s.byXPU {
		s.end(xpu)
	}

	s.mu.Unlock()
	s.running.Wait()

	return nil
}

// Compared records whether a comparison found that the agent has no orphans.
func (s *Sessions) Compared(xpu string, agent *opi.Session, clean bool) {
	if s.setClean(xpu, agent, clean) {
		s.Notify(xpu, HealthChanged)
	}
}

// setClean sets Connection.Clean, unless the XPU has another session now. A nil session stands for
// any.
func (s *Sessions) setClean(xpu string, agent *opi.Session, clean bool) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	opened := s.byXPU[xpu]
	if opened == nil || agent != nil && opened.Session != agent || opened.clean == clean {
		return false
	}
	opened.clean = clean
	return true
}

// Peers returns the other XPUs whose agents have the same address and port as this XPU's agent.
func (s *Sessions) Peers(xpu string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()

	own := s.byXPU[xpu]
	if own == nil || own.Session == nil || own.Peer() == "" {
		return nil
	}

	var found []string
	for name, other := range s.byXPU {
		if name != xpu && other.Session != nil && other.Peer() == own.Peer() {
			found = append(found, name)
		}
	}

	return found
}

// Open opens a session with the XPU's agent, or keeps the present one if its configuration has the
// same fingerprint. opened reports whether the session is new.
func (s *Sessions) Open(
	xpu string, fingerprint [sha256.Size]byte, config opi.Config,
) (opened bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.closed {
		return false, errors.New("the controller is shutting down")
	}
	if known := s.byXPU[xpu]; known != nil && known.fingerprint == fingerprint {
		return false, nil
	}

	log := s.options.Log.WithValues("xpu", xpu)
	var made *opi.Session
	made, err = opi.NewSession(config, opi.SessionOptions{
		Debounce: s.options.Debounce, CheckInterval: s.options.CheckInterval,
		CheckTimeout: s.options.CheckTimeout, Log: log,
		Connection: func(bool) {
			s.setClean(xpu, nil, false)
			s.Notify(xpu, ConnectionChanged)
		},
		Changed: func() { s.Notify(xpu, HealthChanged) },
		Failed: func(operation string, err error) {
			if s.isCurrent(xpu, made) {
				s.options.Failed(xpu, operation, err)
			}
		},
	})
	if err != nil {
		return false, err
	}

	s.end(xpu)
	ctx, stop := context.WithCancel(context.Background())
	s.byXPU[xpu] = &session{Session: made, fingerprint: fingerprint, stop: stop}
	s.running.Go(func() {
		if err := made.Run(ctx); err != nil {
			log.Error(err, "The session with the OPI agent ended")
		}
	})

	return true, nil
}

// isCurrent reports whether this is the XPU's session. Calls that are under way when a session ends
// fail, also after the metrics of an XPU that is gone were forgotten.
func (s *Sessions) isCurrent(xpu string, one *opi.Session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	known := s.byXPU[xpu]
	return known != nil && known.Session == one
}

// Refuse ends the session with the XPU's agent, if there is one. why says why the configuration
// allows no session.
func (s *Sessions) Refuse(xpu, why string) {
	s.mu.Lock()
	was := s.byXPU[xpu]
	s.end(xpu)
	s.byXPU[xpu] = &session{refusal: why, stop: func() {}}
	s.mu.Unlock()
	if was == nil || was.refusal != why {
		s.Notify(xpu, ConnectionChanged)
	}
}

// Forget ends the session of an XPU that is gone.
func (s *Sessions) Forget(xpu string) {
	s.mu.Lock()
	_, was := s.byXPU[xpu]
	s.end(xpu)
	s.mu.Unlock()
	if was {
		s.Notify(xpu, ConnectionChanged)
	}
}

// end ends the session of an XPU. It needs the lock.
func (s *Sessions) end(xpu string) {
	if ended := s.byXPU[xpu]; ended != nil {
		delete(s.byXPU, xpu)
		ended.stop()
	}
}

// Notify calls the listeners for a change.
func (s *Sessions) Notify(xpu string, c Change) {
	s.mu.Lock()
	listeners := s.listeners
	s.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu, c)
	}
}

// Source returns a source that enqueues the requests of toRequests for an XPU after a change of
// this kind.
func Source[R comparable](
	s *Sessions, kind Change, toRequests func(ctx context.Context, xpu string) []R,
) source.TypedSource[R] {
	return source.TypedFunc[R](func(
		ctx context.Context, queue workqueue.TypedRateLimitingInterface[R],
	) error {
		s.mu.Lock()
		defer s.mu.Unlock()

		s.listeners = append(s.listeners, func(xpu string, c Change) {
			if c != kind {
				return
			}
			for _, request := range toRequests(ctx, xpu) {
				queue.Add(request)
			}
		})

		return nil
	})
}

// RequestFor returns the request for the XPU itself, as [Source] wants it.
func RequestFor(_ context.Context, xpu string) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: xpu}}}
}

// Connection returns what is known about the connection to the XPU's agent.
func (s *Sessions) Connection(xpu string) Connection {
	s.mu.Lock()
	defer s.mu.Unlock()

	opened := s.byXPU[xpu]
	if opened == nil {
		return Connection{}
	}
	if opened.Session == nil {
		return Connection{Health: opi.Health{Known: true}, Refusal: opened.refusal}
	}

	conn := Connection{Health: opened.Health(), Clean: opened.clean}
	if conn.Health.Connected {
		conn.Agent = opened.Session
	}

	return conn
}
