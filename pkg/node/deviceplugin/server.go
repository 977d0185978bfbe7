package deviceplugin

import (
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
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

// streamsChanged notes whether the kubelet watches the server, after a stream began or ended and after a registration.
func (s *server) streamsChanged() {
	if s.endpoint.streams > 0 {
		s.lostAt, s.patience = time.Time{}, s.manager.unwatchedFor
		return
	}
	s.lostAt = time.Now().Add(s.patience)
	s.manager.queue.Add(s.resource)
}

// offer is what a resource has. It is immutable.
type offer struct {
	pool      pool.Pool
	functions map[string]function.Function // by the kubelet's device ID, which is [function.ID.String]
	devices   []*pluginapi.Device          // in the order of the pool
	unhealthy int                          // how many of the devices
	// reasons say why devices are unhealthy, by ID. Devices that only await their release have none: that is usual, and
	// whoever releases them logs what goes wrong.
	reasons  map[string]string
	replaced chan struct{} // closed when the resource has another offer
}

func newOffer(p pool.Pool, problemsOf func(function.Function) []health.Problem) *offer {
	o := &offer{
		pool:      p,
		functions: make(map[string]function.Function, len(p.Functions)),
		devices:   make([]*pluginapi.Device, 0, len(p.Functions)),
		reasons:   map[string]string{},
		replaced:  make(chan struct{}),
	}
	for _, f := range p.Functions {
		id := f.ID.String()
		o.functions[id] = f
		device := &pluginapi.Device{ID: id, Health: pluginapi.Healthy}
		if problems := problemsOf(f); len(problems) > 0 {
			device.Health = pluginapi.Unhealthy
			o.unhealthy++
			if len(problems) > 1 || problems[0].Taint != v1alpha1.TaintReleasePending {
				o.reasons[id] = joinMessages(problems)
			}
		}
		if f.NUMANode >= 0 && !devicePlugin(p).ExcludeTopology {
			device.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(f.NUMANode)}}}
		}
		o.devices = append(o.devices, device)
	}
	return o
}

func joinMessages(problems []health.Problem) string {
	messages := make([]string, 0, len(problems))
	for _, problem := range problems {
		messages = append(messages, problem.Message)
	}
	return strings.Join(messages, "; ")
}

// find returns the Functions with these device IDs, in this order. Its error is for the kubelet.
func (o *offer) find(resource string, ids []string) ([]function.Function, error) {
	functions := make([]function.Function, 0, len(ids))
	for i, id := range ids {
		f, ok := o.functions[id]
		if !ok {
			return nil, status.Errorf(codes.NotFound, "device %q: resource %s has no such Function on this node", id, resource)
		}
		if slices.Contains(ids[:i], id) {
			return nil, status.Errorf(codes.NotFound, "device %q is asked for twice", id)
		}
		functions = append(functions, f)
	}
	return functions, nil
}

// some returns the Functions with these device IDs, without those that it does not have.
func (o *offer) some(ids []string) []function.Function {
	functions := make([]function.Function, 0, len(ids))
	for _, id := range ids {
		if f, ok := o.functions[id]; ok {
			functions = append(functions, f)
		}
	}
	return functions
}

func deviceIDs(functions []function.Function) []string {
	ids := make([]string, len(functions))
	for i, f := range functions {
		ids[i] = f.ID.String()
	}
	return ids
}

// sameDevices says whether the kubelet would see no difference.
func sameDevices(a, b []*pluginapi.Device) bool {
	return slices.EqualFunc(a, b, func(a, b *pluginapi.Device) bool { return proto.Equal(a, b) })
}

// maxLogged is how many Functions a line of the log names.
const maxLogged = 8

// report logs what became healthy or unhealthy, or came or went, since the offer before: one line for each reason.
func (o *offer) report(before *offer, log logr.Logger) {
	byReason := map[string][]string{}
	var healthy []string
	for _, d := range o.devices {
		reason, was := o.reasons[d.ID], before.reasons[d.ID]
		switch {
		case reason == was:
		case reason == "":
			healthy = append(healthy, d.ID)
		default:
			byReason[reason] = append(byReason[reason], d.ID)
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		ids := byReason[reason]
		log.Info("Functions are unhealthy", "count", len(ids), "functions", firstOf(ids), "reason", reason)
	}
	if len(healthy) > 0 {
		log.Info("Functions are healthy again", "count", len(healthy), "functions", firstOf(healthy))
	}
	if len(o.devices) != len(before.devices) {
		log.Info("Functions came or went", "before", len(before.devices), "now", len(o.devices))
	}
}

func firstOf(ids []string) string {
	if len(ids) <= maxLogged {
		return strings.Join(ids, " ")
	}
	return strings.Join(ids[:maxLogged], " ") + " .."
}
