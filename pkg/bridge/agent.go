package bridge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"
	"k8s.io/client-go/util/workqueue"
)

// Config is what an Agent needs to know.
type Config struct {
	State     string    // the file that holds what clients asked for; made if missing
	Uplink    string    // name of the netdev that VXLAN is sent from; empty: networks with a VNI are refused
	DataPlane DataPlane // empty is DataPlaneAuto
	// HostPFs are the PFs of the host that the xPU serves. Without any, PCI addresses are this machine's own.
	HostPFs []HostPF
}

// Agent keeps networks and ports as clients want them. Its methods may be called from several goroutines at once.
type Agent struct {
	cfg   Config
	log   logr.Logger
	plane dataplane
	store *store
	tasks workqueue.TypedRateLimitingInterface[task] // for Run

	mu       sync.RWMutex // also serialises all work on the data plane
	networks map[string]*network
	ports    map[string]*port
}

// object is what a LogicalBridge and a BridgePort have in common.
type object struct {
	deleting bool
	failure  error // why it is not realised, or not removed; nil if it is
}

func (o *object) failed() bool { return o.failure != nil }

// network is a LogicalBridge.
type network struct {
	object
	spec *evpn.LogicalBridgeSpec
}

func (n *network) hasVNI() bool { return n.spec.Vni != nil }

// port is a BridgePort.
type port struct {
	object
	spec *evpn.BridgePortSpec
}

// networks are the ids of the port's networks, sorted: one unless it is a trunk.
func (p *port) networks() []string {
	ids := make([]string, len(p.spec.GetLogicalBridges()))
	for i, name := range p.spec.GetLogicalBridges() {
		ids[i] = path.Base(name)
	}
	return ids
}

func (p *port) in(network string) bool { return slices.Contains(p.networks(), network) }

func (p *port) trunk() bool { return p.spec.GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK }

// New opens the state and brings the data plane of the calling thread's network namespace to it: it adopts what is
// there, makes what is missing and removes what is ours and not in the state. There may be one Agent in a namespace.
// An object that cannot be realised is no error: it is DOWN, and tried again by Run.
func New(cfg Config, log logr.Logger) (*Agent, error) {
	st, err := openStore(cfg.State)
	if err != nil {
		return nil, err
	}
	plane, err := openDataPlane(cfg, log)
	if err != nil {
		return nil, errors.Join(err, st.close())
	}
	a, err := newAgent(cfg, log, plane, st)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sweep()
	a.reconcile(always, always)
	log.Info("state restored", "networks", len(a.networks), "ports", len(a.ports))
	return a, nil
}

