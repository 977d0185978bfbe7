package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// Times of a server's registration.
const (
	// firstRetry and lastRetry bound the times between attempts that failed.
	firstRetry, lastRetry = 100 * time.Millisecond, 30 * time.Second
	// unwatchedFor is how long a server goes without a kubelet that watches it before it registers anew. A kubelet that starts
	// again comes by itself, but one that only lost its stream never does. Doubled each time that nobody came, up to
	// unwatchedAtMost.
	unwatchedFor, unwatchedAtMost = 10 * time.Second, 10 * time.Minute
	// stopTimeout is what the kubelet gets to hear the last of a server, and calls that are under way to end.
	stopTimeout = time.Second
)

// server serves one resource, at one endpoint after another.
type server struct {
	manager     *Manager
	directories *directories
	resource    string
	metrics     resourceMetrics
	log         logr.Logger
	// watching is told when a stream came or the last one went, and after each registration.
	watching chan struct{}

	mutex   sync.Mutex
	offer   *offer
	renewed chan struct{} // closed when offer is replaced
	refusal string        // why the kubelet refused the resource last, "" if it did not
	// endpoint is the one that the kubelet shall use; nil before the first.
	endpoint *endpoint
	streams  int // of that endpoint
}

func newServer(m *Manager, d *directories, resource string, p pool.Pool) *server {
	s := &server{
		manager: m, directories: d, resource: resource, metrics: m.Metrics.of(resource),
		log:      m.Log.WithValues("resource", resource),
		watching: make(chan struct{}, 1),
		offer:    &offer{}, renewed: make(chan struct{}),
	}
	s.update(p)
	return s
}

// update has the kubelet see the pool as it is and its Functions' health.
func (s *server) update(p pool.Pool) {
	next := newOffer(p, s.manager.Health)
	if err := s.writeCDI(next); err != nil {
		s.log.Error(err, "Containers that are made again after a reboot may lack device nodes until this is repaired")
	}
	s.metrics.healthy.Set(float64(len(next.devices) - len(next.problems)))
	s.metrics.unhealthy.Set(float64(len(next.problems)))
	s.mutex.Lock()
	before := s.offer
	s.offer = next
	close(s.renewed)
	s.renewed = make(chan struct{})
	s.mutex.Unlock()
	next.report(before, s.log)
}

// empty has the kubelet see that the resource has no Functions any more. Pods keep what they have, so the files for
// their containers stay.
func (s *server) empty() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.offer = &offer{pool: s.offer.pool}
	close(s.renewed)
	s.renewed = make(chan struct{})
}

// current is the offer, and a channel that is closed when there is another one.
func (s *server) current() (*offer, <-chan struct{}) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.offer, s.renewed
}

// run keeps the server known to the kubelet until ctx ends, whatever happens to the kubelet and to sockets.
func (s *server) run(ctx context.Context) {
	changed := s.directories.changed.Subscribe(ctx)
	presence := &registration{server: s}
	defer presence.end()
	patience := cmp.Or(s.manager.unwatchedFor, unwatchedFor)
	pauses, alone := loop.Backoff(firstRetry, lastRetry), patience
	var again, loneliness <-chan time.Time
	for {
		again = nil
		if err := presence.ensure(); err != nil && ctx.Err() == nil {
			s.metrics.notRegistered.Inc()
			pause := pauses.Step()
			s.log.Error(err, "Not registered with the kubelet", "retry", pause.String())
			again = time.After(pause)
		} else {
			pauses = loop.Backoff(firstRetry, lastRetry)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-changed:
			pauses = loop.Backoff(firstRetry, lastRetry)
		case <-s.watching:
			if loneliness = nil; s.watched() {
				alone = patience
			} else {
				loneliness = time.After(alone)
			}
		case <-loneliness:
			loneliness = nil
			if !s.watched() {
				presence.forgotten = true
				alone = min(2*alone, unwatchedAtMost)
			}
		}
	}
}

// watched says whether a kubelet has a stream.
func (s *server) watched() bool {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.streams > 0
}

// lookAgain has run look whether the server is watched.
func (s *server) lookAgain() {
	select {
	case s.watching <- struct{}{}:
	default: // it has not looked yet
	}
}

// registration is where the kubelet finds the server. It belongs to one goroutine.
type registration struct {
	*server
	// forgotten says that the kubelet has lost sight of the endpoint.
	forgotten bool
	ending    sync.WaitGroup
}

// ensure makes a new endpoint if the kubelet cannot find the one that there is.
func (p *registration) ensure() error {
	old := p.endpoint
	if old != nil && !p.forgotten && exists(old.path) {
		return nil
	}
	next, err := p.open()
	if err != nil {
		return err
	}
	p.mutex.Lock()
	p.endpoint, p.streams = next, 0
	p.mutex.Unlock()
	p.forgotten = false
	if old != nil {
		// The kubelet leaves the old endpoint for the new one; what it asked the old one is still answered.
		p.close(old, p.manager.allocateTimeout())
	}
	return nil
}

// open serves at a new socket.
func (p *registration) open() (*endpoint, error) {
	listener, path, err := p.directories.listen(p.resource)
	if err != nil {
		return nil, err
	}
	e := newEndpoint(p.server, path)
	p.ending.Go(func() {
		if err := e.grpc.Serve(listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			p.log.Error(err, "Device plugin socket ended", "path", path)
		}
	})
	return e, nil
}

// close ends an endpoint in the background; calls that are under way get a while.
func (p *registration) close(e *endpoint, patience time.Duration) {
	p.directories.forget(e.path)
	p.ending.Go(func() { e.close(patience) })
}

func (p *registration) end() {
	if p.endpoint != nil {
		p.close(p.endpoint, stopTimeout)
	}
	p.ending.Wait()
}

func (m *Manager) allocateTimeout() time.Duration {
	return cmp.Or(m.AllocateTimeout, allocateTimeout)
}
