// SPDX-License-Identifier: Apache-2.0

// Package opitest has an OPI agent for tests, and tests that every OPI agent and the client must
// pass together.
//
// The agent is a real gRPC server that behaves like opi-evpn-bridge was observed to, with all
// oddities: Create proves nothing, most errors are Unknown, and references are left behind. The
// tests of this package have one case for each observation.
package opitest

import (
	"context"
	"crypto/tls"
	"errors"
	"maps"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	netcommon "github.com/opiproject/opi-api/network/opinetcommon/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

// Behaviour configures an [Agent]. The zero value is a healthy reference agent that brings up and
// tears down everything at once.
type Behaviour struct {
	UpDelay    time.Duration // from Create to UP
	Held       bool          // nothing comes UP while this is set
	DeleteTail time.Duration // from Delete to gone
	Latency    time.Duration // added to each RPC
	// Gates holds back each call of an RPC, by name, until the channel is closed. The agent carries
	// the call out even if the client gives up.
	Gates map[string]<-chan struct{}
	// StuckDelete keeps deleted objects as TO_BE_DELETED with an error, forever, like the reference
	// agent does with a representor of a real VF.
	StuckDelete bool
	// Realise decides whether the port with this id comes UP; nil means always. Its error becomes
	// the component's details.
	Realise func(id string) error
	// RealiseGateway is like Realise, for VRFs and gateways.
	RealiseGateway func(id string) error
	// Persistent is a reference agent that uses redis: after a crash, objects have their old
	// status, UP is not verified, and other states are not retried until the object is updated.
	Persistent bool
	// KeepOnStop keeps all objects at a graceful stop.
	KeepOnStop bool
	// Blind makes Get succeed for every name without any fields, like an Intel agent does. List is
	// empty.
	Blind bool
	// Untold leaves out the type and the networks of a port, and the addresses of a gateway, in Get
	// and List.
	Untold bool
	// LeavesOut is the id of a network that is missing among the networks of ports in Get and List.
	LeavesOut string
	// ProtoNames names objects "bridgePorts/{id}" and "logicalBridges/{id}", like the API's
	// comments.
	ProtoNames bool
	// FailsFirst is how long a new port or network is in error before the agent retries by itself
	// and succeeds.
	FailsFirst time.Duration
	// Hung leaves every RPC unanswered, while connections stay up.
	Hung bool
	// Endless makes every page of a list announce another.
	Endless bool
	// ForgetPages rejects every page token, like after a restart.
	ForgetPages bool
	// HostPFs are the PFs of the host that the agent reports like opi-bridge, each as
	// [opi.HostPF.String]. Without any, the agent has no grpc.health.v1 and its inventory ends the
	// process, like the reference agent.
	HostPFs []string
	// Options makes the agent like opi-bridge: it accepts options of networks and ports, has
	// grpc.health.v1, brings up VRFs with any id, and takes gateways with IPv6 addresses. MTU is
	// the largest MTU that it reports for networks.
	Options bool

	// NoShared makes the agent like an opi-bridge of before addresses were shared by several xPUs.
	NoShared bool
	MTU      uint32
	// V02 is opi-evpn-bridge v0.2.0, which is part of OPI's own release; see v02.go. Its Get of a
	// port returns only the MAC address. An error of Realise means a missing representor. After a
	// restart it has all objects, but lists none of them.
	V02 bool
	// Unimplemented lists RPCs that are not served, such as "GetBridgePort".
	Unimplemented []string
}

// Agent is an OPI agent on a loopback address. Its methods are safe for concurrent use.
type Agent struct {
	address string

	mu        sync.Mutex
	server    *grpc.Server
	served    sync.WaitGroup
	behaviour Behaviour
	faults    map[string][]fault
	calls     map[string]int
	changing  map[string]int // running calls that change an object, by its id
	overlaps  int

	networks, ports, vrfs, gateways table
	// whether any existed since the agent started
	networksEver, portsEver, gatewaysEver bool

	pages map[string]int // by page token, where the page of ports begins
}

// fault replaces or follows the work of one call of an RPC.
type fault struct {
	err    error
	commit bool
}

// Start runs an agent until the test ends.
func Start(t testing.TB) *Agent {
	t.Helper()
	a, err := New()
	if err != nil {
		t.Fatalf("OPI agent: %v", err)
	}
	t.Cleanup(func() { a.Kill() })
	return a
}

// New runs an agent until [Agent.Stop] or [Agent.Kill].
func New() (*Agent, error) {
	a := &Agent{address: "127.0.0.1:0", faults: map[string][]fault{}, calls: map[string]int{},
		changing: map[string]int{}}
	a.forget()
	return a, a.Run()
}

// Installation is the installation of the agent's clients. Its networks have ids such as
// "net-blue".
const Installation opi.Installation = "net"

// Config returns the configuration for a client of the agent.
func (a *Agent) Config() opi.Config {
	return opi.Config{Endpoint: a.address, Dialect: evpngw.Dialect(), Installation: Installation,
		FailedGrace: 100 * time.Millisecond}
}

// Set changes the behaviour from the next call on.
func (a *Agent) Set(change func(*Behaviour)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.behaviour)
}

