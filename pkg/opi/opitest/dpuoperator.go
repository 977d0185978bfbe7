// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dpuoperator"
)

// Plugin is a vendor's plugin of dpu-operator.
type Plugin string

const (
	// NetSec has the VFs of PF 0. It refuses to create a port twice, and to delete a port that
	// does not exist.
	NetSec Plugin = "Intel NetSec"
	// Marvell creates a port again, and refuses to delete a port that does not exist.
	Marvell Plugin = "Marvell"
	// IPU has three VFs, which it knows by the second byte of the MAC address, and VLANs from 2.
	// It answers a second Create with the port that it has. It deletes what does not exist.
	IPU Plugin = "Intel IPU"
	// Mock accepts everything and keeps nothing.
	Mock Plugin = "mock"
)

// Plugins are all plugins.
func Plugins() []Plugin { return []Plugin{NetSec, Marvell, IPU, Mock} }

// DPUOperator is the DPU side of dpu-operator on a loopback address. It serves no calls but Create,
// Delete and Ping. Its methods are safe for concurrent use.
type DPUOperator struct {
	evpn.UnimplementedBridgePortServiceServer
	plugin  Plugin
	address string
	server  *grpc.Server
	served  sync.WaitGroup

	mu     sync.Mutex
	ports  map[string]*evpn.BridgePortSpec // by name
	calls  []string                        // "create host0-1", "delete host0-1"
	refuse map[string]string               // error text by call
	drop   map[string]int                  // calls to carry out without an answer
	slow   time.Duration                   // of Create
}

// StartDPUOperator runs the agent with a plugin until the test ends.
func StartDPUOperator(t testing.TB, plugin Plugin) *DPUOperator {
	t.Helper()
	d := &DPUOperator{
		plugin: plugin, address: "127.0.0.1:0", ports: map[string]*evpn.BridgePortSpec{},
		refuse: map[string]string{}, drop: map[string]int{},
	}
	if err := d.Run(); err != nil {
		t.Fatalf("agent of dpu-operator: %v", err)
	}
	t.Cleanup(d.Stop)
	return d
}

// Config returns the configuration for a client of the agent.
func (d *DPUOperator) Config() opi.Config {
	return opi.Config{
		Endpoint: d.address, Dialect: dpuoperator.Dialect(), Installation: Installation,
	}
}

// Run starts the agent again at the same address after Stop.
func (d *DPUOperator) Run() error {
	listener, err := listen(d.address)
	if err != nil {
		return err
	}

	d.address = listener.Addr().String()
	d.server = grpc.NewServer()
	server := d.server
	evpn.RegisterBridgePortServiceServer(server, d)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "opi_api.lifecycle.v1alpha1.HeartbeatService", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Ping", Handler: ping}},
	}, d)
	d.served.Go(func() { _ = server.Serve(listener) })

	return nil
}

func ping(
	_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor,
) (any, error) {
	return &emptypb.Empty{}, decode(&emptypb.Empty{})
}

// Stop ends the agent, which keeps its ports.
func (d *DPUOperator) Stop() {
	d.server.Stop()
	d.served.Wait()
}

// Forget removes all ports, like a card that was reset.
func (d *DPUOperator) Forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ports = map[string]*evpn.BridgePortSpec{}
}

// Refuse makes calls such as "delete host0-1" fail with an error of code Unknown. An empty text
// ends that.
func (d *DPUOperator) Refuse(call, text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse[call] = text
}

// Drop makes the next call such as "create host0-1" take effect without an answer.
func (d *DPUOperator) Drop(call string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.drop[call]++
}

// Slow is how long Create takes, even if the client gives up.
func (d *DPUOperator) Slow(duration time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.slow = duration
}

// Ports returns the VLANs of the ports by name.
func (d *DPUOperator) Ports() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	ports := map[string]string{}
	for name, spec := range d.ports {
		ports[name] = spec.GetLogicalBridges()[0]
	}
	return ports
}

// Calls returns the calls so far: "create host0-1", "delete host0-1".
func (d *DPUOperator) Calls() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.calls)
}

// names matches the names of ports.
var names = regexp.MustCompile(`^host(\d+)-(\d+)$`)

// CreateBridgePort implements the RPC.
func (d *DPUOperator) CreateBridgePort(
	_ context.Context, req *evpn.CreateBridgePortRequest,
) (*evpn.BridgePort, error) {
	d.mu.Lock()
	slow := d.slow
	d.mu.Unlock()
	time.Sleep(slow)

	port := req.GetBridgePort()
	return &evpn.BridgePort{}, d.call("create "+port.GetName(), func() error {
		return d.create(port)
	})
}

func (d *DPUOperator) create(port *evpn.BridgePort) error {
	name, spec := port.GetName(), port.GetSpec()
	numbers := names.FindStringSubmatch(name)
	if numbers == nil || len(spec.GetMacAddress()) != 6 || len(spec.GetLogicalBridges()) != 1 {
		return fmt.Errorf("BridgePort %v does not match expected format", port)
	}

	_, exists := d.ports[name]
	switch d.plugin {
	case NetSec:
		if numbers[1] != "0" {
			return fmt.Errorf("PFID %s is not supported", numbers[1])
		}
		if exists {
			return fmt.Errorf("VF Device is already allocated: %s", name)
		}
	case IPU:
		vlan, err := strconv.Atoi(spec.GetLogicalBridges()[0])
		switch {
		case err != nil || vlan < 2 || vlan > 4094:
			return fmt.Errorf("invalid vlanId %q, limits 2 to 4094", spec.GetLogicalBridges()[0])
		case spec.GetMacAddress()[1] == 0:
			return fmt.Errorf("invalid VSI of MAC %s", net.HardwareAddr(spec.GetMacAddress()))
		case exists:
			return nil
		case len(d.ports) == 3:
			return fmt.Errorf("max 3 host VFs")
		}
	case Mock:
		return nil
	}

	d.ports[name] = spec
	return nil
}

// DeleteBridgePort implements the RPC.
func (d *DPUOperator) DeleteBridgePort(
	_ context.Context, req *evpn.DeleteBridgePortRequest,
) (*emptypb.Empty, error) {
	name := req.GetName()
	return &emptypb.Empty{}, d.call("delete "+name, func() error {
		_, exists := d.ports[name]
		switch {
		case !exists && d.plugin == NetSec:
			return fmt.Errorf("VF Device is not allocated: %s", name)
		case !exists && d.plugin == Marvell:
			return fmt.Errorf("ovs-vsctl: no port named %s", name)
		}
		delete(d.ports, name)
		return nil
	})
}

// call carries out a call, and returns its error as the agent does.
func (d *DPUOperator) call(call string, do func() error) error {
	d.mu.Lock()
	defer d.mu.Unlock()

	d.calls = append(d.calls, call)
	if text := d.refuse[call]; text != "" {
		return status.Error(codes.Unknown, text)
	}
	if err := do(); err != nil {
		return status.Error(codes.Unknown, err.Error())
	}
	if d.drop[call] > 0 {
		d.drop[call]--
		return status.Error(codes.Unavailable, "connection lost")
	}

	return nil
}
