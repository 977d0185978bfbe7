package deviceplugin

import (
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// unwatchedFor is how long a server goes without a kubelet that watches it before it opens a new endpoint. A kubelet that
// starts again comes by itself, but one that only lost its stream never does. It is doubled each time that nobody came,
// up to unwatchedAtMost.
const unwatchedFor, unwatchedAtMost = 10 * time.Second, 10 * time.Minute

// server offers one resource to the kubelet, at one endpoint after another.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	manager  *Manager
	resource string
	log      logr.Logger
	offer    atomic.Pointer[offer] // what the kubelet sees

	// The manager's mutex guards what follows.

	endpoint *endpoint // the one that the kubelet shall use; nil before the first
	refusal  string    // why the kubelet refused the resource last, "" if it did not
	// lostAt is when the kubelet, which knows the endpoint but has no stream there, counts as having lost it; zero while it
	// has a stream, or has not registered the resource yet.
	lostAt   time.Time
	patience time.Duration // how long the kubelet may have no stream
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

// update has the kubelet see the pool as it is and its Functions' health.
func (s *server) update(p pool.Pool) {
	if err := s.writeCDI(p); err != nil {
		s.log.Error(err, "Containers that are made again after a reboot may lack device nodes until this is repaired")
	}
	next := newOffer(p, s.manager.Problems)
	devices := s.manager.Metrics.devices
	devices.WithLabelValues(s.resource, pluginapi.Healthy).Set(float64(len(next.devices) - next.unhealthy))
	devices.WithLabelValues(s.resource, pluginapi.Unhealthy).Set(float64(next.unhealthy))
	before := s.offer.Swap(next)
	close(before.replaced)
	next.report(before, s.log)
}

// writeCDI has the runtime know all Functions of the pool. One of which a container could not get everything is left
// out: its Allocate will say why.
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

// empty has the kubelet see that the resource has no Functions any more. Pods keep what they have, so the files for
// their containers stay. Of the metrics, those that say what is end; those that count what was remain.
func (s *server) empty() {
	before := s.offer.Swap(newOffer(pool.Pool{}, nil))
	close(before.replaced)
	s.manager.Metrics.devices.DeletePartialMatch(prometheus.Labels{"resource": s.resource})
}

// ensureEndpoint opens a new endpoint if the kubelet cannot find the one that there is: its socket is gone, or the kubelet
// lost it. It is to be called again after the time that it returns, if that is not 0.
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
		// The kubelet leaves the old endpoint for the new one; what it asked the old one is still answered.
		s.manager.endpoints.Go(func() { old.close(s.manager.AllocateTimeout) })
	}
	return 0, nil
}

// streamsChanged notes whether the kubelet watches the server. It is called when a stream began or ended, and when the
// kubelet registered the resource.
func (s *server) streamsChanged() {
	if s.endpoint.streams > 0 {
		s.lostAt, s.patience = time.Time{}, s.manager.unwatchedFor
		return
	}
	s.lostAt = time.Now().Add(s.patience)
	s.manager.queue.Add(s.resource)
}
