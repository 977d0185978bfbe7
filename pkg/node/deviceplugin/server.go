package deviceplugin

import (
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// unwatchedFor is how long a server waits for the kubelet's ListAndWatch before it opens a new endpoint. A kubelet that
// restarts comes back by itself, but one that only lost its stream does not. The time doubles up to unwatchedAtMost while
// the kubelet stays away.
const unwatchedFor, unwatchedAtMost = 10 * time.Second, 10 * time.Minute

// server offers one resource to the kubelet, at one endpoint at a time.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	manager  *Manager
	resource string
	log      logr.Logger
	offer    atomic.Pointer[offer] // what the kubelet sees

	// The manager's mutex guards the fields below.

	endpoint *endpoint // the current one; nil before the first
	refusal  string    // why the kubelet refused the resource last, "" if it did not
	// lostAt is when the kubelet, which has registered the endpoint but has no stream, counts as having lost it; zero while
	// it has a stream or has not registered the endpoint.
	lostAt   time.Time
	patience time.Duration // from the loss of the stream to lostAt
}

func newServer(m *Manager, resource string, p pool.Pool) *server {
	s := &server{
		manager: m, resource: resource, log: m.Log.WithValues("resource", resource), patience: m.unwatchedFor,
	}
	m.Metrics.begin(resource)
	s.offer.Store(newOffer(pool.Pool{}, nil))
	s.update(p)
	return s
}

// update offers the pool as it is now, with its Functions' health.
func (s *server) update(p pool.Pool) {
	if err := s.writeCDI(p); err != nil {
		s.log.Error(err, "Containers that are made again after a reboot may lack device nodes until this is repaired")
	}
	next := newOffer(p, s.manager.Problems)
	devices := s.manager.Metrics.devices
	devices.WithLabelValues(s.resource, pluginapi.Healthy).Set(float64(len(next.devices) - next.unhealthy))
	devices.WithLabelValues(s.resource, pluginapi.Unhealthy).Set(float64(next.unhealthy))
	next.report(s.publish(next), s.log)
}

// publish replaces the offer, which it returns.
func (s *server) publish(next *offer) (before *offer) {
	before = s.offer.Swap(next)
	close(before.replaced)
	return before
}

// writeCDI lists the pool's Functions in the resource's CDI file. It leaves out a Function that a container could not
// use: Allocate says why.
func (s *server) writeCDI(p pool.Pool) error {
	if s.manager.CDI == nil {
		return nil
	}
	contents := make([]content, 0, len(p.Functions))
	for _, f := range p.Functions {
		if c, err := contentOf(&s.manager.Nodes, f, p); err == nil {
			contents = append(contents, c)
		}
	}
	return s.manager.CDI.include(s.resource, contents)
}

// ensureEndpoint opens a new endpoint if there is none, its socket is gone, or the kubelet lost it. The caller calls it
// again after the time that it returns, unless that is 0.
func (s *server) ensureEndpoint() (again time.Duration, err error) {
	old, left := s.endpoint, time.Until(s.lostAt)
	lost := !s.lostAt.IsZero() && left <= 0
	if old != nil && exists(old.path) && !lost {
		return max(left, 0), nil
	}
	next, err := openEndpoint(s)
	if err != nil {
		return 0, err
	}
	s.endpoint, s.lostAt = next, time.Time{}
	if lost {
		s.patience = min(2*s.patience, unwatchedAtMost)
	}
	if old != nil {
		// The kubelet moves to the new endpoint. Calls in flight at the old one are still answered.
		s.manager.endpoints.Go(func() { old.close(s.manager.AllocateTimeout) })
	}
	return 0, nil
}

// streamsChanged notes whether the kubelet watches the server, after a stream began or ended and after a registration.
func (s *server) streamsChanged() {
	if s.endpoint.streams > 0 {
		s.lostAt, s.patience = time.Time{}, s.manager.unwatchedFor
		return
	}
	s.lostAt = time.Now().Add(s.patience)
	s.manager.queue.Add(s.resource)
}
