// SPDX-License-Identifier: Apache-2.0

package bridge_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/service"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// timeout limits what tests wait for. Only a test that fails waits so long.
const timeout = 20 * time.Second

// xpu is a network namespace with an agent in it. The agent serves on the test's own loopback
// interface.
type xpu struct {
	*netns.Namespace
	t      *testing.T
	cfg    service.Config
	client *opi.Client
	agent  *service.Agent
	addr   string
	stop   func() // ends the agent; may be called twice
}

func newXPU(t *testing.T, mode plane.Mode, uplink string) *xpu {
	t.Helper()
	cfg := service.Config{
		State: filepath.Join(t.TempDir(), "state.db"), SourceFilter: true,
		Plane: plane.Config{Mode: mode},
	}
	if uplink != "" {
		cfg.Plane.Uplinks = []plane.Uplink{{Name: uplink}}
	}
	return &xpu{Namespace: netns.New(t), t: t, cfg: cfg}
}

// bridge returns the name of a network's bridge.
func (x *xpu) bridge(network string) string {
	if x.cfg.Plane.Mode == plane.ModeVLANAware {
		return "br-opi"
	}
	return "br-" + network
}

// start starts an agent and a client, which run until stop or the end of the test.
func (x *xpu) start() {
	x.t.Helper()
	log := testr.New(x.t)
	var agent *service.Agent
	err := x.Do(func() (err error) {
		agent, err = service.New(x.cfg, log)
		return err
	})
	if err != nil {
		x.t.Fatal(err)
	}

	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		x.t.Fatal(err)
	}

	x.agent = agent
	server := agent.NewServer()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 2)
	go func() { ended <- agent.Run(ctx) }()
	go func() { ended <- server.Serve(lis) }()
	stopped := false
	x.stop = func() {
		if stopped {
			return
		}

		stopped = true
		cancel()
		server.Stop()

		for range 2 {
			// ErrServerStopped says that the server was stopped before it served.
			if err := <-ended; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				x.t.Errorf("agent: %v", err)
			}
		}

		if err := agent.Close(); err != nil {
			x.t.Errorf("agent: %v", err)
		}
	}

	x.t.Cleanup(x.stop)
	x.addr = lis.Addr().String()
	if x.client, err = opi.Dial(opi.Config{
		Endpoint: x.addr, Dialect: evpngw.Dialect(), Installation: opitest.Installation,
		FailedGrace: 500 * time.Millisecond,
	}); err != nil {
		x.t.Fatal(err)
	}

	client := x.client
	x.t.Cleanup(func() { _ = client.Close() })
}

func (x *xpu) ctx() context.Context {
	ctx, cancel := context.WithTimeout(x.t.Context(), timeout)
	x.t.Cleanup(cancel)
	return ctx
}

func (x *xpu) network(id string, vlan uint16, vni uint32) {
	x.t.Helper()
	n := opi.Network{ID: id, VLAN: vlan}
	if vni != 0 {
		n.VNI = &vni
	}
	if err := x.client.EnsureNetwork(x.ctx(), n); err != nil {
		x.t.Fatal(err)
	}
}

func (x *xpu) port(id, network string, mac net.HardwareAddr) {
	x.t.Helper()
	if err := x.client.EnsurePort(x.ctx(),
		opi.Port{ID: id, MAC: mac, Networks: []string{network}}); err != nil {
		x.t.Fatal(err)
	}
}

func (x *xpu) link(name string) netlink.Link {
	x.t.Helper()
	link, err := x.Handle().LinkByName(name)
	if err != nil {
		x.t.Fatalf("%s: %v", name, err)
	}
	return link
}

func (x *xpu) hasLink(name string) bool {
	_, err := x.Handle().LinkByName(name)
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return !missing
}

// pod is a network namespace with a VF in it, whose representor is in an xPU.
type pod struct {
	*netns.Namespace
	ip  net.IP
	mac net.HardwareAddr
}

