// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

// unwatchedFor is how long a server waits for the kubelet's ListAndWatch before it opens a new
// endpoint, because a kubelet that lost its stream does not start another one. The time doubles up
// to unwatchedAtMost while the kubelet does not connect.
const unwatchedFor, unwatchedAtMost = 10 * time.Second, 10 * time.Minute

// server offers one resource to the kubelet, at one endpoint at a time.
type server struct {
	pluginapi.UnimplementedDevicePluginServer

	manager  *Manager
	resource string
	log      logr.Logger
	// stop ends the server.
	stop context.CancelFunc
	// offer is what the kubelet sees.
	offer atomic.Pointer[offer]
	// changed signals that the kubelet may have lost the endpoint.
	changed notify.Signal

	// The manager's mutex guards the fields below.

	// endpoint is the current endpoint; nil before the first one.
	endpoint *endpoint
	// refusal is the kubelet's reason for its last refusal of the resource, "" if it did not refuse
	// it.
	refusal string
	// lostAt is when the server assumes that a kubelet without a stream has lost the endpoint. It
	// is zero while the kubelet has a stream or has not registered the endpoint.
	lostAt time.Time
	// patience is the time from the end of the last stream to lostAt.
	patience time.Duration
}

// serve starts a server, which runs until ctx ends or the server is stopped.
func (m *Manager) serve(ctx context.Context, resource string, p pool.Pool) *server {
	ctx, stop := context.WithCancel(ctx)
	s := &server{
		manager: m, resource: resource, log: m.Log.WithValues("resource", resource), stop: stop,
		patience: m.unwatchedFor,
	}

	m.Metrics.begin(resource)
	s.offer.Store(newOffer(pool.Pool{}, nil))
	s.update(p)
	m.running.Go(func() { s.keepRegistered(ctx) })

	return s
}

// keepRegistered keeps an endpoint open, which the kubelet finds and registers by itself, until ctx
// ends.
func (s *server) keepRegistered(ctx context.Context) {
	changes := s.changed.Subscribe(ctx)
	pauses := loop.Backoff(firstRetry, lastRetry)
	for {
		pause, err := s.register()
		if err == nil {
			pauses = loop.Backoff(firstRetry, lastRetry)
		} else {
			pause = pauses.Step()
			s.manager.Metrics.registrations.WithLabelValues(s.resource, "error").Inc()
			s.log.Error(err, "Not registered with the kubelet", "retry", pause.String())
		}

		if !loop.Wait(ctx, changes, pause) {
			break
		}
	}

	if s.endpoint != nil {
		s.manager.relay.AwaitAllocates()
		s.endpoint.close(stopTimeout)
	}
}

// register opens a new endpoint if there is none, if its socket is gone, or if the kubelet lost it.
// It returns the pause until the next check if nothing changes; 0 means no check. It does nothing
// for a server that is retired, because another server may have its resource, and nothing after
// another agent took over the node.
func (s *server) register() (pause time.Duration, err error) {
	m := s.manager
	m.mutex.Lock()
	defer m.mutex.Unlock()

	if m.servers[s.resource] != s || m.relay.Forwards() {
		return 0, nil
	}

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
		// The kubelet moves to the new endpoint. Calls in flight at the old endpoint are still
		// answered.
		m.running.Go(func() { old.close(m.AllocateTimeout) })
	}

	return 0, nil
}

// update offers the current state of the pool.
func (s *server) update(p pool.Pool) {
	if s.manager.CDI != nil {
		err := s.manager.CDI.includeNow(s.resource, func() []content { return s.listed(p) })
		if err != nil {
			s.log.Error(err, "Containers that are made again after a reboot may lack device "+
				"nodes until this is repaired")
		}
	}

	gave := func(id function.ID) bool {
		return s.manager.Gave != nil && s.manager.Gave(id, s.resource)
	}
	if err := s.manager.DeviceInfo.refresh(s.resource, s.described(p), gave); err != nil {
		s.log.Error(err, "Some device-info files are not those of now")
	}

	next := newOffer(p, s.manager.Problems)
	devices := s.manager.Metrics.devices
	devices.WithLabelValues(s.resource,
		pluginapi.Healthy).Set(float64(len(next.devices) - next.unhealthy))
	devices.WithLabelValues(s.resource, pluginapi.Unhealthy).Set(float64(next.unhealthy))
	next.report(s.publish(next), s.log)
}

