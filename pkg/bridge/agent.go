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
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Config is what an Agent needs to know.
type Config struct {
	State     string    // the file that holds what clients asked for; made if missing
	Uplink    string    // name of the netdev that VXLAN is sent from; empty: networks with a VNI are refused
	DataPlane DataPlane // empty is DataPlaneAuto
	Root      string    // where the machine's /sys and /proc are; empty is "/"
	// HostPFs are the PFs of the host that the xPU serves. Without any, PCI addresses are this machine's own.
	HostPFs []HostPF
}

// Agent keeps networks and ports as clients want them. Its methods may be called from several goroutines at once.
type Agent struct {
	cfg   Config
	log   logr.Logger
	plane dataplane
	store *store
	// again has Run soon try again what failed: it failed anew, or what was in its way may be gone.
	again chan struct{}

	mu       sync.RWMutex // also serialises all work on the data plane
	networks map[string]*network
	ports    map[string]*port
}

// network is a LogicalBridge.
type network struct {
	spec     *evpn.LogicalBridgeSpec
	deleting bool
	failure  error // why it is not realised, or not removed; nil if it is
}

// port is a BridgePort.
type port struct {
	spec     *evpn.BridgePortSpec
	deleting bool
	failure  error
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
	a := &Agent{cfg: cfg, log: log, plane: plane, store: st, again: make(chan struct{}, 1)}
	if a.networks, a.ports, err = st.load(); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.sweep()
	a.reconcileAll()
	log.Info("state restored", "networks", len(a.networks), "ports", len(a.ports))
	return a, nil
}

// Close ends Run and lets go of the state file. The data plane stays as it is.
func (a *Agent) Close() error {
	a.plane.close()
	return a.store.close()
}

// Register adds the agent's services to a gRPC server: LogicalBridgeService, BridgePortService, InventoryService.
func (a *Agent) Register(s grpc.ServiceRegistrar) {
	evpn.RegisterLogicalBridgeServiceServer(s, networkServer{agent: a})
	evpn.RegisterBridgePortServiceServer(s, portServer{agent: a})
	inventory.RegisterInventoryServiceServer(s, inventoryServer{root: a.cfg.Root})
}

// sweep removes what is ours and not in the state. What cannot be removed is left for the next start: it must not keep
// the rest from being served.
func (a *Agent) sweep() {
	networks, ports := map[string]bool{}, map[string]membership{}
	for id := range a.networks {
		networks[id] = true
	}
	for id, p := range a.ports {
		if !p.deleting {
			ports[id] = a.membership(p)
		}
	}
	if err := a.plane.sweep(networks, ports); err != nil {
		a.log.Error(err, "remove what is not in the state")
	}
}

// Run follows what happens to netdevs and keeps the data plane as it has to be, until the context ends (nil) or the
// events do (an error).
func (a *Agent) Run(ctx context.Context) error {
	var mu sync.Mutex
	todo := newPending()
	wake := make(chan struct{}, 1)
	ended := make(chan error, 1)
	go func() {
		ended <- a.plane.watch(func(c change) {
			mu.Lock()
			todo.add(c)
			mu.Unlock()
			select {
			case wake <- struct{}{}:
			default: // it is awake already
			}
		})
	}()

	retries := newRetries() // New may have left failures
	defer retries.timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ended:
			if ctx.Err() != nil {
				return nil
			}
			return errors.Join(errors.New("opi-bridge: no more netdev events"), err)
		case <-wake:
			mu.Lock()
			now := todo
			todo = newPending()
			mu.Unlock()
			a.apply(now)
			if now.arrival { // a driver may tell later whose representor it is, without an event
				retries.restart()
			}
		case <-a.again:
			retries.restart()
		case <-retries.timer.C:
			if a.retry() {
				retries.next()
			} else {
				retries.end()
			}
		}
	}
}

// retries time attempts at what failed: after 1, 2, 4 ... 30 s. Most failures end with an event and are not waited for,
// but not all: the kernel tells nobody of a new alternative name of a netdev that is down (netdev_state_change).
type retries struct {
	timer  *time.Timer
	pauses *wait.Backoff
	first  bool // the timer runs for the first pause
}

func newRetries() *retries {
	r := &retries{timer: time.NewTimer(0)}
	r.restart()
	return r
}