// newPod connects a pod to an xPU by a wire between eth0 in the pod and the representor.
func newPod(t *testing.T, x *xpu, representor string, host byte) *pod {
	t.Helper()
	p := &pod{Namespace: netns.New(t), ip: net.IPv4(192, 0, 2, host).To4(),
		mac: net.HardwareAddr{2, 0, 0, 0, 0, host}}
	netns.Connect(t, x.Namespace, representor, p.Namespace, "eth0")
	eth0, err := p.Handle().LinkByName("eth0")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Handle().LinkSetHardwareAddr(eth0, p.mac); err != nil {
		t.Fatal(err)
	}

	addAddress(t, p.Namespace, "eth0", p.ip.String()+"/24")
	return p
}

func addAddress(t *testing.T, n *netns.Namespace, name, cidr string) {
	t.Helper()
	link, err := n.Handle().LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}

	addr, err := netlink.ParseAddr(cidr)
	if err != nil {
		t.Fatal(err)
	}

	addr.Flags = unix.IFA_F_NODAD // an IPv6 address can be used at once
	if err := n.Handle().AddrAdd(link, addr); err != nil {
		t.Fatal(err)
	}
}

// pinger sends ICMP echo requests from a pod.
type pinger struct {
	conn *icmp.PacketConn
	seq  int
}

func (p *pod) pinger(t *testing.T) *pinger {
	t.Helper()
	q := &pinger{}
	err := p.Do(func() (err error) {
		q.conn, err = icmp.ListenPacket("ip4:icmp", p.ip.String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = q.conn.Close() })

	return q
}

// once reports whether an answer comes within this time.
func (q *pinger) once(to *pod, wait time.Duration) (bool, error) {
	q.seq++
	msg := icmp.Message{
		Type: ipv4.ICMPTypeEcho,
		Body: &icmp.Echo{ID: 7, Seq: q.seq, Data: bytes.Repeat([]byte{'x'}, 1300)},
	}

	data, err := msg.Marshal(nil)
	if err != nil {
		return false, err
	}
	if _, err := q.conn.WriteTo(data, &net.IPAddr{IP: to.ip}); err != nil {
		return false, err
	}
	if err := q.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		return false, err
	}

	buf := make([]byte, 2000)
	for {
		n, from, err := q.conn.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false, nil
		}
		if err != nil {
			return false, err
		}

		reply, err := icmp.ParseMessage(1, buf[:n])
		if err != nil {
			return false, err
		}

		echo, isEcho := reply.Body.(*icmp.Echo)
		if isEcho && reply.Type == ipv4.ICMPTypeEchoReply && echo.Seq == q.seq &&
			from.String() == to.ip.String() {
			return true, nil
		}
	}
}

