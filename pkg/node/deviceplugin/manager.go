// Package deviceplugin offers the Functions of pools with publish: DevicePlugin to the kubelet as extended resources,
// through its device plugin API (v1beta1): one server per resource, which says what there is and what is wrong with
// it, which Functions go well together, and what a container gets of those it was given.
//
// Data flows in two directions only. When pools or health change, the [Manager] starts, updates and retires servers, and
// each [server] publishes an [offer] that ListAndWatch sends to the kubelet. When the kubelet may not find a server any
// more, the server's resource goes into a queue, and the server opens a new [endpoint].
package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// settle is how long the manager waits for more changes after the first: VFs appear one by one, and a link that
	// goes down takes its VFs along.
	settle = 50 * time.Millisecond
	// firstRetry and lastRetry bound the pauses between attempts to open a socket. Each pause is twice the last.
	firstRetry, lastRetry = 100 * time.Millisecond, 30 * time.Second
	// stopTimeout is how long the kubelet has to read the last list of a resource, and how long calls that are under way
	// have to end.
	stopTimeout = time.Second
)

// Allocator has Functions and the xPU ready for containers. Its methods may be called for several Functions at once,
// and again for one for which all is done. They give up when ctx ends, with an error that says what is missing.
type Allocator interface {
	// Reserve returns once nothing is left of the Function's last pod, and it is set up as its pool wants it, as it is
	// then: an SF is made, a driver bound. It is called once for each allocation.
	Reserve(ctx context.Context, f function.Function, p pool.Pool) (function.Function, error)
	// Ready returns once the xPU serves a reserved Function of a pool with provisionAt: Allocate.
	Ready(ctx context.Context, f function.Function, p pool.Pool) error
	// GiveUp undoes both for a Function that no container gets after all. What cannot be undone now is undone later.
	GiveUp(ctx context.Context, f function.Function, p pool.Pool)
}

// Manager runs a server for every resource of the node's pools. CDI, Assigned and AllocateTimeout may be left out.
type Manager struct {
	// KubeletDir is the kubelet's, "/var/lib/kubelet". It has the same path here as for the kubelet.
	KubeletDir string
	// Pools returns the pools as they are now, which are not changed here; known is false as long as they have not been
	// read once.
	Pools func() (pools []pool.Pool, known bool)
	// Problems returns what is wrong with a Function; nothing means healthy. It does not block and is safe for concurrent use.
	Problems  func(function.Function) []health.Problem
	Allocator Allocator
	// Nodes looks up the device nodes that containers get.
	Nodes devnode.Finder
	// DeviceInfoDir is where the device-info files of device plugins are, "/var/run/k8s.cni.cncf.io/devinfo/dp". It is made
	// when it is needed.
	DeviceInfoDir string
	// CDI, where set, gives containers their device nodes; without, they get them from the kubelet.
	CDI *CDI
	// Assigned, where set, returns what pods have, by [function.ID.String]. It tells which files nobody needs any more;
	// without, they stay until the node is rebooted.
	Assigned func(ctx context.Context) (map[string]podresources.Assignment, error)
	// AllocateTimeout bounds how long one Allocate waits for Functions that are being released or provisioned. The kubelet
	// starts and ends no other pod meanwhile. 0 is 2.5 s. After one that waited in vain others have a fifth of it, for
	// 10 s.
	AllocateTimeout time.Duration
	Metrics         *Metrics
	Log             logr.Logger

	unwatchedFor time.Duration // replaces the constant of this name where it is set

	budget allocateBudget
	// queue has the resources whose server the kubelet may not find, and retries their pauses after errors.
	queue   workqueue.TypedDelayingInterface[string]
	retries workqueue.TypedRateLimiter[string]
	// endpoints are the goroutines that serve and close endpoints.
	endpoints sync.WaitGroup

	mutex   sync.Mutex
	servers map[string]*server // by resource
	// resources are all that have, or had, a server: Functions of a resource that is gone may still be in pods.
	resources sets.Set[string]
}

// Run serves the pools as they are at once and after every value from changes, which comes when pools or health may
// have changed. It ends with ctx, and with an error only if it cannot work at all.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	m.reset()
	defer m.queue.ShutDown()
	sockets, err := watchdir.Open(m.socketDir(), m.socketRemoved)
	if err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	defer sockets.Close()
	if err := m.watchSockets(sockets); err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	removeStaleSockets(m.socketDir(), m.Log)

	var loops sync.WaitGroup
	loops.Go(func() { m.followPools(ctx, changes) })
	loops.Go(func() { m.followSockets(ctx, sockets) })
	loops.Go(func() { m.keepRegistered(ctx) })
	loops.Go(func() { m.sweepRegularly(ctx) })
	<-ctx.Done()
	m.queue.ShutDown()
	loops.Wait()
	for _, s := range m.servers {
		if s.endpoint != nil {
			m.endpoints.Go(func() { s.endpoint.close(stopTimeout) })
		}
	}
	m.endpoints.Wait()
	return nil
}