// FailNext makes the next n calls of the RPC, such as "CreateBridgePort", fail without any effect.
func (a *Agent) FailNext(rpc string, n int, code codes.Code, message string) {
	a.fault(rpc, n, fault{err: status.Error(code, message)})
}

// DropNext makes the next n calls of the RPC take effect but return Unavailable, like a connection
// that is lost after the commit.
func (a *Agent) DropNext(rpc string, n int) {
	a.fault(rpc, n, fault{err: status.Error(codes.Unavailable, "connection lost"), commit: true})
}

func (a *Agent) fault(rpc string, n int, f fault) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.faults[rpc] = append(a.faults[rpc], slices.Repeat([]fault{f}, n)...)
}

// Calls returns how often the RPC was called, including failed calls.
func (a *Agent) Calls(rpc string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls[rpc]
}

// Overlaps returns how often a call to change an object arrived while another one was running.
func (a *Agent) Overlaps() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.overlaps
}

// changes registers a call that changes an object until end is called. The caller must hold the
// lock for both.
func (a *Agent) changes(req any) (end func()) {
	id := ""
	switch req := req.(type) {
	case *evpn.CreateBridgePortRequest:
		id = req.GetBridgePortId()
	case *evpn.UpdateBridgePortRequest:
		id = path.Base(req.GetBridgePort().GetName())
	case *evpn.DeleteBridgePortRequest:
		id = path.Base(req.GetName())
	case *evpn.CreateVrfRequest:
		id = "vrfs/" + req.GetVrfId()
	case *evpn.DeleteVrfRequest:
		id = "vrfs/" + path.Base(req.GetName())
	case *evpn.CreateSviRequest:
		id = "svis/" + req.GetSviId()
	case *evpn.DeleteSviRequest:
		id = "svis/" + path.Base(req.GetName())
	default:
		return func() {}
	}

	if a.changing[id]++; a.changing[id] > 1 {
		a.overlaps++
	}

	return func() { a.changing[id]-- }
}

// RunTLS is like Run, with TLS. For mutual TLS, the configuration requests client certificates.
func (a *Agent) RunTLS(cfg *tls.Config) error {
	return a.Run(grpc.Creds(credentials.NewTLS(cfg)))
}

// Run starts the agent again at the same address after Stop or Kill.
func (a *Agent) Run(opts ...grpc.ServerOption) error {
	lis, err := listen(a.address)
	if err != nil {
		return err
	}

	a.mu.Lock()
	defer a.mu.Unlock()

	a.address = lis.Addr().String()
	server := grpc.NewServer(append(opts, grpc.UnaryInterceptor(a.intercept))...)
	a.server = server
	evpn.RegisterLogicalBridgeServiceServer(server, networkServer{agent: a})
	evpn.RegisterBridgePortServiceServer(server, portServer{agent: a})
	evpn.RegisterVrfServiceServer(server, vrfServer{agent: a})
	evpn.RegisterSviServiceServer(server, gatewayServer{agent: a})
	inventory.RegisterInventoryServiceServer(server, inventoryServer{agent: a})
	healthpb.RegisterHealthServer(server, healthServer{agent: a})
	opibridge.RegisterOptionsServiceServer(server, optionsServer{agent: a})
	a.served.Go(func() { _ = server.Serve(lis) })

	return nil
}

// listen waits until the port is free, because some connection may use it as its local port while
// the agent is stopped.
func listen(address string) (lis net.Listener, err error) {
	free := func(context.Context) (bool, error) {
		lis, err = net.Listen("tcp", address)
		return !errors.Is(err, syscall.EADDRINUSE), nil
	}
	_ = wait.PollUntilContextTimeout(context.Background(), 10*time.Millisecond, 5*time.Second,
		true, free)
	return lis, err
}

