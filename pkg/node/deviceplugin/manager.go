// Package deviceplugin offers the Functions of pools with publish: DevicePlugin to the kubelet as extended resources,
// through its device plugin API (v1beta1): one server per resource, which says what there is and what is wrong with
// it, which Functions go well together, and what a container gets of those it was given.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

const (
	// settle is how long the manager waits for more changes after the first: VFs appear one by one, and a link that
	// goes down takes its VFs along.
	settle = 50 * time.Millisecond
	// allocateTimeout is how long an Allocate waits for a Function where Manager.AllocateTimeout is 0. The kubelet admits
	// pods, ends them and probes them in one loop, which stands still meanwhile.
	allocateTimeout = 2500 * time.Millisecond
	// impatience is how long, after an Allocate waited in vain, others wait only a fifth of that: an xPU that is away
	// would otherwise stop the kubelet's loop for as many times as pods wait for it.
	impatience = 10 * time.Second
)

// Pools knows the node's pools.
type Pools interface {
	// Pools returns the pools as they are now; known is false as long as they have not been read once. The caller does
	// not change the result.
	Pools() (pools []pool.Pool, known bool)
}

// Health says what is wrong with a Function; nothing means healthy. It does not block and is safe for concurrent use.
type Health interface {
	Problems(function.Function) []health.Problem
}

// Provisioner has Functions and the xPU ready for containers. Its methods may be called for several Functions at once,
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

// Assignments knows which pods have which Functions.
type Assignments interface {
	// Assigned returns what pods have, by [function.ID.String].
	Assigned(ctx context.Context) (map[string]podresources.Assignment, error)
}

// Manager runs a server for every resource of the node's pools. All fields but AllocateTimeout and Assignments are
// needed, and CDI is nil where containers get device nodes from the kubelet.
type Manager struct {
	// KubeletDir is the kubelet's, "/var/lib/kubelet". It has the same path here as for the kubelet.
	KubeletDir string
	Pools      Pools
	Health     Health
	Allocator  Allocator
	// Contents says what containers get.
	Contents *Contents
	// DeviceInfo keeps the device-info files.
	DeviceInfo *DeviceInfo
	// CDI, where set, gives containers their device nodes.
	CDI *CDI
	// Assignments, where set, tells which files nobody needs any more; without, they stay until the node is rebooted.
	Assignments Assignments
	// AllocateTimeout bounds how long one Allocate waits for Functions that are being released or provisioned. The kubelet
	// starts and ends no other pod meanwhile. 0 is 2.5 s. After one that waited in vain others have a fifth of it, for
	// 10 s.
	AllocateTimeout time.Duration
	Metrics         *Metrics
	Log             logr.Logger

	budget allocateBudget

	unwatchedFor time.Duration // see the constant, for which 0 stands
}

// Run serves the pools as they are at once and after every value from changes, which comes when pools or health may
// have changed. It ends with ctx, and with an error only if it cannot work at all.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	directories, err := openDirectories(m.KubeletDir, m.Log)
	if err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	defer directories.close()
	directories.removeStale()

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return directories.run(ctx) })
	group.Go(func() error {
		fleet := newServers(m, directories)
		defer fleet.stop()
		return fleet.run(ctx, changes)
	})
	return group.Wait()
}

// servers is the servers of a manager. It belongs to one goroutine.
type servers struct {
	manager     *Manager
	directories *directories
	servers     map[string]*running // by resource name
	// retired are resources that had a server, and Functions that may still be in pods.
	retired map[string]bool
	// assigned gets what pods have, after [servers.ask].
	assigned chan map[string]podresources.Assignment
	group    sync.WaitGroup
}

func newServers(m *Manager, d *directories) *servers {
	return &servers{
		manager: m, directories: d, servers: map[string]*running{}, retired: map[string]bool{},
		assigned: make(chan map[string]podresources.Assignment, 1),
	}
}

// running is a server and how to end it.
type running struct {
	*server
	stop context.CancelFunc
}

func (f *servers) run(ctx context.Context, changes <-chan struct{}) error {
	sweep := time.NewTicker(sweepEvery)
	defer sweep.Stop()
	for {
		if pools, known := f.manager.Pools.Pools(); known {
			f.follow(ctx, pools)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-sweep.C:
			f.ask(ctx)
			continue
		case assigned := <-f.assigned:
			f.sweep(assigned)
			continue
		case <-changes:
		}
		if !loop.Sleep(ctx, settle) {
			return nil
		}
	}
}

// follow has a server for every pool that has Functions, or had some: a resource that disappears while pods have it
// would keep its old capacity in the Node for minutes, one that is empty has none at once.
func (f *servers) follow(ctx context.Context, pools []pool.Pool) {
	offered := map[string]bool{}
	offer := func(p pool.Pool) {
		resource := p.ResourceName()
		if p.Spec.Publish != v1alpha1.PublishDevicePlugin || offered[resource] {
			return
		}
		r, runs := f.servers[resource]
		if !runs && len(p.Functions) == 0 {
			return
		}
		offered[resource] = true
		if runs {
			r.update(p)
			return
		}
		f.start(ctx, resource, p)
	}
	// A pool that cannot be used is empty. It comes last, as it may claim the resource of one that can.
	for _, p := range pools {
		if p.Err == nil {
			offer(p)
		}
	}
	for _, p := range pools {
		if p.Err != nil {
			offer(p)
		}
	}
	for resource, r := range f.servers {
		if !offered[resource] {
			f.retire(resource, r)
		}
	}
}

func (f *servers) start(ctx context.Context, resource string, p pool.Pool) {
	ctx, stop := context.WithCancel(ctx)
	s := newServer(f.manager, f.directories, resource, p)
	f.servers[resource] = &running{server: s, stop: stop}
	delete(f.retired, resource)
	f.group.Go(func() { s.run(ctx) })
}

// retire ends a server whose pool is gone. Pods keep what they have.
func (f *servers) retire(resource string, r *running) {
	r.empty()
	// The kubelet reads that before it loses the server.
	time.AfterFunc(stopTimeout, r.stop)
	r.metrics.forget()
	delete(f.servers, resource)
	f.retired[resource] = true
}

// stop waits until all goroutines have ended. The context of their run has ended already.
func (f *servers) stop() {
	for _, r := range f.servers {
		r.stop()
	}
	f.group.Wait()
}

// allocateBudget says how long an Allocate may wait. The zero value is ready for use.
type allocateBudget struct {
	mutex  sync.Mutex
	vainly time.Time // when an Allocate last waited in vain
}

// timeout is the time for the next Allocate, of which usual is the longest.
func (p *allocateBudget) timeout(usual time.Duration) time.Duration {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if !p.vainly.IsZero() && time.Since(p.vainly) < impatience {
		return usual / 5
	}
	return usual
}

// ended says how an Allocate ended that had this context.
func (p *allocateBudget) ended(ctx context.Context, err error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	switch {
	case err == nil:
		p.vainly = time.Time{}
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		p.vainly = time.Now()
	}
}
