// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin offers the Functions of pools with publish: DevicePlugin to the kubelet as
// extended resources, through its device plugin API (v1beta1). Each resource has a server.
//
// When pools or health change, the [Manager] starts, updates and retires servers. Each [server]
// publishes an [offer], which ListAndWatch sends to the kubelet. A server that the kubelet lost
// opens a new [endpoint], which the kubelet finds and registers.
package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/peer"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/upgrade"
)

const (
	// debounce is how long the manager waits for more changes after the first one, because the VFs
	// of a PF change one after the other.
	debounce = 50 * time.Millisecond
	// firstRetry and lastRetry bound the pauses between attempts to open a socket.
	firstRetry, lastRetry = 100 * time.Millisecond, 30 * time.Second
	// stopTimeout is how long the kubelet may take to read the last list of a resource, and calls
	// in flight may take to end.
	stopTimeout = time.Second
)

// Allocator prepares Functions and the xPU for containers. Its methods are idempotent and may be
// called for several Functions at once. If ctx ends, the error says what is missing.
type Allocator interface {
	// Reserve waits until the last pod has released the Function, sets the Function up as its pool
	// wants it, and returns the Function as it is then.
	Reserve(ctx context.Context, f function.Function, p pool.Pool) (function.Function, error)
	// Ready returns once the xPU serves a reserved Function of a pool with provisionAt: Allocate.
	Ready(ctx context.Context, f function.Function, p pool.Pool) error
	// GiveUp undoes Reserve and Ready for a Function that no container gets. If this fails, it is
	// retried later.
	GiveUp(ctx context.Context, f function.Function, p pool.Pool)
}

// Manager runs a server for every resource of the node's pools. CDI, Gave, Assigned and
// AllocateTimeout are optional.
type Manager struct {
	// KubeletDir is the kubelet's directory, "/var/lib/kubelet". The kubelet must see it at the
	// same path.
	KubeletDir string
	// Pools returns the current pools. known is false until they have been read once.
	Pools func() (pools []pool.Pool, known bool)
	// Problems returns the problems of a Function; none means that it is healthy. It does not block
	// and is safe for concurrent use.
	Problems  func(function.Function) []function.Problem
	Allocator Allocator
	// InUse reports whether a pod has the Function, or had it and the Function is not free yet. It
	// does not block and is safe for concurrent use.
	InUse func(function.ID) bool
	// Gave reports whether a pod has the Function by a resource from this agent, and not from another
	// device plugin that served the resource before. It does not block and is safe for concurrent
	// use. Without it, only files of resources with the project's prefix are known to be this
	// agent's.
	Gave  func(id function.ID, resource string) bool
	Nodes devnode.Finder
	// DeviceInfo has the device-info files.
	DeviceInfo *DeviceInfo
	// CDI gives containers their device nodes. Without it, the kubelet does.
	CDI *CDI
	// Assigned returns the assignments of Functions to pods, keyed by [function.ID.String]. Without
	// it, no file is removed.
	Assigned func(ctx context.Context) (map[string]podresources.Assignment, error)
	// AllocateTimeout limits how long one Allocate waits for Functions that are being released or
	// provisioned; 0 is 2.5 s. The kubelet starts and ends no other pod in the meantime.
	AllocateTimeout time.Duration
	Metrics         *Metrics
	Log             logr.Logger

	// unwatchedFor replaces the constant of the same name, if it is not 0.
	unwatchedFor time.Duration

	budget allocateBudget
	// running counts all goroutines.
	running sync.WaitGroup

	// relay forwards calls when a successor has the node.
	relay upgrade.Relay

	mutex   sync.Mutex
	servers map[string]*server // by resource
	// updated says that the servers follow the pools, which have been read once.
	updated bool
	// resources has all resources that have or had a server. Pods may still have Functions of a
	// resource without a server.
	resources sets.Set[string]
}

// Run serves the pools until ctx ends. A value from changes says that pools or health may have
// changed. An error means that Run could not start.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	m.reset()
	sockets, err := watchdir.Open(m.socketDir(), m.socketRemoved)
	if err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	defer sockets.Close()

	if err := m.watchSockets(sockets); err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	if err := peer.RemoveDead(filepath.Join(m.socketDir(), socketPattern)); err != nil {
		m.Log.Error(err, "A socket that nobody serves remains")
	}

	// The kubelet starts pods without an Allocate after a reboot.
	if _, err := m.DeviceInfo.Restore(); err != nil {
		m.Log.Error(err, "Multus does not find some Functions of pods")
	}

	m.running.Go(func() { m.followPools(ctx, changes) })
	m.running.Go(func() { m.followSockets(ctx, sockets) })
	m.running.Go(func() { m.sweepRegularly(ctx) })
	m.running.Wait()

	return nil
}

