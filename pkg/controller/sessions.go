// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// connection is what is known about the connection to an XPU's OPI agent.
type connection struct {
	agent   *opi.Session // nil unless connected
	health  opi.Health   // if it is not Known, an event will come
	refusal string       // why the XPU's configuration allows no session; empty if it does
	// the agent was compared during this connection and had no orphans
	clean bool
}

// lost reports whether the agent has not answered for the time Debounce, or cannot be reached with
// this configuration. An agent is not lost while nothing is known about it, for example just after
// the controller started.
func (c connection) lost() bool { return c.agent == nil && (c.health.Away || c.refusal != "") }

// change is a kind of change of an XPU's OPI agent.
type change int

const (
	connectionChanged change = iota // it came up or went down
	healthChanged                   // see [opi.Health]
)

// sessions holds a session with the OPI agent of each XPU, by the XPU's name, and enqueues requests
// when a session changes. Safe for concurrent use.
type sessions struct {
	Options
	metrics *metrics
	log     logr.Logger

	mu        sync.Mutex
	byXPU     map[string]*session
	listeners []func(xpu string, c change)
	running   sync.WaitGroup
	closed    bool
}

type session struct {
	*opi.Session // nil if there is a refusal
	fingerprint  [sha256.Size]byte
	stop         context.CancelFunc
	refusal      string // see connection
	clean        bool   // see connection
}

// Start closes every connection once the context ends.
func (s *sessions) Start(ctx context.Context) error {
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

// compared records whether a comparison found that the agent has no orphans.
func (s *sessions) compared(xpu string, agent *opi.Session, clean bool) {
	if s.setClean(xpu, agent, clean) {
		s.tell(xpu, healthChanged)
	}
}

// setClean sets connection.clean, unless the XPU has another session now. A nil session stands for
// any.
func (s *sessions) setClean(xpu string, agent *opi.Session, clean bool) (changed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	opened := s.byXPU[xpu]
	if opened == nil || agent != nil && opened.Session != agent || opened.clean == clean {
		return false
	}
	opened.clean = clean
	return true
}

// peers returns the other XPUs whose agents have the same address and port as this XPU's agent.
func (s *sessions) peers(xpu string) []string {
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

// open opens a session with the XPU's agent, or keeps the present one if its configuration has the
// same fingerprint.
func (s *sessions) open(xpu string, fingerprint [sha256.Size]byte, config opi.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.closed {
		return errors.New("the controller is shutting down")
	}
	if known := s.byXPU[xpu]; known != nil && known.fingerprint == fingerprint {
		return nil
	}

	log := s.log.WithValues("xpu", xpu)
	opened, err := opi.NewSession(config, opi.SessionOptions{
		Debounce: s.Debounce, CheckInterval: s.CheckInterval,
		CheckTimeout: s.AgentTimeout, Log: log,
		Connection: func(bool) {
			s.setClean(xpu, nil, false)
			s.tell(xpu, connectionChanged)
		},
		Changed: func() { s.tell(xpu, healthChanged) },
		Failed:  func(operation string, err error) { s.metrics.failed(xpu, operation, err) },
	})

	if err != nil {
		return err
	}

	s.end(xpu)
	ctx, stop := context.WithCancel(context.Background())
	s.byXPU[xpu] = &session{Session: opened, fingerprint: fingerprint, stop: stop}
	s.running.Go(func() {
		if err := opened.Run(ctx); err != nil {
			log.Error(err, "The session with the OPI agent ended")
		}
	})

	return nil
}

// refuse ends the session with the XPU's agent, if there is one. why says why the configuration
// allows no session.
func (s *sessions) refuse(xpu, why string) {
	s.mu.Lock()
	was := s.byXPU[xpu]
	s.end(xpu)
	s.byXPU[xpu] = &session{refusal: why, stop: func() {}}
	s.mu.Unlock()
	if was == nil || was.refusal != why {
		s.tell(xpu, connectionChanged)
	}
}

// forget ends the session of an XPU that is gone.
func (s *sessions) forget(xpu string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(xpu)
}

// end ends the session of an XPU. It needs the lock.
func (s *sessions) end(xpu string) {
	if ended := s.byXPU[xpu]; ended != nil {
		delete(s.byXPU, xpu)
		ended.stop()
	}
}

// tell calls the listeners for a change.
func (s *sessions) tell(xpu string, c change) {
	s.mu.Lock()
	listeners := s.listeners
	s.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu, c)
	}
}

// sourceOf returns a source that enqueues the requests of toRequests for an XPU after a change of
// this kind.
func sourceOf[R comparable](
	s *sessions, kind change, toRequests func(ctx context.Context, xpu string) []R,
) source.TypedSource[R] {
	return source.TypedFunc[R](func(
		ctx context.Context, queue workqueue.TypedRateLimitingInterface[R],
	) error {
		s.mu.Lock()
		defer s.mu.Unlock()

		s.listeners = append(s.listeners, func(xpu string, c change) {
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

// theXPU returns the request for the XPU itself.
func theXPU(_ context.Context, xpu string) []reconcile.Request {
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: xpu}}}
}

// connection returns what is known about the connection to the XPU's agent.
func (s *sessions) connection(xpu string) connection {
	s.mu.Lock()
	defer s.mu.Unlock()

	opened := s.byXPU[xpu]
	if opened == nil {
		return connection{}
	}
	if opened.Session == nil {
		return connection{health: opi.Health{Known: true}, refusal: opened.refusal}
	}

	conn := connection{health: opened.Health(), clean: opened.clean}
	if conn.health.Connected {
		conn.agent = opened.Session
	}

	return conn
}