// restart begins with the first pause. One that has begun goes on, or a reason that comes again and again would put
// the attempt off for ever.
func (r *retries) restart() {
	if r.first {
		return
	}
	r.pauses = loop.Backoff(time.Second, 30*time.Second)
	r.next()
	r.first = true
}

// next begins the next pause.
func (r *retries) next() {
	r.first = false
	r.timer.Reset(r.pauses.Step())
}

// end says that nothing is left to be tried.
func (r *retries) end() { r.first = false }

// retry looks again at everything that failed, and tells whether there still is something.
func (a *Agent) retry() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(a.networks)) {
		if a.networks[id].failure != nil {
			a.reconcileNetwork(id)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(a.ports)) {
		if a.ports[id].failure != nil {
			a.reconcilePort(id)
		}
	}
	for _, n := range a.networks {
		if n.failure != nil {
			return true
		}
	}
	for _, p := range a.ports {
		if p.failure != nil {
			return true
		}
	}
	return false
}

// apply looks again at everything a change names.
func (a *Agent) apply(c *pending) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c.all {
		a.reconcileAll()
		return
	}
	for id, n := range a.networks {
		if c.networks[id] || c.uplink && n.spec.Vni != nil {
			a.reconcileNetwork(id)
		}
	}
	for id, p := range a.ports {
		if c.ports[id] || c.arrival && p.failure != nil {
			a.reconcilePort(id)
		}
	}
}

func (a *Agent) reconcileAll() {
	for _, id := range slices.Sorted(maps.Keys(a.networks)) {
		a.reconcileNetwork(id)
	}
	for _, id := range slices.Sorted(maps.Keys(a.ports)) {
		a.reconcilePort(id)
	}
}

// reconcileNetwork brings one network to what it has to be, and notes why if it cannot.
func (a *Agent) reconcileNetwork(id string) {
	n := a.networks[id]
	if n == nil {
		return
	}
	if n.deleting {
		a.note("network", id, &n.failure, a.finishNetwork(id))
		return
	}
	made, err := a.plane.ensureNetwork(a.segment(id))
	a.note("network", id, &n.failure, err)
	if made {
		a.reconcilePortsOf(id)
	}
}

// reconcilePortsOf makes all ports of a network what they should be.
func (a *Agent) reconcilePortsOf(network string) {
	for id, p := range a.ports {
		if p.in(network) {
			a.reconcilePort(id)
		}
	}
}

// segment of a network that is missing from the state is one that no data plane has.
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

// reconcilePort makes one port what it should be. It ignores the names of other netdevs.
func (a *Agent) reconcilePort(id string) {
	p := a.ports[id]
	if p == nil {
		return
	}
	if p.deleting {
		a.note("port", id, &p.failure, a.finishPort(id))
		return
	}
	a.note("port", id, &p.failure, a.plane.attach(id, a.membership(p)))
}

// finishNetwork removes a network that is to be deleted.
func (a *Agent) finishNetwork(id string) error {
	if err := a.plane.removeNetwork(id); err != nil {
		return err
	}
	if err := a.store.remove(networksBucket, id); err != nil {
		return err
	}
	delete(a.networks, id)
	a.retrySoon() // another network may want its VLAN
	return nil
}

// finishPort removes a port that is to be deleted.
func (a *Agent) finishPort(id string) error {
	if err := a.plane.detach(id); err != nil {
		return err
	}
	if err := a.store.remove(portsBucket, id); err != nil {
		return err
	}
	delete(a.ports, id)
	a.retrySoon() // another port may want its representor
	return nil
}

// note keeps the outcome of an attempt. One that is another than before is logged, and has Run try again if it is a
// failure.
func (a *Agent) note(what, id string, failure *error, now error) {
	before := *failure
	*failure = now
	switch {
	case now != nil && (before == nil || before.Error() != now.Error()):
		a.log.Info(what+" is down", "id", id, "reason", now.Error())
		a.retrySoon()
	case now == nil && before != nil:
		a.log.Info(what+" is as wanted again", "id", id)
	}
}

func (a *Agent) retrySoon() {
	select {
	case a.again <- struct{}{}:
	default: // Run has not seen the one before yet
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
