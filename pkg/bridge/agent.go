// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/util/workqueue"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
)

// Config is what an Agent needs to know.
type Config struct {
	State    string   // the file that holds what clients asked for; made if missing
	NewState bool     // take what an agent with another state file has made out of service
	Uplinks  []Uplink // that VXLAN is sent from; none: networks with a VNI are refused
	Underlay Underlay // empty is UnderlayAuto
	// a directory that has, of what is in /proc/sys, what VXLAN needs to be changed; empty is
	// /proc/sys
	Sysctl    string
	DataPlane DataPlane // empty is DataPlaneAuto
	// SourceFilter drops what ports send with another source address than their own.
	SourceFilter bool
	// HostPFs are the PFs whose Functions clients may have, beside those that an eswitch says are
	// another machine's. A PCI address in a port's id is resolved by these only.
	HostPFs []HostPF
	// Representors are patterns of path.Match: names, or alternative names, of netdevs that may be
	// ports although no eswitch says that they represent a Function for clients.
	Representors []string
	// Stuck is called with true when work takes longer than it should, since the kernel or a driver
	// hangs, and with false when it has ended after all; nil: nobody is told.
	Stuck func(bool)
}

// Agent keeps networks and ports as clients want them, and is a [prometheus.Collector]. Several
// goroutines may use it at once.
type Agent struct {
	cfg   Config
	log   logr.Logger
	plane dataplane
	state *boltfile.File
	tasks workqueue.TypedRateLimitingInterface[task] // for Run
	calls *prometheus.HistogramVec

	work chan struct{} // has what is needed to begin; see begin

	mu       sync.RWMutex // of all below
	networks *collection[*evpn.LogicalBridgeSpec, *evpn.LogicalBridge]
	ports    *collection[*evpn.BridgePortSpec, *evpn.BridgePort]

	networkOptions *optionStore[*opibridge.NetworkOptions]
	portOptions    *optionStore[*opibridge.PortOptions]
	carried        map[string]int // the largest MTU of networks that other xPUs have too, by id
}

// New opens the state file and brings the data plane of the calling thread's network namespace to
// it: it adopts what exists, makes what is missing, and removes what has the agent's mark and is
// not in the state file. A namespace can have one Agent. An object that cannot be realised is DOWN
// until Run succeeds with it; New returns no error for it.
func New(cfg Config, log logr.Logger) (*Agent, error) {
	a, err := newAgent(cfg, log, func() (dataplane, error) { return openDataPlane(cfg, log) })
	if err != nil {
		return nil, err
	}

	ports := map[string]membership{}
	for id, p := range a.ports.objects {
		if !p.deleting {
			ports[id] = a.membership(id, p.spec)
		}
	}

	// An error is only logged, so that the agent serves the rest; the next start tries again.
	if err := a.plane.sweep(slices.Collect(maps.Keys(a.networks.objects)), ports); err != nil {
		log.Error(err, "remove what is not in the state")
	}

	a.reconcileAll()
	if err := a.plane.sweepFilter(); err != nil {
		log.Error(err, "remove filters of what is not in the state")
	}

	log.Info("state restored", "networks", len(a.networks.objects), "ports", len(a.ports.objects))
	return a, nil
}

// newAgent loads the objects and opens the data plane, which it leaves as it is.
func newAgent(cfg Config, log logr.Logger, openPlane func() (dataplane, error)) (*Agent, error) {
	backoff := workqueue.NewTypedItemExponentialFailureRateLimiter[task](time.Second,
		30*time.Second)
	a := &Agent{
		cfg: cfg, log: log, tasks: workqueue.NewTypedRateLimitingQueue(backoff),
		calls: newCallDurations(), work: make(chan struct{}, 1),
		carried: map[string]int{},
	}

	a.work <- struct{}{}
	a.networkOptions = newOptionStore(a, networkKind, checkNetworkOptions)
	a.portOptions = newOptionStore(a, portKind, checkPortOptions)
	a.networks, a.ports = newNetworks(a), newPorts(a)
	fresh, err := a.openState()
	if err != nil {
		return nil, err
	}
	if a.plane, err = openPlane(); err != nil {
		return nil, errors.Join(err, a.state.Close())
	}

	if fresh {
		if err := a.beginState(); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}

	return a, nil
}

// Close ends Run and closes the state file. The data plane stays as it is.
func (a *Agent) Close() error {
	a.tasks.ShutDown()
	a.plane.close()
	return a.state.Close()
}

