// SPDX-License-Identifier: Apache-2.0

// Package service is the OPI agent of opi-bridge: it serves the OPI APIs for networks
// (LogicalBridge) and ports (BridgePort), keeps what clients asked for in a state file, and brings
// the data plane to it.
package service

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
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
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// Config configures an Agent.
type Config struct {
	// State is the file that keeps what clients asked for. It is made if it does not exist.
	State string
	// NewState lets the Agent start with a new State although an agent with another state file has
	// made networks and ports. They are taken out of service.
	NewState bool
	// SourceFilter drops frames that a port sends with another source address than its own.
	SourceFilter bool
	Plane        plane.Config
	// Remotes are where VXLAN is sent to at first: see [Agent.SetRemotes]. They may be nil.
	Remotes *plane.Remotes
	// Stuck is called with true when work takes longer than it should, because the kernel or a
	// driver hangs, and with false when that work has ended after all. It may be nil.
	Stuck func(bool)
	// Tenant returns the client that a port in these networks belongs to, for metrics, or "" if
	// nobody knows. It may be nil.
	Tenant func(port string, networks []string) string
}

// dataPlane makes networks and ports: see [plane.Plane].
type dataPlane interface {
	VLANAware() bool
	// CheckVTEP returns an error that wraps [plane.ErrOtherVTEP] if the uplink of a VNI certainly
	// lacks the address. The address is zero for a network that does not ask for one.
	CheckVTEP(vni uint32, vtep netip.Addr) error
	// PortWithMAC returns the id of the port of the only Function that has the MAC.
	PortWithMAC(mac net.HardwareAddr) (id string, err error)
	EnsureNetwork(plane.Segment) (mtu int, err error)
	RemoveNetwork(id string) error
	Attach(port string, to plane.Membership) error
	Detach(port string) error
	EnsureVRF(plane.VRF) error
	RemoveVRF(id string) error
	EnsureSVI(plane.SVI) error
	IsStale(svi string) bool
	RemoveSVI(plane.SVI) error
	Netdevs() ([]string, error)
	Sweep(plane.Wanted) error
	Watch(emit func(plane.Change)) error
	Close()
}

// sourceFilter drops frames with a false source address: see [plane.SourceFilter].
type sourceFilter interface {
	Sweep() error
	Restore() error
}

// counters count what ports and networks carry: see [plane.Counters].
type counters interface {
	All() (map[plane.Object]plane.Traffic, error)
	Port(id string) (_ plane.Traffic, counted bool, err error)
}

// opened is an open data plane with its parts.
type opened struct {
	plane    dataPlane
	filter   sourceFilter
	counters counters
}

// Agent keeps networks, ports, VRFs and SVIs as clients want them. It is also a
// [prometheus.Collector]. Several goroutines may use it at once.
type Agent struct {
	cfg Config
	log logr.Logger
	opened
	state *boltfile.File
	queue workqueue.TypedRateLimitingInterface[plane.Change] // of Run
	calls *prometheus.HistogramVec
	token chan struct{} // see acquire

	mu       sync.RWMutex // guards the fields below
	networks *collection[*evpn.LogicalBridgeSpec, *evpn.LogicalBridge]
	ports    *collection[*evpn.BridgePortSpec, *evpn.BridgePort]
	vrfs     *collection[*evpn.VrfSpec, *evpn.Vrf]
	svis     *collection[*evpn.SviSpec, *evpn.Svi]

	networkOptions *optionStore[*opibridge.NetworkOptions]
	portOptions    *optionStore[*opibridge.PortOptions]
	// maxMTUs are the largest MTUs with which networks reach other xPUs, by id. A network that
	// stays on this xPU has 0.
	maxMTUs map[string]int

	remotes     *plane.Remotes // may be nil; only work reads and changes it
	sentRemotes *remoteStore
}

// New opens the state file and brings the data plane of the calling thread's network namespace to
// it: it adopts what exists, makes what is missing, and removes what the agent has made but the
// state file does not have. A network namespace can have only one Agent. New returns no error for
// an object that cannot be made: the object is DOWN until Run succeeds with it.
func New(cfg Config, log logr.Logger) (*Agent, error) {
	a, err := newAgent(cfg, log, func() (opened, error) {
		p, err := plane.Open(cfg.Plane, log)
		if err != nil {
			return opened{}, err
		}
		return opened{p, p.SourceFilter(), p.Counters()}, nil
	})
	if err != nil {
		return nil, err
	}

	// Errors are only logged, so that the agent serves the rest. The next start tries again.
	if err := a.plane.Sweep(a.wanted()); err != nil {
		log.Error(err, "remove what is not in the state")
	}

	a.reconcileAll()
	if err := a.filter.Sweep(); err != nil {
		log.Error(err, "remove filters of what is not in the state")
	}

	log.Info("state restored", "networks", len(a.networks.objects), "ports", len(a.ports.objects),
		"VRFs", len(a.vrfs.objects), "SVIs", len(a.svis.objects))
	return a, nil
}

