package bridge_test

import (
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

func BenchmarkGrowth(b *testing.B) {
	for _, size := range []int{10, 1000, 4000} {
		b.Run(fmt.Sprintf("ports=%d", size), func(b *testing.B) { growth(b, size) })
	}
}

func growth(b *testing.B, size int) {
	const perNetwork = 100
	n := netns.New(b)
	for i := range size + 1 {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = fmt.Sprintf("rep-%d", i)
		must.Succeed(b, n.Handle().LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: fmt.Sprintf("vf-%d", i)}))
	}
	var agent *bridge.Agent
	must.Succeed(b, n.Do(func() (err error) {
		agent, err = bridge.New(bridge.Config{State: filepath.Join(b.TempDir(), "state.db"), SourceFilter: true}, logr.Discard())
		return err
	}))
	defer agent.Close()
	defer must.Run(b, agent.Run)()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(b, err)
	server := agent.NewServer()
	go func() { _ = server.Serve(lis) }()
	defer server.Stop()
	conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must.Succeed(b, err)
	defer conn.Close()
	networks, ports := evpn.NewLogicalBridgeServiceClient(conn), evpn.NewBridgePortServiceClient(conn)
	create := func(i int) {
		network := fmt.Sprintf("net-%d", i/perNetwork)
		port, err := ports.CreateBridgePort(b.Context(), &evpn.CreateBridgePortRequest{BridgePortId: fmt.Sprintf("rep-%d", i), BridgePort: &evpn.BridgePort{Spec: &evpn.BridgePortSpec{
			MacAddress: []byte{2, 0, 0, 0, byte(i >> 8), byte(i)}, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
			LogicalBridges: []string{"//network.opiproject.org/bridges/" + network},
		}}})
		must.Succeed(b, err)
		if port.GetStatus().GetOperStatus() != evpn.BPOperStatus_BP_OPER_STATUS_UP {
			b.Fatal(port)
		}
	}
	for i := range size {
		if i%perNetwork == 0 {
			_, err := networks.CreateLogicalBridge(b.Context(), &evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: fmt.Sprintf("net-%d", i/perNetwork), LogicalBridge: &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: uint32(i/perNetwork + 1)}},
			})
			must.Succeed(b, err)
		}
		create(i)
	}
	var up, down time.Duration
	rounds := 0
	_, err = ports.DeleteBridgePort(b.Context(), &evpn.DeleteBridgePortRequest{Name: fmt.Sprintf("//network.opiproject.org/ports/rep-%d", size-1)})
	must.Succeed(b, err)
	for b.Loop() {
		begin := time.Now()
		create(size - 1)
		up += time.Since(begin)
		rounds++
		begin = time.Now()
		_, err := ports.DeleteBridgePort(b.Context(), &evpn.DeleteBridgePortRequest{Name: fmt.Sprintf("//network.opiproject.org/ports/rep-%d", size-1)})
		must.Succeed(b, err)
		down += time.Since(begin)
	}
	b.ReportMetric(float64(up.Microseconds())/float64(rounds), "us/create")
	b.ReportMetric(float64(down.Microseconds())/float64(rounds), "us/delete")
}