// Stop stops the agent like SIGTERM: it deletes all of its objects, unless KeepOnStop is set.
func (a *Agent) Stop() {
	a.end()
	a.mu.Lock()
	defer a.mu.Unlock()

	switch {
	case a.behaviour.V02:
		a.restartedV02()
	case !a.behaviour.KeepOnStop:
		a.forget()
	}
}

// Kill stops the agent like SIGKILL: it loses all of its objects, unless it is Persistent.
func (a *Agent) Kill() {
	a.end()
	a.mu.Lock()
	defer a.mu.Unlock()

	switch {
	case a.behaviour.V02:
		a.restartedV02()
		return
	case !a.behaviour.Persistent:
		a.forget()
		return
	}

	a.settle()
	for _, objects := range []table{a.networks, a.ports, a.vrfs, a.gateways} {
		for _, o := range objects {
			o.upAt, o.goneAt = time.Time{}, time.Time{}
		}
	}
}

func (a *Agent) end() {
	a.mu.Lock()
	server := a.server
	a.mu.Unlock()
	server.Stop()
	a.served.Wait()
}

func (a *Agent) forget() {
	a.networks, a.ports, a.vrfs, a.gateways = table{}, table{}, table{}, table{}
	a.pages = map[string]int{}
	a.networksEver, a.portsEver, a.gatewaysEver = false, false, false
}

// Ports returns the ids of all ports, sorted.
func (a *Agent) Ports() []string { return a.ids(&a.ports) }

// Lose removes a port, as if another client had deleted it.
func (a *Agent) Lose(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, n := range a.networks {
		maps.DeleteFunc(n.macs, func(_, port string) bool { return port == id })
	}
	delete(a.ports, id)
}

// LoseNetwork removes a network that may have ports, as if another client had deleted it and the
// agent had allowed that.
func (a *Agent) LoseNetwork(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.networks, id)
}

// SentVTEP returns the VXLAN tunnel endpoint with which a network was created, or nil.
func (a *Agent) SentVTEP(network string) *netcommon.IPPrefix {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.networks[network] == nil {
		return nil
	}
	return a.networks[network].network.GetVtepIpPrefix()
}

// Networks returns the ids of all logical bridges, sorted.
func (a *Agent) Networks() []string { return a.ids(&a.networks) }

func (a *Agent) ids(objects *table) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.settle()
	return slices.Sorted(maps.Keys(*objects))
}

func (a *Agent) intercept(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	rpc := path.Base(info.FullMethod)
	a.mu.Lock()
	a.calls[rpc]++
	latency, hung, gate := a.behaviour.Latency, a.behaviour.Hung, a.behaviour.Gates[rpc]
	end := a.changes(req)
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		end()
	}()

	unimplemented := slices.Contains(a.behaviour.Unimplemented, rpc)
	var f fault
	if next := a.faults[rpc]; len(next) > 0 {
		f, a.faults[rpc] = next[0], next[1:]
	}

	a.mu.Unlock()

	if hung {
		<-ctx.Done()
		return nil, status.FromContextError(ctx.Err()).Err()
	}

	switch {
	case latency > 0 && !loop.Sleep(ctx, latency): // the client has given up
		return nil, status.FromContextError(ctx.Err()).Err()
	case unimplemented:
		return nil, status.Errorf(codes.Unimplemented, "method %s not implemented", rpc)
	case f.err != nil && !f.commit:
		return nil, f.err
	}

	if gate != nil {
		<-gate
	}
	a.mu.Lock()
	a.settle()
	reply, err := handle(ctx, req)
	a.mu.Unlock()
	if err == nil && f.commit {
		return nil, f.err
	}

	return reply, err
}

// table holds the objects of one kind by id.
type table map[string]*object

// object is a LogicalBridge, a BridgePort, a Vrf or an Svi. Its state changes with time; see
// [Agent.settle].
type object struct {
	network *evpn.LogicalBridgeSpec // one of these four is set
	port    *evpn.BridgePortSpec
	vrf     *evpn.VrfSpec
	gateway *evpn.SviSpec
	up      bool
	failure string    // details of the component in state ERROR, if any
	upAt    time.Time // zero if never by itself
	dying   bool
	goneAt  time.Time // zero while being deleted means never
	// of a network: the ports that the agent believes to be on it, by MAC address. Update does not
	// move them, and a failed Create leaves some behind.
	macs     map[string]string
	unlisted bool // returned only by Get

	networkOptions *opibridge.NetworkOptions
	portOptions    *opibridge.PortOptions
}