func reach(t *testing.T, from, to *pod) {
	t.Helper()
	q := from.pinger(t)
	must.Eventually(t, fmt.Sprintf("%s reaches %s", from.ip, to.ip), func() bool {
		ok, err := q.once(to, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	})
}

// noReach waits for a second, because a network that works answers in much less than a millisecond.
func noReach(t *testing.T, from, to *pod) {
	t.Helper()
	q := from.pinger(t)
	for range 2 {
		if ok, err := q.once(to, 500*time.Millisecond); ok || err != nil {
			t.Fatalf("%s reaches %s: %t, %v, want false", from.ip, to.ip, ok, err)
		}
	}
}

const (
	rep1 = "vf-0000-03-00-2"
	rep2 = "vf-0000-03-00-3"
	rep3 = "vf-0000-03-00-4"
)

func testClientSuite(t *testing.T, mode plane.Mode) {
	dialect := evpngw.Dialect()
	dialect.Traits.Gateways = netns.Has(t, netns.VRFs()) // or else the kernel cannot make any
	dialect.Traits.Trunks = mode == plane.ModeVLANAware
	opitest.RunClientSuite(t, dialect, func(t *testing.T, ports []string) opi.Config {
		x := newXPU(t, mode, "")
		vfs := netns.New(t)
		for i, id := range ports {
			netns.Connect(t, x.Namespace, id, vfs, fmt.Sprintf("vf%d", i))
		}

		x.start()
		return opi.Config{
			Endpoint: x.addr, Dialect: evpngw.Dialect(), Installation: opitest.Installation,
		}
	})
}

// wired returns two xPUs whose uplinks are connected.
func wired(t *testing.T, mode plane.Mode, configure ...func(*service.Config)) (a, b *xpu) {
	t.Helper()
	a, b = newXPU(t, mode, "p0"), newXPU(t, mode, "p0")
	for _, c := range configure {
		c(&a.cfg)
		c(&b.cfg)
	}

	netns.Connect(t, a.Namespace, "p0", b.Namespace, "p0")
	addAddress(t, a.Namespace, "p0", "198.51.100.1/24")
	addAddress(t, b.Namespace, "p0", "198.51.100.2/24")
	a.start()
	b.start()

	return a, b
}

func testNetworksReachAcrossXPUs(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
		x.network("net-red", 20, 70000)
	}

	blueA, blueB := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	redA, redB := newPod(t, a, rep2, 3), newPod(t, b, rep2, 4)
	a.port(rep1, "net-blue", blueA.mac)
	a.port(rep2, "net-red", redA.mac)
	b.port(rep1, "net-blue", blueB.mac)
	b.port(rep2, "net-red", redB.mac)

	reach(t, blueA, blueB)
	reach(t, redA, redB)
	noReach(t, blueA, redA)
	noReach(t, blueA, redB)

	vxlan := a.link("vx-net-blue").(*netlink.Vxlan)
	if want := net.IPv4(239, 0, 3, 0xe8); !vxlan.Group.Equal(want) || vxlan.VxlanId != 1000 ||
		vxlan.Port != 4789 || vxlan.MTU != 1450 {
		t.Errorf("VXLAN port is group %s, VNI %d, UDP port %d, MTU %d", vxlan.Group, vxlan.VxlanId,
			vxlan.Port, vxlan.MTU)
	}

	if mtu := a.link(a.bridge("net-blue")).Attrs().MTU; mtu != 1450 {
		t.Errorf("bridge has MTU %d, want 1450", mtu)
	}

	// The representor of a deleted port is down and still there.
	if err := a.client.DeletePort(a.ctx(), rep1); err != nil {
		t.Fatal(err)
	}

	noReach(t, blueB, blueA)
	if attrs := a.link(rep1).Attrs(); attrs.MasterIndex != 0 || attrs.Flags&net.FlagUp != 0 {
		t.Errorf("after delete the representor has master %d and flags %s", attrs.MasterIndex,
			attrs.Flags)
	}

	a.port(rep1, "net-blue", blueA.mac)
	reach(t, blueB, blueA)
}

func testRestartKeepsTraffic(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	a.network("net-blue", 10, 1000)
	b.network("net-blue", 10, 1000)
	podA, podB := newPod(t, a, rep1, 1), newPod(t, b, rep1, 2)
	a.port(rep1, "net-blue", podA.mac)
	b.port(rep1, "net-blue", podB.mac)
	reach(t, podA, podB)

	ctx, cancel := context.WithCancel(t.Context())
	type tally struct {
		sent, lost int
		err        error
	}

	result := make(chan tally, 1)
	q := podA.pinger(t)
	go func() {
		var n tally
		for ; ctx.Err() == nil && n.err == nil; n.sent++ {
			ok, err := q.once(podB, 2*time.Second)
			n.err = err
			if !ok {
				n.lost++
			}
		}

		result <- n
	}()

	before := a.link(a.bridge("net-blue")).Attrs().Index
	a.stop()
	a.start()
	if after := a.link(a.bridge("net-blue")).Attrs().Index; after != before {
		t.Errorf("the bridge was made anew: ifindex %d, was %d", after, before)
	}

	got, err := a.client.GetPort(a.ctx(), rep1)
	if err != nil || got.State != opi.StateUp {
		t.Errorf("after the restart the port is %s, %v", got.State, err)
	}

	cancel()
	n := <-result
	t.Logf("%d pings during the restart, %d lost", n.sent, n.lost)
	if n.err != nil || n.lost > 0 || n.sent == 0 {
		t.Errorf("%d of %d pings lost, %v", n.lost, n.sent, n.err)
	}
}