// reset sets defaults, and makes anew what the goroutines of a run share.
func (m *Manager) reset() {
	m.AllocateTimeout, m.unwatchedFor = cmp.Or(m.AllocateTimeout, allocateTimeout), cmp.Or(m.unwatchedFor, unwatchedFor)
	m.queue = workqueue.NewTypedDelayingQueue[string]()
	m.retries = workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)
	m.servers, m.resources = map[string]*server{}, sets.New[string]()
}

// followPools has servers for the pools as they are now, and after every change, until ctx ends.
func (m *Manager) followPools(ctx context.Context, changes <-chan struct{}) {
	for {
		if pools, known := m.Pools(); known {
			m.update(ctx, pools)
		}
		if !loop.Wait(ctx, changes, 0) || !loop.Sleep(ctx, settle) {
			return
		}
	}
}

// update has a server for every pool that has Functions, or had some: a resource that disappears while pods have it
// would keep its old capacity in the Node for minutes, one that is empty has none at once.
func (m *Manager) update(ctx context.Context, pools []pool.Pool) {
	wanted := map[string]pool.Pool{}
	for _, p := range pools {
		// A pool that cannot be used is empty. It may claim the resource of one that can.
		other, claimed := wanted[p.ResourceName()]
		if p.Spec.Publish == v1alpha1.PublishDevicePlugin && (!claimed || other.Err != nil) {
			wanted[p.ResourceName()] = p
		}
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for resource, p := range wanted {
		if s, runs := m.servers[resource]; runs {
			s.update(p)
		} else if len(p.Functions) > 0 {
			m.servers[resource] = newServer(m, resource, p)
			m.resources.Insert(resource)
			m.queue.Add(resource)
		}
	}
	for resource, s := range m.servers {
		if _, offered := wanted[resource]; !offered {
			m.retire(ctx, s)
		}
	}
}

// retire ends a server whose pool is gone. Pods keep what they have. The mutex is held.
func (m *Manager) retire(ctx context.Context, s *server) {
	delete(m.servers, s.resource)
	m.retries.Forget(s.resource)
	s.empty()
	if s.endpoint == nil {
		return
	}
	m.endpoints.Go(func() {
		loop.Sleep(ctx, stopTimeout) // the kubelet reads the empty list before it loses the socket
		s.endpoint.close(stopTimeout)
	})
}

// followSockets has servers look at once whether their sockets are there when one was removed, until ctx ends.
func (m *Manager) followSockets(ctx context.Context, sockets *watchdir.Dir) {
	for loop.Wait(ctx, sockets.Changes(), 0) {
		if err := m.watchSockets(sockets); err != nil {
			m.Log.Error(err, "The kubelet's directory cannot be watched")
		}
		m.mutex.Lock()
		for resource := range m.servers {
			m.retries.Forget(resource)
			m.queue.Add(resource)
		}
		m.mutex.Unlock()
	}
}

// watchSockets makes the directory of the sockets and watches it, also where somebody removed it.
func (m *Manager) watchSockets(sockets *watchdir.Dir) error {
	if err := os.MkdirAll(m.socketDir(), 0o750); err != nil {
		return err
	}
	return sockets.Watch()
}

// socketRemoved says whether an event is the removal of a socket that the kubelet shall use. A socket that a server
// closes itself is none any more: its removal must not end the pauses of servers that failed to open another.
func (m *Manager) socketRemoved(event fsnotify.Event) bool {
	if !event.Has(fsnotify.Remove) && !event.Has(fsnotify.Rename) {
		return false
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	for _, s := range m.servers {
		if s.endpoint != nil && s.endpoint.path == event.Name {
			return true
		}
	}
	return false
}

// keepRegistered works through the queue until ctx ends and the queue is shut down.
func (m *Manager) keepRegistered(ctx context.Context) {
	for {
		resource, ended := m.queue.Get()
		if ended || ctx.Err() != nil {
			return
		}
		m.register(resource)
		m.queue.Done(resource)
	}
}

// register has the resource's server be where the kubelet can find it. The kubelet then registers it by itself.
func (m *Manager) register(resource string) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	s, runs := m.servers[resource]
	if !runs {
		return
	}
	again, err := s.ensureEndpoint()
	if err != nil {
		again = m.retries.When(resource)
		m.Metrics.registrations.WithLabelValues(resource, "error").Inc()
		s.log.Error(err, "Not registered with the kubelet", "retry", again.String())
	} else {
		m.retries.Forget(resource)
	}
	if again > 0 {
		m.queue.AddAfter(resource, again)
	}
}

// socketDir is where the kubelet looks for plugins' sockets.
func (m *Manager) socketDir() string { return filepath.Join(m.KubeletDir, pluginsRegistry) }