// Registered returns nil if the kubelet has registered or refused every resource. Otherwise the
// error names a resource.
func (m *Manager) Registered() error {
	m.mutex.Lock()
	defer m.mutex.Unlock()

	if !m.updated {
		return errors.New("resources are not offered to the kubelet yet")
	}

	for resource, s := range m.servers {
		if s.refusal == "" && (s.endpoint == nil || s.endpoint.streams == 0) {
			return fmt.Errorf("resource %s is not registered with the kubelet", resource)
		}
	}

	return nil
}

// StandAside is called when a successor takes over the node; see [upgrade.Relay.StandAside].
func (m *Manager) StandAside() { m.relay.StandAside() }

// reset sets the defaults and the state of a new run.
func (m *Manager) reset() {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.AllocateTimeout, m.unwatchedFor = cmp.Or(m.AllocateTimeout,
		allocateTimeout), cmp.Or(m.unwatchedFor, unwatchedFor)
	m.servers, m.resources = map[string]*server{}, sets.New[string]()
}

// followPools updates the servers now and after every change, until ctx ends.
func (m *Manager) followPools(ctx context.Context, changes <-chan struct{}) {
	for {
		if pools, known := m.Pools(); known {
			m.update(ctx, pools)
		}
		if !loop.Wait(ctx, changes, 0) || !loop.Sleep(ctx, debounce) {
			return
		}
	}
}

// update starts, updates and retires servers, so that every pool that has or had Functions has a
// server. A server stays when its pool becomes empty, because the kubelet would show the capacity
// of a resource without a server for minutes.
func (m *Manager) update(ctx context.Context, pools []pool.Pool) {
	wanted := map[string]pool.Pool{}
	for _, p := range pools {
		// A pool with an error is empty. If it names the resource of a pool without an error, the
		// latter has priority.
		resource := p.ResourceName()
		if other, claimed := wanted[resource]; resource != "" && (!claimed || other.Err != nil) {
			wanted[resource] = p
		}
	}

	m.mutex.Lock()
	defer m.mutex.Unlock()

	for resource, p := range wanted {
		if s, runs := m.servers[resource]; runs {
			s.update(p)
		} else if len(p.Functions) > 0 {
			m.servers[resource] = m.serve(ctx, resource, p)
			m.resources.Insert(resource)
		}
	}

	for resource, s := range m.servers {
		if _, stays := wanted[resource]; !stays {
			m.retire(ctx, s)
		}
	}

	m.updated = true
}

// retire ends a server whose pool is gone. Pods keep their Functions, so that the files for
// containers stay. Only the counters of its metrics stay. The caller must hold the mutex.
func (m *Manager) retire(ctx context.Context, s *server) {
	delete(m.servers, s.resource)
	s.publish(newOffer(pool.Pool{}, nil))
	m.Metrics.devices.DeletePartialMatch(prometheus.Labels{"resource": s.resource})
	m.running.Go(func() {
		// the kubelet reads the empty list before it loses the socket
		loop.Sleep(ctx, stopTimeout)
		s.stop()
	})
}

// followSockets notifies the servers when a socket or the directory of the sockets was removed,
// until ctx ends.
func (m *Manager) followSockets(ctx context.Context, sockets *watchdir.Dir) {
	for loop.Wait(ctx, sockets.Changes(), 0) {
		if err := m.watchSockets(sockets); err != nil {
			m.Log.Error(err, "The kubelet's directory cannot be watched")
		}
		m.mutex.Lock()
		for _, s := range m.servers {
			s.changed.Notify()
		}
		m.mutex.Unlock()
	}
}

// watchSockets creates the directory of the sockets, if it was removed, and watches it.
func (m *Manager) watchSockets(sockets *watchdir.Dir) error {
	if err := os.MkdirAll(m.socketDir(), 0o750); err != nil {
		return err
	}
	return sockets.Watch()
}

// socketRemoved reports whether an event is the removal of a server's current socket. Events of old
// sockets are ignored, because they would end the pauses of servers that failed to open a socket.
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

// socketDir returns the directory in which the kubelet looks for the sockets of plugins.
func (m *Manager) socketDir() string { return filepath.Join(m.KubeletDir, pluginsRegistry) }
