package controller

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

// connection is what is known of the way to the OPI agent of an XPU.
type connection struct {
	state   connectivity
	agent   *opi.Session // nil unless connected
	health  opi.Health   // its zero value if there is no session
	refusal string       // why the XPU's configuration allows no session; empty if it does
}

// connectivity is whether an agent can be reached.
type connectivity int

const (
	unknown connectivity = iota // not known yet; an event will come
	connected
	disconnected
)

// change is what may be different about the OPI agent of an XPU.
type change int

const (
	cameUp        change = iota // the connection
	wentDown                    // the connection
	healthChanged               // see [opi.Health]
)

// sessions has a session with the OPI agent of each XPU, by the XPU's name, and tells reconcilers of changes. Safe for
// concurrent use.
type sessions struct {
	debounce, timeout time.Duration // see [opi.SessionOptions]
	metrics           *metrics
	log               logr.Logger

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
}

func newSessions(debounce, timeout time.Duration, m *metrics, log logr.Logger) *sessions {
	return &sessions{debounce: debounce, timeout: timeout, metrics: m, log: log, byXPU: map[string]*session{}}
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

// open has a session with the XPU's agent with this configuration. The fingerprint stands for everything in it: while
// it stays the same the session stays.
func (s *sessions) open(xpu string, fingerprint [sha256.Size]byte, config opi.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("the controller is shutting down")
	}
	if opened := s.byXPU[xpu]; opened != nil && opened.fingerprint == fingerprint {
		return nil
	}
	ctx, stop := context.WithCancel(context.Background())
	opened := &session{fingerprint: fingerprint, stop: stop}
	log := s.log.WithValues("xpu", xpu)
	var err error
	opened.Session, err = opi.NewSession(config, opi.SessionOptions{
		Debounce: s.debounce, CheckTimeout: s.timeout, Log: log,
		Connection: func(up bool) {
			c := wentDown
			if up {
				c = cameUp
			}
			if s.current(xpu, opened) {
				s.tell(xpu, c)
			}
		},
		Changed: func() { s.tell(xpu, healthChanged) },
		Failed:  func(operation string, err error) { s.metrics.failed(xpu, operation, err) },
	})
	if err != nil {
		stop()
		return err
	}
	s.end(xpu)
	s.byXPU[xpu] = opened
	s.running.Go(func() {
		if err := opened.Run(ctx); err != nil {
			log.Error(err, "The session with the OPI agent ended")
		}
	})
	return nil
}

// refuse ends the session with the XPU's agent, if there is one, and tells the reconcilers that there is none.
func (s *sessions) refuse(xpu, why string) {
	s.mu.Lock()
	was := s.byXPU[xpu]
	s.end(xpu)
	s.byXPU[xpu] = &session{refusal: why, stop: func() {}}
	s.mu.Unlock()
	if was == nil || was.refusal != why {
		s.tell(xpu, wentDown)
	}
}

// forget ends the session with the agent of an XPU that is gone.
func (s *sessions) forget(xpu string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(xpu)
}

// end needs the lock.
func (s *sessions) end(xpu string) {
	if ended := s.byXPU[xpu]; ended != nil {
		delete(s.byXPU, xpu)
		ended.stop()
	}
}

func (s *sessions) current(xpu string, opened *session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byXPU[xpu] == opened
}

// tell has the reconcilers look at what depends on the XPU.
func (s *sessions) tell(xpu string, c change) {
	s.mu.Lock()
	listeners := s.listeners
	s.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu, c)
	}
}

// source enqueues requests when the OPI agent of an XPU changes.
func (s *sessions) source(requests func(ctx context.Context, xpu string, c change) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.listeners = append(s.listeners, func(xpu string, c change) {
			for _, request := range requests(ctx, xpu, c) {
				queue.Add(request)
			}
		})
		return nil
	})
}

// sourceOf enqueues a request for an XPU at this change of its OPI agent.
func (s *sessions) sourceOf(wanted change) source.Source {
	return s.source(func(_ context.Context, xpu string, c change) []reconcile.Request {
		if c != wanted {
			return nil
		}
		return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: xpu}}}
	})
}

// connection says what is known of the way to the XPU's agent.
func (s *sessions) connection(xpu string) connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	opened := s.byXPU[xpu]
	if opened == nil {
		return connection{}
	}
	if opened.Session == nil {
		return connection{state: disconnected, refusal: opened.refusal}
	}
	way := connection{health: opened.Health()}
	switch {
	case way.health.Connected:
		way.state, way.agent = connected, opened.Session
	case way.health.Known:
		way.state = disconnected
	}
	return way
}