// listed returns what the CDI file has of the pool's Functions. A Function to which the pool's
// driver is not bound has nothing there: after a reboot, a container that has it is not made before
// the agent has bound the driver again, because some nodes come with the driver.
func (s *server) listed(p pool.Pool) []content {
	var contents []content
	for _, f := range p.Functions {
		bound, err := s.manager.Nodes.Bound(f, string(p.Spec.Driver))
		if err == nil && !bound {
			contents = append(contents, content{function: f})
			continue
		}
		if err != nil {
			continue // what the file has stays, because the driver is unknown
		}

		// Allocate returns the error of a Function without contents.
		if c, err := contentOf(&s.manager.Nodes, f, p, true); err == nil {
			contents = append(contents, c)
		}
	}

	return contents
}

// described returns the contents of the pool's Functions to which its driver is bound. The others
// keep the files that they have.
func (s *server) described(p pool.Pool) []content {
	var contents []content
	for _, f := range p.Functions {
		bound, err := s.manager.Nodes.Bound(f, string(p.Spec.Driver))
		if err != nil || !bound {
			continue
		}
		if c, err := contentOf(&s.manager.Nodes, f, p, s.manager.CDI != nil); err == nil {
			contents = append(contents, c)
		}
	}
	return contents
}

// publish replaces the offer, and returns the old one.
func (s *server) publish(next *offer) (before *offer) {
	before = s.offer.Swap(next)
	close(before.replaced)
	return before
}

// streamsChanged updates lostAt after a stream began or ended and after a registration.
func (s *server) streamsChanged() {
	if s.endpoint.streams > 0 {
		s.lostAt, s.patience = time.Time{}, s.manager.unwatchedFor
		return
	}
	s.lostAt = time.Now().Add(s.patience)
	s.changed.Notify()
}

// offer is a list of Functions for the kubelet. It is immutable.
type offer struct {
	pool pool.Pool
	// functions is keyed by the kubelet's device ID, which is [function.ID.String].
	functions map[string]function.Function
	devices   []*pluginapi.Device // in the order of the pool
	// unhealthy is the number of unhealthy devices.
	unhealthy int
	// reasons says why devices are unhealthy, by ID. A device whose only problem is a pending
	// release has no reason, because this is usual.
	reasons map[string]string
	// replaced is closed when the resource has a new offer.
	replaced chan struct{}
}

func newOffer(p pool.Pool, problemsOf func(function.Function) []function.Problem) *offer {
	o := &offer{
		pool: p, functions: map[string]function.Function{}, reasons: map[string]string{},
		replaced: make(chan struct{}),
	}

	for _, f := range p.Functions {
		id := f.ID.String()
		o.functions[id] = f
		device := &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
		if problems := problemsOf(f); len(problems) > 0 {
			device.Health = pluginapi.Unhealthy
			o.unhealthy++
			if len(problems) > 1 || problems[0].Taint != v1alpha1.TaintReleasePending {
				var messages []string
				for _, problem := range problems {
					messages = append(messages, problem.Message)
				}
				o.reasons[id] = strings.Join(messages, "; ")
			}
		}

		if f.NUMANode >= 0 && !devicePlugin(p).ExcludeTopology {
			device.Topology = &pluginapi.TopologyInfo{
				Nodes: []*pluginapi.NUMANode{{ID: int64(f.NUMANode)}},
			}
		}

		o.devices = append(o.devices, device)
	}

	return o
}

// find returns the Functions with these device IDs, in this order. Its error is a gRPC status for
// the kubelet.
func (o *offer) find(resource string, ids []string) ([]function.Function, error) {
	var functions []function.Function
	for i, id := range ids {
		f, ok := o.functions[id]
		if !ok {
			return nil, status.Errorf(codes.NotFound,
				"device %q: resource %s has no such Function on this node", id, resource)
		}
		if slices.Contains(ids[:i], id) {
			return nil, status.Errorf(codes.NotFound, "device %q is asked for twice", id)
		}
		functions = append(functions, f)
	}

	return functions, nil
}

// report logs which devices changed their health since the last offer, with one line for each
// reason, and whether the number of devices changed.
func (o *offer) report(before *offer, log logr.Logger) {
	// IDs by reason; the reason of a device that is healthy again is ""
	changed := map[string][]string{}
	for _, d := range o.devices {
		if reason := o.reasons[d.ID]; reason != before.reasons[d.ID] {
			changed[reason] = append(changed[reason], d.ID)
		}
	}

	for _, reason := range slices.Sorted(maps.Keys(changed)) {
		ids := changed[reason]
		if reason == "" {
			log.Info("Functions are healthy again", "count", len(ids), "functions", firstOf(ids))
		} else {
			log.Info("Functions are unhealthy", "count", len(ids), "functions", firstOf(ids),
				"reason", reason)
		}
	}

	if len(o.devices) != len(before.devices) {
		log.Info("Functions came or went", "before", len(before.devices), "now", len(o.devices))
	}
}

// firstOf returns the names of at most eight Functions for a log message, which also has their
// number.
func firstOf(ids []string) string { return strings.Join(ids[:min(len(ids), 8)], " ") }