// task is something that Run reconciles. Reconciling more often than needed does no harm.
type task struct {
	kind taskKind
	// of taskNetwork and taskPort; for a port it may be the name of a netdev that is no port's
	id string
}

type taskKind int

const (
	taskAll     taskKind = iota // events were lost, or the bridge of all networks changed
	taskUplink                  // an uplink or an address of one changed: networks with a VNI
	taskNetwork                 // one network
	taskPort                    // one port
	taskArrival                 // a new netdev may be the representor of a port that failed
	taskFilter                  // somebody changed the source filter
	taskRetry                   // everything that failed
)

// Run follows what happens to netdevs and keeps the data plane as it has to be. It returns nil when
// the context ends, and an error when there are no more events. It may be called once.
func (a *Agent) Run(ctx context.Context) error {
	defer context.AfterFunc(ctx, a.tasks.ShutDown)()
	ended := make(chan error, 1)
	go func() {
		ended <- a.plane.watch(a.tasks.Add)
		a.tasks.ShutDown()
	}()

	for {
		t, shutdown := a.tasks.Get()
		if ctx.Err() != nil {
			return nil
		}
		if shutdown {
			return errors.Join(errors.New("opi-bridge: no more netdev events"), <-ended)
		}

		a.perform(ctx, t)
		a.tasks.Done(t)
	}
}

// stuckAfter is how long work takes only where something is wrong. The longest is to look at all
// networks and ports once.
const stuckAfter = 20 * time.Second

// begin waits until all other work has ended, work being what changes objects or the data plane.
// The caller ends it. The error is a gRPC status that says that ctx ended before.
func (a *Agent) begin(ctx context.Context) (end func(), err error) {
	select {
	case <-a.work:
	case <-ctx.Done():
		return nil, status.Errorf(status.FromContextError(ctx.Err()).Code(),
			"the agent is at work on something else: %v", ctx.Err())
	}

	var mu sync.Mutex
	ended, told := false, false
	watchdog := time.AfterFunc(stuckAfter, func() {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			told = true
			a.stuck(true)
		}
	})

	return func() {
		watchdog.Stop()
		mu.Lock()
		defer mu.Unlock()
		if ended = true; told {
			a.stuck(false)
		}
		a.work <- struct{}{}
	}, nil
}

func (a *Agent) stuck(is bool) {
	if is {
		a.log.Error(nil, "work takes too long, does the kernel or a driver hang?", "after",
			stuckAfter.String())
	} else {
		a.log.Info("work goes on")
	}
	if a.cfg.Stuck != nil {
		a.cfg.Stuck(is)
	}
}

func (a *Agent) perform(ctx context.Context, t task) {
	end, err := a.begin(ctx)
	if err != nil {
		return // Run ends
	}
	defer end()

	switch t.kind {
	case taskAll:
		a.reconcileAll()
	case taskUplink:
		a.networks.reconcileEach(a.networks.by.of(keyVXLAN))
	case taskNetwork:
		a.networks.reconcile(t.id, false)
	case taskPort:
		a.ports.reconcile(t.id, false)
	case taskArrival:
		a.ports.reconcileFailed()
		a.retrySoon() // a driver may tell later whose representor it is, without an event
	case taskFilter:
		if err := a.plane.restoreFilter(); err != nil {
			a.log.Error(err, "restore the source filter")
			a.tasks.AddRateLimited(t)
			return
		}
		a.tasks.Forget(t)
		a.log.Info("somebody changed the source filter, it is as wanted again")
	case taskRetry:
		if a.retry() {
			a.tasks.AddRateLimited(t)
		}
	}
}

// reconcileAll reconciles the networks, and then the ports that are in them.
func (a *Agent) reconcileAll() {
	a.networks.reconcileEach(slices.Clone(a.networks.ids))
	a.ports.reconcileEach(slices.Clone(a.ports.ids))
}

// retry reconciles everything that failed, and tells whether something still fails.
func (a *Agent) retry() bool {
	a.networks.reconcileFailed()
	a.ports.reconcileFailed()
	return len(a.networks.failed)+len(a.ports.failed) > 0
}

// retrySoon has Run retry in a second, and then after 2, 4 ... 30 s. It does not postpone a retry
// that is due sooner. Not every failure ends with an event: the kernel sends none for an
// alternative name of a netdev that is down (netdev_state_change).
func (a *Agent) retrySoon() {
	a.tasks.Forget(task{kind: taskRetry})
	a.tasks.AddRateLimited(task{kind: taskRetry})
}