// wanted describes all objects to the data plane.
func (a *Agent) wanted() plane.Wanted {
	want := plane.Wanted{
		Networks: slices.Collect(maps.Keys(a.networks.objects)),
		Ports:    map[string]plane.Membership{},
		VRFs:     slices.Collect(maps.Keys(a.vrfs.objects)),
		SVIs:     map[string]plane.SVI{},
	}

	for id, p := range a.ports.objects {
		if !p.deleting {
			want.Ports[id] = a.membership(id, p.spec)
		}
	}

	for id, s := range a.svis.objects {
		if !s.deleting {
			want.SVIs[id] = a.svi(id, s.spec)
		}
	}

	return want
}

// newAgent loads the objects and opens the data plane. It does not change the data plane.
func newAgent(
	cfg Config, log logr.Logger, openPlane func() (opened, error),
) (*Agent, error) {
	backoff := workqueue.NewTypedItemExponentialFailureRateLimiter[plane.Change](time.Second,
		30*time.Second)
	a := &Agent{
		cfg: cfg, log: log, queue: workqueue.NewTypedRateLimitingQueue(backoff),
		calls: newCallDurations(), token: make(chan struct{}, 1), maxMTUs: map[string]int{},
		remotes: cfg.Remotes,
	}

	a.token <- struct{}{}
	a.networkOptions = newOptionStore(a, networkNames, checkNetworkOptions)
	a.portOptions = newOptionStore(a, portNames, checkPortOptions)
	a.sentRemotes = newRemoteStore(a)
	a.networks = newCollection(a, networkNames, networkSchema{}, networkController{a},
		severalOptions{a.networkOptions, a.sentRemotes})
	a.ports = newCollection(a, portNames, portSchema{}, portController{a}, a.portOptions)
	a.vrfs = newCollection(a, vrfNames, vrfSchema{}, vrfController{a}, noOptions{})
	a.svis = newCollection(a, sviNames, sviSchema{}, sviController{a}, noOptions{})

	isNew, err := a.openState()
	if err != nil {
		return nil, err
	}
	if a.opened, err = openPlane(); err != nil {
		return nil, errors.Join(err, a.state.Close())
	}

	if isNew {
		if err := a.initState(); err != nil {
			return nil, errors.Join(err, a.Close())
		}
	}

	return a, nil
}

// Close ends Run and closes the state file. The data plane stays as it is.
func (a *Agent) Close() error {
	a.queue.ShutDown()
	a.plane.Close()
	return a.state.Close()
}

// stuckAfter is how long work takes only if something hangs. The longest work is to reconcile all
// networks and ports once.
const stuckAfter = 20 * time.Second

// acquire waits for the right to work, which only one goroutine has at a time. Work is what changes
// objects or the data plane. The caller must call release at the end of its work. The error is a
// gRPC status that says that ctx ended first.
func (a *Agent) acquire(ctx context.Context) (release func(), err error) {
	select {
	case <-a.token:
	case <-ctx.Done():
		return nil, refusal.New(status.FromContextError(ctx.Err()).Code(), refusal.Busy,
			"the agent is at work on something else: %v", ctx.Err())
	}

	var mu sync.Mutex
	released, reported := false, false
	watchdog := time.AfterFunc(stuckAfter, func() {
		mu.Lock()
		defer mu.Unlock()
		if !released {
			reported = true
			a.reportStuck(true)
		}
	})

	return func() {
		watchdog.Stop()
		mu.Lock()
		defer mu.Unlock()
		if released = true; reported {
			a.reportStuck(false)
		}
		a.token <- struct{}{}
	}, nil
}

func (a *Agent) reportStuck(stuck bool) {
	if stuck {
		a.log.Error(nil, "work takes too long, does the kernel or a driver hang?", "after",
			stuckAfter.String())
	} else {
		a.log.Info("work goes on")
	}
	if a.cfg.Stuck != nil {
		a.cfg.Stuck(stuck)
	}
}
