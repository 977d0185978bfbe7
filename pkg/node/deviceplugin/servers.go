package deviceplugin

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
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

// servers are the servers of a manager. Each resource that has Functions, or had some, has one.
type servers struct {
	*Manager
	// socketDir is where the kubelet looks for the servers' sockets.
	socketDir string
	// queue has the resources whose server the kubelet may not find, and retries their pauses after errors.
	queue   workqueue.TypedDelayingInterface[string]
	retries workqueue.TypedRateLimiter[string]
	// endpoints are the goroutines that serve and close endpoints.
	endpoints sync.WaitGroup

	mutex  sync.Mutex
	byName map[string]*server // by resource
	// resources are all that have, or had, a server: Functions of a resource that is gone may still be in pods.
	resources sets.Set[string]
}

func newServers(m *Manager) *servers {
	return &servers{
		Manager: m, socketDir: filepath.Join(m.KubeletDir, pluginsRegistry),
		queue:     workqueue.NewTypedDelayingQueue[string](),
		retries:   workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry),
		byName:    map[string]*server{},
		resources: sets.New[string](),
	}
}

// followPools has servers for the pools as they are now, and after every change, until ctx ends.
func (all *servers) followPools(ctx context.Context, changes <-chan struct{}) {
	for {
		if pools, known := all.Pools.Pools(); known {
			all.update(ctx, pools)
		}
		if !loop.Wait(ctx, changes, 0) || !loop.Sleep(ctx, settle) {
			return
		}
	}
}

// update has a server for every pool that has Functions, or had some: a resource that disappears while pods have it
// would keep its old capacity in the Node for minutes, one that is empty has none at once.
func (all *servers) update(ctx context.Context, pools []pool.Pool) {
	wanted := map[string]pool.Pool{}
	for _, p := range pools {
		// A pool that cannot be used is empty. It may claim the resource of one that can.
		other, claimed := wanted[p.ResourceName()]
		if p.Spec.Publish == v1alpha1.PublishDevicePlugin && (!claimed || other.Err != nil) {
			wanted[p.ResourceName()] = p
		}
	}
	all.mutex.Lock()
	defer all.mutex.Unlock()
	for resource, p := range wanted {
		if s, runs := all.byName[resource]; runs {
			s.update(p)
		} else if len(p.Functions) > 0 {
			all.byName[resource] = newServer(all, resource, p)
			all.resources.Insert(resource)
			all.queue.Add(resource)
		}
	}
	for resource, s := range all.byName {
		if _, offered := wanted[resource]; !offered {
			all.retire(ctx, s)
		}
	}
}

// retire ends a server whose pool is gone. Pods keep what they have. The mutex is held.
func (all *servers) retire(ctx context.Context, s *server) {
	delete(all.byName, s.resource)
	all.retries.Forget(s.resource)
	s.empty()
	if s.endpoint == nil {
		return
	}
	all.endpoints.Go(func() {
		loop.Sleep(ctx, stopTimeout) // the kubelet reads the empty list before it loses the socket
		s.endpoint.close(stopTimeout)
	})
}

// followSockets has servers look at once whether their sockets are there when one was removed, until ctx ends.
func (all *servers) followSockets(ctx context.Context, sockets *watchdir.Dir) {
	for loop.Wait(ctx, sockets.Changes(), 0) {
		if err := watchSockets(sockets, all.socketDir); err != nil {
			all.Log.Error(err, "The kubelet's directory cannot be watched")
		}
		all.mutex.Lock()
		for resource := range all.byName {
			all.retries.Forget(resource)
			all.queue.Add(resource)
		}
		all.mutex.Unlock()
	}
}

// watchSockets makes the directory of the sockets and watches it, also where somebody removed it.
func watchSockets(sockets *watchdir.Dir, dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	return sockets.Watch()
}

// socketRemoved says whether an event is the removal of a socket that the kubelet shall use. A socket that a server
// closes itself is none any more: its removal must not end the pauses of servers that failed to open another.
func (all *servers) socketRemoved(event fsnotify.Event) bool {
	if !event.Has(fsnotify.Remove) && !event.Has(fsnotify.Rename) {
		return false
	}
	all.mutex.Lock()
	defer all.mutex.Unlock()
	for _, s := range all.byName {
		if s.endpoint != nil && s.endpoint.path == event.Name {
			return true
		}
	}
	return false
}

// keepRegistered works through the queue until ctx ends and the queue is shut down.
func (all *servers) keepRegistered(ctx context.Context) {
	for {
		resource, ended := all.queue.Get()
		if ended || ctx.Err() != nil {
			return
		}
		all.register(resource)
		all.queue.Done(resource)
	}
}

// register has the resource's server be where the kubelet can find it. The kubelet then registers it by itself.
func (all *servers) register(resource string) {
	all.mutex.Lock()
	defer all.mutex.Unlock()
	s, runs := all.byName[resource]
	if !runs {
		return
	}
	again, err := s.ensureEndpoint()
	if err != nil {
		again = all.retries.When(resource)
		s.metrics.notRegistered.Inc()
		s.log.Error(err, "Not registered with the kubelet", "retry", again.String())
	} else {
		all.retries.Forget(resource)
	}
	if again > 0 {
		all.queue.AddAfter(resource, again)
	}
}

// close closes all endpoints and waits for that. Nobody else may use the servers any more.
func (all *servers) close() {
	for _, s := range all.byName {
		if s.endpoint != nil {
			all.endpoints.Go(func() { s.endpoint.close(stopTimeout) })
		}
	}
	all.endpoints.Wait()
}