func testRestartRestoresWhatWasTakenAway(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	x.network("net-red", 20, 0)
	pod1, pod2 := newPod(t, x, rep1, 1), newPod(t, x, rep2, 2)
	x.port(rep1, "net-blue", pod1.mac)
	x.port(rep2, "net-blue", pod2.mac)
	x.stop()
	if err := x.Handle().LinkDel(x.link(x.bridge("net-blue"))); err != nil {
		t.Fatal(err)
	}

	noReach(t, pod1, pod2)
	x.start()
	reach(t, pod1, pod2)
	x.stop()

	// Without the state file, all networks and ports are removed.
	if err := os.Remove(x.cfg.State); err != nil {
		t.Fatal(err)
	}

	x.cfg.NewState = true
	x.start()
	if mode == plane.ModeBridgePerNetwork &&
		(x.hasLink("br-net-blue") || x.hasLink("br-net-red")) {
		t.Error("bridges are left that are not in the state")
	}
	if master := x.link(rep1).Attrs().MasterIndex; master != 0 {
		t.Errorf("the representor has master %d", master)
	}
}

func testStrayRepresentorIsReleasedAtStart(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	newPod(t, x, rep1, 1)
	x.stop()
	if err := x.Handle().LinkSetMaster(x.link(rep1), x.link(x.bridge("net-blue"))); err != nil {
		t.Fatal(err)
	}

	x.start()
	if master := x.link(rep1).Attrs().MasterIndex; master != 0 {
		t.Errorf("a representor without a port has master %d", master)
	}
}

// down waits until the port is down, and returns the reason.
func (x *xpu) down(id string) string {
	x.t.Helper()
	var detail string
	must.Eventually(x.t, id+" is down", func() bool {
		got, err := x.client.GetPort(x.ctx(), id)
		if err != nil {
			x.t.Fatal(err)
		}
		detail = got.Detail
		return got.State == opi.StateFailed
	})

	return detail
}

// up waits until the port is up.
func (x *xpu) up(id string) {
	x.t.Helper()
	must.Eventually(x.t, id+" is up", func() bool {
		got, err := x.client.GetPort(x.ctx(), id)
		if err != nil {
			x.t.Fatal(err)
		}
		return got.State == opi.StateUp
	})
}

func testRepresentorComesAndGoes(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	x.start()
	x.network("net-blue", 10, 0)
	err := x.client.EnsurePort(x.ctx(),
		opi.Port{ID: rep1, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Networks: []string{"net-blue"}})
	if !errors.Is(err, opi.ErrFailed) ||
		!strings.Contains(err.Error(), "netdev "+rep1+" is missing") {
		t.Fatalf("without a representor: %v", err)
	}

	pod1 := newPod(t, x, rep1, 1)
	x.up(rep1)
	pod2 := newPod(t, x, rep2, 2)
	x.port(rep2, "net-blue", pod2.mac)
	reach(t, pod1, pod2)

	t.Run("removed", func(t *testing.T) {
		if err := x.Handle().LinkDel(x.link(rep1)); err != nil {
			t.Fatal(err)
		}
		if detail := x.down(rep1); !strings.Contains(detail, "missing") {
			t.Errorf("detail %q", detail)
		}
	})

	pod1 = newPod(t, x, "pf0vf2", 1)
	t.Run("named by an alternative name", func(t *testing.T) {
		if err := x.Handle().LinkAddAltName(x.link("pf0vf2"), rep1); err != nil {
			t.Fatal(err)
		}
		x.up(rep1)
		reach(t, pod1, pod2)
	})

	t.Run("loses its name", func(t *testing.T) {
		if err := x.Handle().LinkDelAltName(x.link("pf0vf2"), rep1); err != nil {
			t.Fatal(err)
		}

		x.down(rep1)
		if master := x.link("pf0vf2").Attrs().MasterIndex; master != 0 {
			t.Errorf("it still has master %d", master)
		}
		if err := x.Handle().LinkAddAltName(x.link("pf0vf2"), rep1); err != nil {
			t.Fatal(err)
		}

		x.up(rep1)
	})

	t.Run("taken out of the bridge by another program", func(t *testing.T) {
		if err := x.Handle().LinkSetNoMaster(x.link(rep1)); err != nil {
			t.Fatal(err)
		}
		must.Eventually(t, "it is put back", func() bool {
			return x.link(rep1).Attrs().MasterIndex == x.link(x.bridge("net-blue")).Attrs().Index
		})
	})

	t.Run("bridge removed by another program", func(t *testing.T) {
		if err := x.Handle().LinkDel(x.link(x.bridge("net-blue"))); err != nil {
			t.Fatal(err)
		}

		must.Eventually(t, "it is made again", func() bool {
			return x.hasLink(x.bridge("net-blue"))
		})
		must.Eventually(t, "the port is back in it", func() bool {
			return x.link(rep1).Attrs().MasterIndex == x.link(x.bridge("net-blue")).Attrs().Index
		})
		x.up(rep1)
		reach(t, pod1, pod2)
	})
}

