// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	opiagent "github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestUplinkOfXPU: that nothing passes the uplink of an xPU, opi-bridge says, and from there it is
// in the XPUNetwork and the XPUPort, by which the node's agent taints the Function.
func TestUplinkOfXPU(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.ResyncPeriod = 200 * time.Millisecond })
	xpu, beyond := netns.New(t), netns.New(t)
	netns.Connect(t, xpu, "p0", beyond, "switch")
	id, err := opi.PortID(vf(0))
	must.Succeed(t, err)
	netns.Connect(t, xpu, id, beyond, "eth0")
	uplink, err := xpu.Handle().LinkByName("p0")
	must.Succeed(t, err)
	address, err := netlink.ParseAddr("198.51.100.1/24")
	must.Succeed(t, err)
	must.Succeed(t, xpu.Handle().AddrAdd(uplink, address))
	far, err := beyond.Handle().LinkByName("switch")
	must.Succeed(t, err)

	c.xpuOn(c.node, "card", serveBridge(t, xpu, opiagent.Config{}))
	network := &v1alpha1.XPUNetwork{}
	network.Name = "blue"
	network.Spec.VLAN, network.Spec.VNI = 100, new(int32(1000))
	network.Spec.AllowedNamespaces.From = v1alpha1.NamespacesFromAll
	c.create(network)
	port := c.up(c.blue("a", 0), vf(0))

	for _, step := range []struct {
		change func() error
		says   string
	}{
		{func() error {
			return beyond.Handle().LinkSetDown(far)
		}, "netdev p0, the uplink, has no carrier"},
		{func() error {
			return xpu.Handle().LinkSetDown(uplink)
		}, "netdev p0, the uplink, is administratively down"},
	} {
		must.Succeed(t, step.change())
		c.networkReason(network, v1alpha1.ReasonFailed, step.says)
		c.portReason(port, v1alpha1.ReasonFailed, step.says)
	}

	must.Succeed(t, errors.Join(xpu.Handle().LinkSetUp(uplink), beyond.Handle().LinkSetUp(far)))
	c.portReason(port, v1alpha1.ReasonUp, "")
	c.networkReason(network, v1alpha1.ReasonUp, "")
}

// serveBridge runs opi-bridge with the uplink p0 in a network namespace, and serves on the test's
// own loopback address.
func serveBridge(t *testing.T, n *netns.Namespace, cfg opiagent.Config) (endpoint string) {
	t.Helper()
	cfg.State = filepath.Join(t.TempDir(), "state.db")
	cfg.Plane.Uplinks = []plane.Uplink{{Name: "p0"}}
	var agent *opiagent.Agent
	must.Succeed(t, n.Do(func() (err error) {
		agent, err = opiagent.New(cfg, logr.Discard())
		return err
	}))

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	server := agent.NewServer()
	alive := health.NewServer()
	healthpb.RegisterHealthServer(server, alive)

	for service := range server.GetServiceInfo() {
		alive.SetServingStatus(service, healthpb.HealthCheckResponse_SERVING)
	}

	ended := make(chan error, 2)
	go func() { ended <- agent.Run(t.Context()) }()
	go func() { ended <- server.Serve(listener) }()

	t.Cleanup(func() { // the context of the test has ended
		server.Stop()
		for range 2 {
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				t.Errorf("opi-bridge: %v", err)
			}
		}
		must.Succeed(t, agent.Close())
	})

	return listener.Addr().String()
}
