// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

var soakFor = flag.Duration("soak", 5*time.Second, "how long TestSoak creates, deletes and kills")

// programVariable makes the test binary run opi-bridge, so that opi-bridge can be killed.
const programVariable = "XPU_TEST_OPI_BRIDGE"

func TestMain(m *testing.M) {
	if os.Getenv(programVariable) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// soak is an xPU on which opi-bridge is killed again and again.
type soak struct {
	*testing.T
	xpu   *netns.Namespace
	args  []string
	agent opi.Agent
	// gateways makes gateways. It is nil if the kernel has no VRFs.
	gateways *gateways
	log      *os.File

	made, deleted, kills atomic.Int64
}

// newSoak returns an xPU without an opi-bridge.
func newSoak(t *testing.T) *soak {
	t.Helper()
	s := &soak{T: t, xpu: netns.New(t)}
	s.args = []string{"--state", filepath.Join(t.TempDir(), "state.db"), "--uplink=p0"}
	var err error
	s.log, err = os.Create(filepath.Join(t.TempDir(), "opi-bridge.log"))
	must.Succeed(t, err)
	t.Cleanup(s.lastWords)

	conn := s.dial()
	s.agent = evpngw.Dialect().New(conn)
	if netns.Has(t, netns.VRFs()) {
		s.gateways = newGateways(s, conn)
	}

	return s
}

// TestSoak makes and deletes networks, gateways and ports while opi-bridge is killed again and
// again. Two ports that stay must not lose a frame, and at the end nothing may be left of the other
// objects.
func TestSoak(t *testing.T) {
	const workers, portsEach = 4, 8
	s := newSoak(t)
	wire, pods := netns.New(t), netns.New(t)
	netns.Connect(t, s.xpu, "p0", wire, "wire")
	uplink, err := s.xpu.Handle().LinkByName("p0")
	must.Succeed(t, err)
	address, err := netlink.ParseAddr("198.51.100.1/24")
	must.Succeed(t, err)
	must.Succeed(t, s.xpu.Handle().AddrAdd(uplink, address))

	for i := range 2 + workers*portsEach {
		netns.Connect(t, s.xpu, soakPort(i).ID, pods, fmt.Sprintf("eth%d", i))
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer cancel()
		loop.Sleep(ctx, *soakFor)
		// A slow machine needs more time until each of them has happened.
		for end := time.Now().Add(time.Minute); !s.busy() && time.Now().Before(end); {
			loop.Sleep(ctx, 10*time.Millisecond)
		}
	}()

	running, err := s.start()
	must.Succeed(t, err)
	stable := opi.Network{ID: "net-stable", VLAN: 10}
	must.Succeed(t, s.ensureNetwork(stable))

	for i := range 2 {
		port := soakPort(i)
		port.Addresses = nil // with addresses it could send only IP
		must.Succeed(t, s.ensurePort(port, stable.ID))
	}

	end := func(i int) netns.End {
		return netns.End{NetNS: pods, Netdev: fmt.Sprintf("eth%d", i), MAC: soakPort(i).MAC}
	}
	traffic, err := netns.Send(end(0), end(1))
	must.Succeed(t, err)

	all, ctx := errgroup.WithContext(ctx)
	for worker := range workers {
		all.Go(func() error { return s.work(ctx, worker, 2+worker*portsEach, portsEach) })
	}

	all.Go(func() error {
		for ; ctx.Err() == nil; s.kills.Add(1) {
			if rand.IntN(5) > 0 { // otherwise it is killed while it starts
				if err := s.eventually("alive", s.agent.Alive); err != nil {
					return err
				}
			}

			loop.Sleep(ctx, time.Duration(rand.IntN(2000))*time.Millisecond)
			if err := running.Process.Kill(); err != nil {
				return err
			}

			_ = running.Wait() // it was killed
			var err error
			if running, err = s.start(); err != nil {
				return err
			}
		}
		return nil
	})

	must.Succeed(t, all.Wait())
	sent, lost, err := traffic.Stop()
	must.Succeed(t, err)
	t.Logf("%d objects made, %d deleted, %d kills, %d frames sent, %d lost", s.made.Load(),
		s.deleted.Load(), s.kills.Load(), sent, lost)
	if lost != 0 || !s.busy() {
		t.Error("want all of these but no frame lost")
	}

	s.checkNothingLeft()
	must.Succeed(t, running.Process.Signal(syscall.SIGTERM))
	must.Succeed(t, running.Wait())
}

// busy reports whether objects were made and deleted and opi-bridge was killed.
func (s *soak) busy() bool {
	return s.made.Load() > 0 && s.deleted.Load() > 0 && s.kills.Load() > 0
}

// lastWords shows the end of opi-bridge's log if the test has failed.
func (s *soak) lastWords() {
	if s.Failed() {
		text, _ := os.ReadFile(s.log.Name())
		s.Logf("opi-bridge: ...%s", text[max(0, len(text)-8000):])
	}
	_ = s.log.Close()
}

// soakPort returns a port without a network.
func soakPort(i int) opi.Port {
	return opi.Port{
		ID: fmt.Sprintf("vf-0000-%02x-00-0", i), MAC: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)},
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})},
	}
}

// start starts opi-bridge.
func (s *soak) start() (*exec.Cmd, error) {
	cmd := exec.Command(os.Args[0], s.args...)
	cmd.Env = append(os.Environ(), programVariable+"=1")
	cmd.Stderr = s.log
	err := s.xpu.Do(cmd.Start)
	if err == nil {
		s.Cleanup(func() { _ = cmd.Process.Kill() })
	}
	return cmd, err
}