// settle updates the state to the current time.
func (a *Agent) settle() {
	now := time.Now()
	due := func(at time.Time) bool { return !at.IsZero() && !at.After(now) }
	for _, objects := range []table{a.ports, a.gateways, a.networks, a.vrfs} {
		for id, o := range objects {
			switch {
			case o.dying && due(o.goneAt):
				for _, name := range o.port.GetLogicalBridges() {
					if n := a.networks[path.Base(name)]; n != nil {
						delete(n.macs, string(o.port.GetMacAddress()))
					}
				}
				delete(objects, id)
			case !o.dying && !a.behaviour.Held && due(o.upAt):
				o.up, o.upAt, o.failure = true, time.Time{}, ""
				realise := a.behaviour.Realise
				if o.isGateway() {
					realise = a.behaviour.RealiseGateway
				} else if o.port == nil {
					realise = nil
				}
				if realise == nil {
					continue
				}
				if err := realise(id); err != nil {
					o.up, o.failure = false, err.Error()
				}
			}
		}
	}
}

func (a *Agent) realise(o *object) {
	o.up, o.failure, o.upAt = false, "", time.Now().Add(a.behaviour.UpDelay)
	if first := a.behaviour.FailsFirst; first > 0 {
		o.failure, o.upAt = "not yet", o.upAt.Add(first)
	}
}

func (a *Agent) kill(o *object) {
	o.dying, o.up = true, false
	if a.behaviour.StuckDelete {
		o.failure = "Failed to delete the link: operation not supported"
		return
	}
	o.goneAt = time.Now().Add(a.behaviour.DeleteTail)
}

func (a *Agent) components(o *object, name string) []*evpn.Component {
	if a.behaviour.V02 {
		return nil
	}

	c := &evpn.Component{
		Name: name, Status: evpn.CompStatus_COMP_STATUS_PENDING, Details: o.failure,
	}
	switch {
	case o.failure != "":
		c.Status = evpn.CompStatus_COMP_STATUS_ERROR
	case o.up:
		c.Status = evpn.CompStatus_COMP_STATUS_SUCCESS
	}

	return []*evpn.Component{c}
}

func unknown(format string, args ...any) error {
	return status.Errorf(codes.Unknown, format, args...)
}

// wellFormed reports whether the reference agent's library accepts a resource name.
func wellFormed(name string) bool {
	rest := strings.TrimPrefix(name, "//")
	return rest != "" && !strings.ContainsAny(rest, " \t{}_") &&
		!slices.Contains(strings.Split(rest, "/"), "")
}

type healthServer struct {
	healthpb.UnimplementedHealthServer
	agent *Agent
}

// Check reports an agent with HostPFs or Options as serving, and the inventory of one with HostPFs.
func (s healthServer) Check(
	ctx context.Context, req *healthpb.HealthCheckRequest,
) (*healthpb.HealthCheckResponse, error) {
	serving := &healthpb.HealthCheckResponse{Status: healthpb.HealthCheckResponse_SERVING}
	has := s.agent.behaviour
	switch {
	case len(has.HostPFs) == 0 && !has.Options:
		return s.UnimplementedHealthServer.Check(ctx, req)
	case req.GetService() == "":
		return serving, nil
	case len(has.HostPFs) == 0 ||
		req.GetService() != inventory.InventoryService_ServiceDesc.ServiceName:
		return nil, status.Error(codes.NotFound, "unknown service")
	}
	return serving, nil
}

type inventoryServer struct {
	inventory.UnimplementedInventoryServiceServer
	agent *Agent
}

// GetInventory ends the agent's process, unless it has HostPFs.
func (s inventoryServer) GetInventory(
	context.Context, *inventory.GetInventoryRequest,
) (*inventory.Inventory, error) {
	if told := s.agent.behaviour.HostPFs; len(told) > 0 {
		has := &inventory.Inventory{
			Pci: []*inventory.PCIeDeviceInfo{
				{Address: "0000:00:1f.0", Class: "0x06", Subsystem: "0x0000"},
			},
		}

		for _, pf := range told {
			has.Pci = append(has.Pci, &inventory.PCIeDeviceInfo{Subsystem: pf})
		}
		return has, nil
	}

	go s.agent.Kill() // Kill waits for this call
	return nil, status.Error(codes.Unavailable, "error reading from server: EOF")
}
