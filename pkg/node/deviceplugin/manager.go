// Package deviceplugin offers the Functions of pools with publish: DevicePlugin to the kubelet as extended resources,
// through its device plugin API (v1beta1): one server per resource, which says what there is and what is wrong with
// it, which Functions go well together, and what a container gets of those it was given.
//
// Data flows in two directions only. When pools or health change, [servers] starts, updates and retires servers, and
// each [server] publishes an [offer] that ListAndWatch sends to the kubelet. When the kubelet may not find a server any
// more, the server's resource goes into a queue, and the server opens a new [endpoint].
package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/node/devnode"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
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

// Assignments knows which pods have which Functions.
type Assignments interface {
	// Assigned returns what pods have, by [function.ID.String].
	Assigned(ctx context.Context) (map[string]podresources.Assignment, error)
}

// Manager runs a server for every resource of the node's pools. CDI, Assignments and AllocateTimeout may be left out.
type Manager struct {
	// KubeletDir is the kubelet's, "/var/lib/kubelet". It has the same path here as for the kubelet.
	KubeletDir string
	Pools      Pools
	Health     Health
	Allocator  Allocator
	// Nodes looks up the device nodes that containers get.
	Nodes devnode.Finder
	// DeviceInfoDir is where the device-info files of device plugins are, "/var/run/k8s.cni.cncf.io/devinfo/dp". It is made
	// when it is needed.
	DeviceInfoDir string
	// CDI, where set, gives containers their device nodes; without, they get them from the kubelet.
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

	unwatchedFor time.Duration // replaces the constant of this name where it is set
}

// Run serves the pools as they are at once and after every value from changes, which comes when pools or health may
// have changed. It ends with ctx, and with an error only if it cannot work at all.
func (m *Manager) Run(ctx context.Context, changes <-chan struct{}) error {
	all := newServers(m)
	defer all.queue.ShutDown()
	sockets, err := watchdir.Open(all.socketDir, all.socketRemoved)
	if err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	defer sockets.Close()
	if err := watchSockets(sockets, all.socketDir); err != nil {
		return fmt.Errorf("device plugin: %w", err)
	}
	removeStaleSockets(all.socketDir, m.Log)

	var loops sync.WaitGroup
	loops.Go(func() { all.followPools(ctx, changes) })
	loops.Go(func() { all.followSockets(ctx, sockets) })
	loops.Go(func() { all.keepRegistered(ctx) })
	loops.Go(func() { all.sweepRegularly(ctx) })
	<-ctx.Done()
	all.queue.ShutDown()
	loops.Wait()
	all.close()
	return nil
}

func (m *Manager) allocateTimeout() time.Duration {
	return cmp.Or(m.AllocateTimeout, allocateTimeout)
}

func (m *Manager) firstPatience() time.Duration {
	return cmp.Or(m.unwatchedFor, unwatchedFor)
}