func testNetdevsOfOthersAreLeftAlone(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	for name, flags := range map[string]net.Flags{
		"br-net-blue": net.FlagUp, "br-net-pink": net.FlagUp, "br-net-grey": 0,
	} {
		foreign := netlink.NewLinkAttrs()
		foreign.Name = name
		foreign.Flags = flags
		if err := x.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: foreign}); err != nil {
			t.Fatal(err)
		}
	}

	if err := x.Handle().LinkSetAlias(x.link("br-net-blue"), "somebody's"); err != nil {
		t.Fatal(err)
	}

	newPod(t, x, "eth0", 1)
	newPod(t, x, "p0", 2)
	newPod(t, x, "busy", 3)
	addAddress(t, x.Namespace, "eth0", "203.0.113.1/24")
	if err := x.Handle().LinkSetMaster(x.link("busy"), x.link("br-net-blue")); err != nil {
		t.Fatal(err)
	}

	x.start()
	x.network("net-red", 20, 0)
	err := x.client.EnsurePort(x.ctx(),
		opi.Port{ID: "eth0", MAC: net.HardwareAddr{2, 0, 0, 0, 1, 9},
			Networks: []string{"net-red"}})
	if !errors.Is(err, opi.ErrFailed) ||
		!strings.Contains(err.Error(), "represents no function of the host") {
		t.Errorf("eth0, which the configuration does not name: %v", err)
	}

	must.Succeed(t, x.client.DeletePort(x.ctx(), "eth0"))
	x.stop()
	x.cfg.Plane.Representors.Netdevs = []string{"eth0", "busy", "br-*"}
	x.start()

	tests := []struct{ netdev, says string }{
		{"eth0", "has the address 203.0.113.1/24"},
		{"busy", "is a port of br-net-blue, which is not ours"},
		{x.bridge("net-red"), "is no representor"},
	}

	for i, test := range tests {
		err := x.client.EnsurePort(x.ctx(),
			opi.Port{ID: test.netdev, MAC: net.HardwareAddr{2, 0, 0, 0, 1, byte(i)},
				Networks: []string{"net-red"}})
		if !errors.Is(err, opi.ErrFailed) || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: got %v, want %q", test.netdev, err, test.says)
		}
		if err := x.client.DeletePort(x.ctx(), test.netdev); err != nil {
			t.Error(err)
		}
	}

	if x.link("busy").Attrs().MasterIndex != x.link("br-net-blue").Attrs().Index {
		t.Error("a port was taken out of the bridge of another program")
	}
	if x.link("eth0").Attrs().Flags&net.FlagUp == 0 {
		t.Error("this machine's own netdev was set down")
	}

	if mode == plane.ModeVLANAware {
		return // because no network has a bridge of its own
	}

	for _, id := range []string{"net-blue", "net-pink", "net-grey"} {
		err := x.client.EnsureNetwork(x.ctx(), opi.Network{ID: id, VLAN: 10})
		if !errors.Is(err, opi.ErrFailed) || !strings.Contains(err.Error(), "is not ours") {
			t.Errorf("a network whose bridge's name is taken: %v", err)
		}
		if err := x.client.DeleteNetwork(x.ctx(), id); err != nil {
			t.Error(err)
		}
		if !x.hasLink("br-" + id) {
			t.Errorf("bridge br-%s of another program was removed", id)
		}
	}
}