// newAgent loads the state and leaves the data plane as it is. It closes plane and st if it fails.
func newAgent(cfg Config, log logr.Logger, plane dataplane, st *store) (*Agent, error) {
	backoff := workqueue.NewTypedItemExponentialFailureRateLimiter[task](time.Second, 30*time.Second)
	a := &Agent{cfg: cfg, log: log, plane: plane, store: st, tasks: workqueue.NewTypedRateLimitingQueue(backoff)}
	var err error
	if a.networks, a.ports, err = st.load(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// Close ends Run and lets go of the state file. The data plane stays as it is.
func (a *Agent) Close() error {
	a.tasks.ShutDown()
	a.plane.close()
	return a.store.close()
}

// Register adds the agent's services to a gRPC server: LogicalBridgeService, BridgePortService, InventoryService.
func (a *Agent) Register(s grpc.ServiceRegistrar) {
	evpn.RegisterLogicalBridgeServiceServer(s, networkServer{Agent: a})
	evpn.RegisterBridgePortServiceServer(s, portServer{Agent: a})
	inventory.RegisterInventoryServiceServer(s, inventoryServer{root: "/"})
}

// sweep removes what is ours and not in the state. What cannot be removed is left for the next start: it must not keep
// the rest from being served.
func (a *Agent) sweep() {
	ports := map[string]membership{}
	for id, p := range a.ports {
		if !p.deleting {
			ports[id] = a.membership(p)
		}
	}
	if err := a.plane.sweep(slices.Collect(maps.Keys(a.networks)), ports); err != nil {
		a.log.Error(err, "remove what is not in the state")
	}
}

// idsWhere returns the ids, sorted, of the objects that have a property.
func idsWhere[O any](objects map[string]*O, property func(*O) bool) []string {
	var ids []string
	for id, o := range objects {
		if property != nil && property(o) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// task is something that Run looks at again. Looking more often than needed does no harm.
type task struct {
	kind taskKind
	id   string // of taskNetwork and taskPort; for a port it may be the name of a netdev that is no port's
}

type taskKind int

const (
	taskAll     taskKind = iota // events were lost, or the bridge of all networks changed
	taskUplink                  // the uplink or an address changed: networks with a VNI
	taskNetwork                 // one network
	taskPort                    // one port
	taskArrival                 // a new netdev may be the representor of a port that failed
	taskRetry                   // everything that failed
)

// Run follows what happens to netdevs and keeps the data plane as it has to be, until the context ends (nil) or the
// events do (an error). It may be called once.
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
		a.perform(t)
		a.tasks.Done(t)
	}
}

func (a *Agent) perform(t task) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch t.kind {
	case taskAll:
		a.reconcile(always, always)
	case taskUplink:
		a.reconcile((*network).hasVNI, nil)
	case taskNetwork:
		a.reconcileNetwork(t.id)
	case taskPort:
		a.reconcilePort(t.id)
	case taskArrival:
		a.reconcile(nil, (*port).failed)
		a.retrySoon() // a driver may tell later whose representor it is, without an event
	case taskRetry:
		if a.retry() {
			a.tasks.AddRateLimited(t)
		}
	}
}

// retry looks again at everything that failed, and tells whether there still is something.
func (a *Agent) retry() bool {
	a.reconcile((*network).failed, (*port).failed)
	return len(idsWhere(a.networks, (*network).failed))+len(idsWhere(a.ports, (*port).failed)) > 0
}

// retrySoon has Run retry in a second, and from then on after 2, 4 ... 30 s: something failed anew, or what was in its way
// may be gone. A retry that is due sooner is not put off. Most failures end with an event, but not all: the kernel tells
// nobody of a new alternative name of a netdev that is down (netdev_state_change).
func (a *Agent) retrySoon() {
	a.tasks.Forget(task{kind: taskRetry})
	a.tasks.AddRateLimited(task{kind: taskRetry})
}

// reconcile brings the networks and then the ports that have a property to what they have to be, in the order of their
// ids. No object has the property nil.
func (a *Agent) reconcile(networks func(*network) bool, ports func(*port) bool) {
	for _, id := range idsWhere(a.networks, networks) {
		a.reconcileNetwork(id)
	}
	for _, id := range idsWhere(a.ports, ports) {
		a.reconcilePort(id)
	}
}

// always is the property of all objects.
func always[O any](*O) bool { return true }

// reconcileNetwork brings one network, if it exists, to what it has to be, and keeps the reason if it cannot.
func (a *Agent) reconcileNetwork(id string) {
	n := a.networks[id]
	if n == nil {
		return
	}
	if n.deleting {
		a.keepOutcome("network", id, &n.object, finish(a, a.networks, networkKind, id, a.plane.removeNetwork))
		return
	}
	made, err := a.plane.ensureNetwork(a.segment(id))
	a.keepOutcome("network", id, &n.object, err)
	if made {
		a.reconcilePortsOf(id)
	}
}

func (a *Agent) reconcilePortsOf(network string) {
	a.reconcile(nil, func(p *port) bool { return p.in(network) })
}

// segment describes a network to the data plane. One that is missing from the state has VLAN id 0, which no network has.
func (a *Agent) segment(id string) segment {
	s := segment{id: id}
	if n := a.networks[id]; n != nil {
		s.vlan, s.vni = uint16(n.spec.GetVlanId()), n.spec.GetVni()
	}
	return s
}

// membership is what a port has to be in.
func (a *Agent) membership(p *port) membership {
	m := membership{mac: p.spec.GetMacAddress(), trunk: p.trunk()}
	for _, id := range p.networks() {
		m.networks = append(m.networks, a.segment(id))
	}
	return m
}

// reconcilePort brings one port, if it exists, to what it has to be, and keeps the reason if it cannot.
func (a *Agent) reconcilePort(id string) {
	p := a.ports[id]
	if p == nil {
		return
	}
	if p.deleting {
		a.keepOutcome("port", id, &p.object, finish(a, a.ports, portKind, id, a.plane.detach))
		return
	}
	a.keepOutcome("port", id, &p.object, a.plane.attach(id, a.membership(p)))
}

// deleteObject begins to delete an object: dying, which says that it is being deleted, is in the state before the data plane is
// touched.
func (a *Agent) deleteObject(k kind, id string, o *object, dying proto.Message, reconcile func(id string)) (*emptypb.Empty, error) {
	if !o.deleting {
		if err := a.store.put(k, id, dying); err != nil {
			return nil, err
		}
		o.deleting = true
	}
	reconcile(id)
	if o.failure != nil {
		return nil, status.Errorf(codes.Internal, "%s %s is not deleted yet, the agent keeps trying: %v", k.word, id, o.failure)
	}
	return &emptypb.Empty{}, nil
}

// finish removes an object that is to be deleted from the data plane, and then from the state.
func finish[O any](a *Agent, objects map[string]O, k kind, id string, remove func(id string) error) error {
	if err := remove(id); err != nil {
		return err
	}
	if err := a.store.remove(k, id); err != nil {
		return err
	}
	delete(objects, id)
	a.retrySoon() // another network may want its VLAN, another port its representor
	return nil
}

// keepOutcome keeps the outcome of an attempt. One that is another than before is logged, and has Run try again if it is
// a failure.
func (a *Agent) keepOutcome(what, id string, o *object, failure error) {
	before := o.failure
	o.failure = failure
	switch {
	case failure != nil && (before == nil || before.Error() != failure.Error()):
		a.log.Info(what+" is down", "id", id, "reason", failure.Error())
		a.retrySoon()
	case failure == nil && before != nil:
		a.log.Info(what+" is as wanted again", "id", id)
	}
}

// failureOf is why a port is not in service: its own failure, or that of one of its networks.
func (a *Agent) failureOf(p *port) error {
	if p.failure != nil {
		return p.failure
	}
	for _, id := range p.networks() {
		n := a.networks[id]
		if n == nil {
			return fmt.Errorf("%s is missing", id)
		}
		if n.failure != nil {
			return fmt.Errorf("%s is down: %w", id, n.failure)
		}
	}
	return nil
}