func (s *soak) dial() *grpc.ClientConn {
	s.Helper()
	conn, err := grpc.NewClient("passthrough:///127.0.0.1:50151",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{
				BaseDelay: 10 * time.Millisecond, Multiplier: 1, MaxDelay: 10 * time.Millisecond,
			}, MinConnectTimeout: time.Second,
		}),
		grpc.WithContextDialer(func(
			ctx context.Context, address string,
		) (conn net.Conn, err error) {
			err = s.xpu.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", address)
				return err
			})
			return conn, err
		}))

	must.Succeed(s, err)
	s.Cleanup(func() { _ = conn.Close() })

	return conn
}

// work makes and deletes a network and ports until ctx ends. It leaves nothing behind.
func (s *soak) work(ctx context.Context, worker, firstPort, ports int) error {
	for round := 0; ctx.Err() == nil; round++ {
		vni := uint32(1000 + worker)
		network := opi.Network{
			ID: fmt.Sprintf("net-%d-%d", worker, round%3), VLAN: uint16(100 + worker),
			VNI: &vni, MTU: 1400,
		}
		if err := s.ensureNetwork(network); err != nil {
			return err
		}

		if err := s.gateways.ensure(worker, network.ID); err != nil {
			return err
		}

		n := 1 + rand.IntN(ports)
		for i := range n {
			if err := s.ensurePort(soakPort(firstPort+i), network.ID); err != nil {
				return err
			}
		}

		for i := range n {
			if err := s.eventually("delete port", func(ctx context.Context) error {
				return s.agent.DeletePort(ctx, soakPort(firstPort+i).ID)
			}); err != nil {
				return err
			}
		}

		if err := s.gateways.delete(worker); err != nil {
			return err
		}

		if err := s.eventually("delete network", func(ctx context.Context) error {
			return s.agent.DeleteNetwork(ctx, network.ID)
		}); err != nil {
			return err
		}

		s.made.Add(int64(1 + n))
		s.deleted.Add(int64(1 + n))
	}
	return nil
}

func (s *soak) ensureNetwork(n opi.Network) error {
	return s.eventually("network "+n.ID, func(ctx context.Context) error {
		if err := s.agent.CreateNetwork(ctx, n, netip.Addr{}); err != nil {
			return err
		}
		if _, err := s.agent.SetNetworkOptions(ctx, n); err != nil {
			return err
		}

		got, err := s.agent.Network(ctx, n.ID)
		if err == nil && got.State != opi.StateUp {
			err = fmt.Errorf("%s: %s", got.State, got.Detail)
		}

		return err
	})
}

func (s *soak) ensurePort(p opi.Port, network string) error {
	p.Networks = []string{network}
	return s.eventually("port "+p.ID, func(ctx context.Context) error {
		if err := s.agent.CreatePort(ctx, p); err != nil {
			return err
		}
		if err := s.agent.SetPortOptions(ctx, p); err != nil {
			return err
		}

		got, err := s.agent.Port(ctx, p.ID)
		if err == nil && got.State != opi.StateUp {
			err = fmt.Errorf("%s: %s", got.State, got.Detail)
		}

		return err
	})
}

// eventually repeats a call until it succeeds, because the agent may be killed at any time.
func (s *soak) eventually(what string, ask func(context.Context) error) error {
	// The time is long because an emulated machine does little between two kills.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()

	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", what, err)
		}

		switch status.Code(err) {
		case codes.InvalidArgument, codes.Unimplemented, codes.PermissionDenied:
			return fmt.Errorf("%s: %w", what, err)
		}

		loop.Sleep(ctx, 5*time.Millisecond)
	}
}

// checkNothingLeft checks that only the two ports that stay are left.
func (s *soak) checkNothingLeft() {
	s.Helper()
	must.Succeed(s, s.eventually("list", func(ctx context.Context) error {
		ports, err := s.agent.Ports(ctx)
		if err != nil {
			return err
		}

		networks, err := s.agent.Networks(ctx)
		if err == nil && (len(ports) != 2 || len(networks) != 1) {
			err = fmt.Errorf("%d ports and %d networks are left, want 2 and 1", len(ports),
				len(networks))
		}

		return err
	}))

	links, err := s.xpu.Handle().LinkList()
	must.Succeed(s, err)
	masters := 0
	for _, link := range links {
		if link.Attrs().MasterIndex != 0 {
			masters++
		}
		if link.Type() == "vrf" || link.Type() == "vlan" {
			s.Errorf("netdev %s is left", link.Attrs().Name)
		}
		if link.Type() == "vxlan" || link.Type() == "bridge" &&
			!strings.HasSuffix(link.Attrs().Name, "-stable") && link.Attrs().Name != "br-opi" {
			s.Errorf("netdev %s is left", link.Attrs().Name)
		}
	}

	if masters != 2 {
		s.Errorf("%d netdevs are in bridges, want 2", masters)
	}

	s.gateways.checkNothingLeft()

	must.Succeed(s, s.xpu.Do(func() error {
		nft, err := nftables.New()
		if err != nil {
			return err
		}

		table := &nftables.Table{Name: "opi-bridge", Family: nftables.TableFamilyBridge}
		for set, want := range map[string]int{"macs": 2, "foreign-macs": 0, "gateway-macs": 0} {
			elements, errSet := nft.GetSetElements(&nftables.Set{Table: table, Name: set})
			if errSet == nil && len(elements) != want {
				errSet = fmt.Errorf("it has %d elements, want %d", len(elements), want)
			}
			if errSet != nil {
				err = errors.Join(err, fmt.Errorf("set %s: %w", set, errSet))
			}
		}

		return err
	}))
}