// testUnmarkedBridge checks that the agent takes over a bridge that has its group but no alias yet,
// because an earlier agent was killed in between.
func testUnmarkedBridge(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "")
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = x.bridge("net-blue"), 0x6f7069
	if err := x.Handle().LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		t.Fatal(err)
	}

	x.start()
	x.network("net-blue", 10, 0)
	if alias := x.link(x.bridge("net-blue")).Attrs().Alias; alias != "opi-bridge:net-blue" &&
		mode == plane.ModeBridgePerNetwork || alias == "" {
		t.Errorf("alias %q", alias)
	}
}

func testUplinkComesAndGoes(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	x.start()
	vni := uint32(1000)
	blue := opi.Network{ID: "net-blue", VLAN: 10, VNI: &vni}
	says := func(text string) {
		t.Helper()
		if err := x.client.EnsureNetwork(x.ctx(), blue); !errors.Is(err, opi.ErrFailed) ||
			!strings.Contains(err.Error(), text) {
			t.Fatalf("got %v, want %q", err, text)
		}
	}

	isUp := func() bool { return x.client.EnsureNetwork(x.ctx(), blue) == nil }
	says("the uplink, is missing")
	newPod(t, x, rep1, 1)
	port := opi.Port{
		ID: rep1, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Networks: []string{"net-blue"},
	}
	if err := x.client.EnsurePort(x.ctx(), port); !errors.Is(err, opi.ErrFailed) ||
		!strings.Contains(err.Error(), "net-blue is down") {
		t.Errorf("a port of a network that is down: %v", err)
	}

	wire := netns.New(t)
	netns.Connect(t, x.Namespace, "p0", wire, "wire")

	must.Eventually(t, "the address is missed", func() bool {
		err := x.client.EnsureNetwork(x.ctx(), blue)
		return err != nil && strings.Contains(err.Error(), "has no IPv4 or IPv6 address")
	})

	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	must.Eventually(t, "up with the uplink", isUp)
	x.up(rep1)

	if err := x.Handle().LinkSetMTU(x.link("p0"), 1400); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "the MTU follows the uplink's", func() bool {
		return x.link("vx-net-blue").Attrs().MTU == 1350
	})

	// The kernel removes the VXLAN netdev together with the uplink.
	if err := x.Handle().LinkDel(x.link("p0")); err != nil {
		t.Fatal(err)
	}

	must.Eventually(t, "down without the uplink", func() bool { return !isUp() })
	netns.Connect(t, x.Namespace, "p0", wire, "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	must.Eventually(t, "up again", isUp)
	if x.link("vx-net-blue").Attrs().MasterIndex != x.link(x.bridge("net-blue")).Attrs().Index {
		t.Error("the VXLAN netdev is not in the bridge")
	}
}

func testDeleteCleansUp(t *testing.T, mode plane.Mode) {
	x := newXPU(t, mode, "p0")
	wire := netns.New(t)
	netns.Connect(t, x.Namespace, "p0", wire, "wire")
	addAddress(t, x.Namespace, "p0", "198.51.100.1/24")
	newPod(t, x, rep1, 1)

	names := func() []string {
		links, err := x.Handle().LinkList()
		if err != nil {
			t.Fatal(err)
		}

		var all []string
		for _, link := range links {
			all = append(all, link.Attrs().Name)
		}

		slices.Sort(all)
		return all
	}

	before, bridges := names(), 2
	x.start()

	if mode == plane.ModeVLANAware { // its one bridge stays
		before, bridges = names(), 0
	}

	long := "net-" + strings.Repeat("x", 59)
	x.network("net-blue", 10, 1000)
	x.network(long, 20, 2000)
	x.port(rep1, long, net.HardwareAddr{2, 0, 0, 0, 0, 1})
	if got := len(names()) - len(before); got != 2+bridges {
		t.Errorf("two networks made %d netdevs, want %d: %s", got, 2+bridges, names())
	}

	for _, name := range []string{x.bridge("net-blue"), rep1} {
		addrs, err := x.Handle().AddrList(x.link(name), netlink.FAMILY_ALL)
		if err != nil || len(addrs) > 0 {
			t.Errorf("%s has addresses %v, %v", name, addrs, err)
		}
	}

	if err := x.client.DeletePort(x.ctx(), rep1); err != nil {
		t.Fatal(err)
	}

	for _, id := range []string{"net-blue", long} {
		if err := x.client.DeleteNetwork(x.ctx(), id); err != nil {
			t.Fatal(err)
		}
	}

	if got := names(); !slices.Equal(got, before) {
		t.Errorf("left behind: %s, before it was %s", got, before)
	}
}

