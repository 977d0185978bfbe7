package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// connection is how the OPI agent of an XPU can be asked.
type connection struct {
	agent *opi.Session // nil unless connected
	state connectivity
	why   string // the XPU's configuration allows no session; empty if it does
}

// connectivity is whether an agent can be reached.
type connectivity int

const (
	unknown connectivity = iota // not known yet; an event will come
	connected
	disconnected
)

// sessions has a session with the OPI agent of each XPU, by the XPU's name, and tells reconcilers when a connection comes
// or goes. Safe for concurrent use.
type sessions struct {
	debounce, timeout time.Duration // see [opi.SessionOptions]
	metrics           *metrics
	log               logr.Logger

	mu           sync.Mutex
	byXPU        map[string]*session
	refused      map[string]string // why, by XPU: those whose configuration allows no session
	onConnection []func(xpu string, up bool)
	onHealth     []func(xpu string)
	running      sync.WaitGroup
	closed       bool
}

type session struct {
	*opi.Session
	fingerprint string
	stop        context.CancelFunc
}

func newSessions(debounce, timeout time.Duration, m *metrics, log logr.Logger) *sessions {
	return &sessions{
		debounce: debounce, timeout: timeout, metrics: m, log: log, byXPU: map[string]*session{}, refused: map[string]string{},
	}
}

// Start closes every connection once the context ends.
func (s *sessions) Start(ctx context.Context) error {
	<-ctx.Done()
	s.mu.Lock()
	s.closed = true
	for _, xpu := range slices.Collect(maps.Keys(s.byXPU)) {
		s.end(xpu)
	}
	s.mu.Unlock()
	s.running.Wait()
	return nil
}

// open has a session with the XPU's agent with this configuration. The fingerprint stands for everything in it: while
// it stays the same the session stays.
func (s *sessions) open(xpu, fingerprint string, config opi.Config) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errors.New("the controller is shutting down")
	}
	if opened := s.byXPU[xpu]; opened != nil && opened.fingerprint == fingerprint {
		return nil
	}
	s.end(xpu)
	opened := &session{fingerprint: fingerprint}
	log := s.log.WithValues("xpu", xpu)
	var err error
	opened.Session, err = opi.NewSession(config, opi.SessionOptions{
		Debounce: s.debounce, CheckTimeout: s.timeout, Log: log,
		Connection: func(up bool) {
			if s.current(xpu, opened) {
				s.tell(xpu, up)
			}
		},
		Changed: func() { s.tellHealth(xpu) },
		Failed:  func(operation string, err error) { s.metrics.failed(xpu, operation, err) },
	})
	if err != nil {
		return err
	}
	var ctx context.Context
	ctx, opened.stop = context.WithCancel(context.Background())
	s.byXPU[xpu] = opened
	delete(s.refused, xpu)
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
	known := s.refused[xpu] == why
	s.end(xpu)
	s.refused[xpu] = why
	s.mu.Unlock()
	if !known {
		s.tell(xpu, false)
	}
}

// forget ends the session with the agent of an XPU that is gone.
func (s *sessions) forget(xpu string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(xpu)
	delete(s.refused, xpu)
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
func (s *sessions) tell(xpu string, up bool) {
	s.mu.Lock()
	listeners := s.onConnection
	s.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu, up)
	}
}

// tellHealth has the XPU's status looked at.
func (s *sessions) tellHealth(xpu string) {
	s.mu.Lock()
	listeners := s.onHealth
	s.mu.Unlock()
	for _, listen := range listeners {
		listen(xpu)
	}
}

// connection says how the XPU's agent can be asked.
func (s *sessions) connection(xpu string) connection {
	s.mu.Lock()
	defer s.mu.Unlock()
	if why := s.refused[xpu]; why != "" {
		return connection{state: disconnected, why: why}
	}
	opened := s.byXPU[xpu]
	if opened == nil {
		return connection{}
	}
	switch health := opened.Health(); {
	case health.Connected:
		return connection{agent: opened.Session, state: connected}
	case health.Known:
		return connection{state: disconnected}
	}
	return connection{}
}

// health is what is known of the XPU's agent, its zero value if there is no session.
func (s *sessions) health(xpu string) opi.Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	if opened := s.byXPU[xpu]; opened != nil {
		return opened.Health()
	}
	return opi.Health{}
}

// connections enqueues requests when the connection to an XPU's agent comes up or goes down.
func (s *sessions) connections(requests func(ctx context.Context, xpu string, up bool) []reconcile.Request) source.Source {
	return source.Func(func(ctx context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.onConnection = append(s.onConnection, func(xpu string, up bool) {
			for _, request := range requests(ctx, xpu, up) {
				queue.Add(request)
			}
		})
		return nil
	})
}

// healths enqueues a request for an XPU when something else is known of its agent.
func (s *sessions) healths() source.Source {
	return source.Func(func(_ context.Context, queue workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.onHealth = append(s.onHealth, func(xpu string) {
			queue.Add(reconcile.Request{NamespacedName: types.NamespacedName{Name: xpu}})
		})
		return nil
	})
}