// testQuiet checks that an agent causes no events while everything is as wanted. Otherwise each
// event would cause the next one.
func testQuiet(t *testing.T, mode plane.Mode) {
	a, b := wired(t, mode)
	for _, x := range []*xpu{a, b} {
		x.network("net-blue", 10, 1000)
		p := newPod(t, x, rep1, byte(x.link("p0").Attrs().Index))
		x.port(rep1, "net-blue", p.mac)
	}

	events := make(chan netlink.LinkUpdate, 100)
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })

	ns := vnetns.NsHandle(a.Fd())
	if err := netlink.LinkSubscribeWithOptions(events,
		done, netlink.LinkSubscribeOptions{Namespace: &ns}); err != nil {
		t.Fatal(err)
	}

	// The first events come from bridge ports that have just come up.
	must.Eventually(t, "no event for half a second", func() bool {
		select {
		case <-events:
			return false
		case <-time.After(500 * time.Millisecond):
			return true
		}
	})

	if err := a.Handle().LinkSetAlias(a.link(rep1), "somebody's note"); err != nil {
		t.Fatal(err)
	}

	seen := 0
	for quiet := time.After(500 * time.Millisecond); ; seen++ {
		select {
		case <-events:
			continue
		case <-quiet:
		}
		break
	}

	if seen < 1 || seen > 3 {
		t.Errorf("%d events after a change of an alias, want the few of it", seen)
	}
}

func TestTwoAgentsWithOneState(t *testing.T) {
	x := newXPU(t, plane.ModeAuto, "")
	x.start()

	err := x.Do(func() error {
		_, err := service.New(x.cfg, testr.New(t))
		return err
	})
	if err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("got %v, want an error that says in use", err)
	}
}

// BenchmarkPort measures EnsurePort until the port is up, and DeletePort until it is gone. Both
// include an fsync.
func BenchmarkPort(b *testing.B) {
	n := netns.New(b)
	netns.Connect(b, n, rep1, n, "vf")
	var agent *service.Agent
	err := n.Do(func() (err error) {
		agent, err = service.New(service.Config{State: filepath.Join(b.TempDir(), "state.db")},
			logr.Discard())
		return err
	})

	if err != nil {
		b.Fatal(err)
	}
	defer agent.Close()

	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}

	server := agent.NewServer()
	go func() { _ = server.Serve(lis) }()
	defer server.Stop()

	client, err := opi.Dial(opi.Config{
		Endpoint: lis.Addr().String(), Dialect: evpngw.Dialect(), Installation: opitest.Installation,
	})
	if err != nil {
		b.Fatal(err)
	}
	defer client.Close()

	if err := client.EnsureNetwork(b.Context(), opi.Network{ID: "net-blue", VLAN: 10}); err != nil {
		b.Fatal(err)
	}

	port := opi.Port{
		ID: rep1, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1}, Networks: []string{"net-blue"},
	}
	var up time.Duration
	for b.Loop() {
		begin := time.Now()
		if err := client.EnsurePort(b.Context(), port); err != nil {
			b.Fatal(err)
		}
		up += time.Since(begin)
		if err := client.DeletePort(b.Context(), port.ID); err != nil {
			b.Fatal(err)
		}
	}

	b.ReportMetric(float64(up.Nanoseconds())/float64(b.N)/1e6, "ms/up")
}
