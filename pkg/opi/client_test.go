// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dialects"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dpuoperator"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

var (
	blue  = opi.Network{ID: "net-blue", VLAN: 10}
	red   = opi.Network{ID: "net-red", VLAN: 20}
	port1 = opi.Port{ID: "vf-0000-03-00-2", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 1},
		Networks: []string{"net-blue"}}
	port2 = opi.Port{ID: "vf-0000-03-00-3", MAC: net.HardwareAddr{2, 0, 0, 0, 0, 2},
		Networks: []string{"net-blue"}}
)

// TestSuite runs the suite for each dialect.
func TestSuite(t *testing.T) {
	suites := map[string]func(*testing.T, opi.Dialect){
		evpngw.Name: runSuite, evpngw.NameE2000: runSuite, dpuoperator.Name: runPluginSuite,
	}
	for _, dialect := range dialects.All() {
		run := suites[dialect.Name]
		if run == nil {
			t.Errorf("no fake agent speaks dialect %s", dialect.Name)
			continue
		}
		t.Run(dialect.Name, func(t *testing.T) { run(t, dialect) })
	}
}

func runPluginSuite(t *testing.T, dialect opi.Dialect) {
	for _, plugin := range opitest.Plugins() {
		t.Run(string(plugin), func(t *testing.T) {
			opitest.RunClientSuite(t, dialect, func(t *testing.T, _ []string) opi.Config {
				return opitest.StartDPUOperator(t, plugin).Config()
			})
		})
	}
}

func runSuite(t *testing.T, dialect opi.Dialect) {
	tests := map[string]opitest.Behaviour{
		"healthy": {},
		"slow": {UpDelay: 20 * time.Millisecond, DeleteTail: 30 * time.Millisecond,
			Latency: time.Millisecond},
		// names as in the API's comments, and an agent that succeeds at its second attempt
		"other names": {ProtoNames: true},
		"fails first": {FailsFirst: 20 * time.Millisecond},
		"v0.2.0":      {V02: true},
		"opi-bridge":  {Options: true},
	}
	for name, behaviour := range tests {
		t.Run(name, func(t *testing.T) {
			opitest.RunClientSuite(t, dialect, func(t *testing.T, _ []string) opi.Config {
				a := opitest.Start(t)
				a.Set(func(b *opitest.Behaviour) { *b = behaviour })
				cfg := a.Config()
				cfg.Dialect = dialect
				return cfg
			})
		})
	}
}

// start returns an agent with the network net-blue, and a client.
func start(t *testing.T) (*opitest.Agent, *opi.Client) {
	t.Helper()
	a := opitest.Start(t)
	c := dial(t, a.Config())
	if err := c.EnsureNetwork(t.Context(), blue); err != nil {
		t.Fatal(err)
	}
	return a, c
}

func dial(t *testing.T, cfg opi.Config) *opi.Client {
	t.Helper()
	c, err := opi.Dial(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// wantError fails the test unless err is of the kind and contains the texts.
func wantError(t *testing.T, err, kind error, texts ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got error %v, want %q", err, kind)
		return
	}

	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error %q does not say %q", err, text)
		}
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestInvalidArguments(t *testing.T) {
	a, c := start(t)
	group := net.HardwareAddr{1, 0, 0x5e, 0, 0, 1}
	calls := a.Calls("CreateBridgePort") + a.Calls("GetBridgePort")
	big := uint32(1 << 24)
	tests := []struct {
		name string
		err  error
		says string
	}{
		{"upper case id",
			c.EnsurePort(t.Context(),
				opi.Port{ID: "VF-1", MAC: port1.MAC, Networks: port1.Networks}), "ID"},
		{"short MAC",
			c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: port1.MAC[:3], Networks: port1.Networks}), "MAC"},
		{
			"text MAC", c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: []byte("00:11:22:33:44:55"), Networks: port1.Networks}),
			"MAC",
		},
		{"group MAC",
			c.EnsurePort(t.Context(), opi.Port{ID: port1.ID, MAC: group, Networks: port1.Networks}),
			"MAC"},
		{
			"zero MAC", c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: make([]byte, 6), Networks: port1.Networks}), "MAC",
		},
		{"no network", c.EnsurePort(t.Context(), opi.Port{ID: port1.ID, MAC: port1.MAC}),
			"Networks"},
		{"two networks",
			c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: port1.MAC, Networks: []string{"net-blue", "net-red"}}),
			"Networks"},
		{"network twice",
			c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: port1.MAC, Networks: []string{"net-blue", "net-blue"},
					Trunk: true}), "Networks"},
		{"too many networks",
			c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: port1.MAC, Networks: manyNetworks(opi.MaxNetworks + 1),
					Trunk: true}), "Networks"},
		{"network by VLAN",
			c.EnsurePort(t.Context(),
				opi.Port{ID: port1.ID, MAC: port1.MAC, Networks: []string{"4"}}), "Networks"},
		{"VLAN 0", c.EnsureNetwork(t.Context(), opi.Network{ID: "net-red"}), "VLAN"},
		{"VLAN 4095", c.EnsureNetwork(t.Context(), opi.Network{ID: "net-red", VLAN: 4095}), "VLAN"},
		{"VNI too large",
			c.EnsureNetwork(t.Context(), opi.Network{ID: "net-red", VLAN: 1, VNI: &big}), "VNI"},
		{"short network id", c.EnsureNetwork(t.Context(), opi.Network{ID: "net", VLAN: 1}), "ID"},
		{"delete of a bad id", c.DeletePort(t.Context(), "x"), "ID"},
	}

	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			wantError(t, test.err, opi.ErrInvalid, test.says)
			var e *opi.Error
			if errors.As(test.err, &e) && e.Field != test.says {
				t.Errorf("field %q, want %q", e.Field, test.says)
			}
		})
	}

	if got := a.Calls("CreateBridgePort") + a.Calls("GetBridgePort"); got != calls {
		t.Errorf("invalid arguments reached the agent: %d calls", got-calls)
	}
}

func TestPortFoundFailed(t *testing.T) {
	a, c := start(t)
	broken := true
	a.Set(func(b *opitest.Behaviour) {
		b.Realise = func(id string) error {
			if broken {
				return errors.New("netdev " + id + " does not exist")
			}
			return nil
		}
	})

	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrFailed,
		"netdev vf-0000-03-00-2 does not exist")
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrFailed, "does not exist")
	a.Set(func(*opitest.Behaviour) { broken = false })
	ok(t, c.EnsurePort(t.Context(), port1))
}

func TestNetworkOnlyLooksAtWhatWasSet(t *testing.T) {
	_, c := start(t)
	vni := uint32(100)
	n := opi.Network{ID: "net-vni", VLAN: 30, VNI: &vni}
	ok(t, c.EnsureNetwork(t.Context(), n))
	ok(t, c.EnsureNetwork(t.Context(), n))
	n.VNI = nil
	wantError(t, c.EnsureNetwork(t.Context(), n), opi.ErrConflict, "VNI 100")
	wantError(t, c.EnsureNetwork(t.Context(), opi.Network{ID: "net-vni2", VLAN: 31, VNI: &vni}),
		opi.ErrConflict, "VNI 100 already in network net-vni")
}

// TestEndpointWithZone checks an agent with a link-local address, which has a zone.
func TestEndpointWithZone(t *testing.T) {
	listener, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("the machine has no IPv6: %v", err)
	}

	server := grpc.NewServer()
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	_, port, err := net.SplitHostPort(listener.Addr().String())
	ok(t, err)

	for _, host := range []string{"::1", "::1%lo"} {
		c := dial(t,
			opi.Config{Endpoint: net.JoinHostPort(host, port), Dialect: evpngw.Dialect(),
				Installation: opitest.Installation})
		ok(t, c.Check(t.Context())) // the server implements nothing, and answers so
		if peer, _, _ := strings.Cut(c.Peer(), "]"); !strings.HasPrefix(peer, "[::1") {
			t.Errorf("%s: peer %q", host, c.Peer())
		}
	}
}

func TestNormalEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"10.0.0.1:50151": "10.0.0.1:50151", "Card.Example.:050151": "card.example:50151",
		"[::ffff:10.0.0.1]:1": "10.0.0.1:1",
		"localhost:1":         "127.0.0.1:1", "[::1]:1": "127.0.0.1:1",
		"[FE80::0:1%eth0]:1": "[fe80::1%eth0]:1", "nonsense": "nonsense",
	} {
		if got := opi.NormalEndpoint(endpoint); got != want {
			t.Errorf("NormalEndpoint(%q) = %q, want %q", endpoint, got, want)
		}
	}
}

// TestDeleteOnce checks that an object is not deleted again while it is being deleted.
func TestDeleteOnce(t *testing.T) {
	a, c := start(t)
	ok(t, c.EnsurePort(t.Context(), port1))
	a.Set(func(b *opitest.Behaviour) { b.DeleteTail = 100 * time.Millisecond })
	wantError(t, c.DeletePort(within(t, 50*time.Millisecond), port1.ID), opi.ErrTimeout)
	ok(t, c.DeletePort(t.Context(), port1.ID))
	if got := a.Calls("DeleteBridgePort"); got != 1 {
		t.Errorf("%d deletions, want 1", got)
	}
}

// TestEndlessLists checks that endless lists of an agent are cut off cheaply.
func TestEndlessLists(t *testing.T) {
	a, c := start(t)
	a.Set(func(b *opitest.Behaviour) { b.Endless = true })
	_, err := c.ListNetworks(t.Context())
	wantError(t, err, opi.ErrUnsupported, "pages")
	if got := a.Calls("ListLogicalBridges"); got > 2000 {
		t.Errorf("%d pages were read", got)
	}
}

// TestLongTexts checks that texts of an agent are shortened.
func TestLongTexts(t *testing.T) {
	a, c := start(t)
	long := "card on fire" + strings.Repeat(", heiß", 4000)
	a.Set(func(b *opitest.Behaviour) { b.Realise = func(string) error { return errors.New(long) } })
	err := c.EnsurePort(t.Context(), port1)
	wantError(t, err, opi.ErrFailed, "card on fire")
	a.FailNext("GetBridgePort", 1, codes.Unknown, long)
	_, other := c.GetPort(t.Context(), port1.ID)
	wantError(t, other, opi.ErrFailed, "card on fire")

	for _, err := range []error{err, other} {
		if len(err.Error()) > 1000 || !utf8.ValidString(err.Error()) {
			t.Errorf("an error has %d bytes", len(err.Error()))
		}
	}
}

// TestTrunkLeavesNoPhantom checks that no trunk is created while a network is missing, because the
// reference agent would keep references to the other networks.
func TestTrunkLeavesNoPhantom(t *testing.T) {
	_, c := start(t)
	trunk := opi.Port{
		ID: port1.ID, MAC: port1.MAC, Networks: []string{"net-blue", "net-red"}, Trunk: true,
	}
	wantError(t, c.EnsurePort(t.Context(), trunk), opi.ErrNetworkMissing, "net-red")
	ok(t, c.EnsureNetwork(t.Context(), red))
	ok(t, c.EnsurePort(t.Context(), trunk))
	ok(t, c.DeletePort(t.Context(), trunk.ID))
	ok(t, c.DeleteNetwork(t.Context(), "net-blue"))
}

func TestLostAnswers(t *testing.T) {
	t.Run("create", func(t *testing.T) {
		a, c := start(t)
		a.DropNext("CreateBridgePort", 1)
		ok(t, c.EnsurePort(t.Context(), port1))
		if got := a.Calls("CreateBridgePort"); got != 1 {
			t.Errorf("%d creates, want 1: the first was carried out", got)
		}
	})

	t.Run("create network", func(t *testing.T) {
		a, c := start(t)
		a.DropNext("CreateLogicalBridge", 1)
		ok(t, c.EnsureNetwork(t.Context(), red))
	})

	t.Run("delete", func(t *testing.T) {
		a, c := start(t)
		ok(t, c.EnsurePort(t.Context(), port1))
		a.DropNext("DeleteBridgePort", 1)
		ok(t, c.DeletePort(t.Context(), port1.ID))
	})

	t.Run("delete network", func(t *testing.T) {
		a, c := start(t)
		a.DropNext("DeleteLogicalBridge", 1)
		ok(t, c.DeleteNetwork(t.Context(), blue.ID))
	})

	t.Run("not carried out", func(t *testing.T) {
		a, c := start(t)
		a.FailNext("CreateBridgePort", 1, codes.Unavailable, "connection lost")
		wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnavailable, "connection lost")
		ok(t, c.EnsurePort(t.Context(), port1))
	})

	t.Run("create says Unknown but was carried out", func(t *testing.T) {
		a, c := start(t)
		ok(t, c.EnsurePort(t.Context(), port1))
		a.FailNext("GetBridgePort", 1, codes.NotFound, "lagging")
		a.FailNext("CreateBridgePort", 1, codes.Unknown, "something odd")
		ok(t, c.EnsurePort(t.Context(), port1))
	})
}

func TestStuckDelete(t *testing.T) {
	a, c := start(t)
	ok(t, c.EnsurePort(t.Context(), port1))
	a.Set(func(b *opitest.Behaviour) { b.StuckDelete = true })
	err := retryTimeout(func() error {
		return c.DeletePort(within(t, 50*time.Millisecond),
			port1.ID)
	})
	wantError(t, err, opi.ErrTimeout, port1.ID, "being deleted", "operation not supported")
	wantError(t, err, context.DeadlineExceeded)

	// A port that is being deleted is never taken for one that is up, even if all else is equal.
	err = retryTimeout(func() error { return c.EnsurePort(within(t, 50*time.Millisecond), port1) })
	wantError(t, err, opi.ErrTimeout, "being deleted")
}

// retryTimeout repeats a call whose context ended before the agent's first answer, as on a busy
// machine.
func retryTimeout(call func() error) error {
	for {
		if err := call(); err == nil || !strings.Contains(err.Error(), "has not said anything") {
			return err
		}
	}
}

func TestEnsureWaitsForADyingPort(t *testing.T) {
	a, c := start(t)
	ok(t, c.EnsurePort(t.Context(), port1))
	a.Set(func(b *opitest.Behaviour) { b.DeleteTail = 50 * time.Millisecond })
	wantError(t, c.DeletePort(within(t, 5*time.Millisecond), port1.ID), opi.ErrTimeout)
	ok(t, c.EnsurePort(t.Context(), port1))
	got, err := c.GetPort(t.Context(), port1.ID)
	ok(t, err)
	if got.State != opi.StateUp {
		t.Errorf("the port is %s", got.State)
	}
}

// TestPortDeletedWhileItIsWaitedFor checks that the port is created again.
func TestPortDeletedWhileItIsWaitedFor(t *testing.T) {
	a, c := start(t)
	a.Set(func(b *opitest.Behaviour) { b.UpDelay = 300 * time.Millisecond })
	done := make(chan error, 1)
	go func() { done <- c.EnsurePort(within(t, 10*time.Second), port1) }()

	for len(a.Ports()) == 0 {
		time.Sleep(time.Millisecond)
	}

	a.Lose(port1.ID)
	ok(t, <-done)
	if got, err := c.GetPort(t.Context(), port1.ID); err != nil || got.State != opi.StateUp {
		t.Errorf("the port is %s, %v", got.State, err)
	}
}

// TestDefiniteRefusals checks that a permanent error is not retried.
func TestDefiniteRefusals(t *testing.T) {
	for _, code := range []codes.Code{
		codes.InvalidArgument, codes.Unimplemented, codes.Unauthenticated, codes.PermissionDenied,
	} {
		a, c := start(t)
		a.FailNext("CreateBridgePort", 100, code, "never")
		err := c.EnsurePort(within(t, 10*time.Second), port1)
		if err == nil || errors.Is(err, opi.ErrTimeout) || a.Calls("CreateBridgePort") != 1 {
			t.Errorf("%s: %v after %d calls, want an error after one", code, err,
				a.Calls("CreateBridgePort"))
		}
	}
}

func TestUpIsNoticedSoon(t *testing.T) {
	a, c := start(t)
	for _, delay := range []time.Duration{
		20 * time.Millisecond, 100 * time.Millisecond, 400 * time.Millisecond,
	} {
		a.Set(func(b *opitest.Behaviour) { b.UpDelay = delay })
		begin := time.Now()
		ok(t, c.EnsurePort(t.Context(), port1))
		took := time.Since(begin)
		t.Logf("agent %v, client %v", delay, took)
		if took < delay || took > 2*delay+50*time.Millisecond {
			t.Errorf("the agent was up after %v, EnsurePort returned after %v, want at most "+
				"twice that", delay, took)
		}

		ok(t, c.DeletePort(t.Context(), port1.ID))
	}
}

func TestNeverUp(t *testing.T) {
	a, c := start(t)
	a.Set(func(b *opitest.Behaviour) { b.UpDelay = time.Hour })
	wantError(t, c.EnsurePort(within(t, 300*time.Millisecond), port1), opi.ErrTimeout, "pending")
	wantError(t, c.EnsureNetwork(within(t, 300*time.Millisecond), red), opi.ErrTimeout, "pending")
}

func TestAgentsThatCannotBeVerified(t *testing.T) {
	t.Run("blind", func(t *testing.T) {
		a, c := start(t)
		a.Set(func(b *opitest.Behaviour) { b.Blind = true })
		wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnknown,
			"has the port, but does not tell its type")
		wantError(t, c.DeletePort(t.Context(), port1.ID), opi.ErrUnknown)
		wantError(t, c.EnsureNetwork(t.Context(), blue), opi.ErrUnknown,
			"has the network, but does not tell its VLAN")
		ok(t, c.Check(t.Context()))
	})

	t.Run("without lists", func(t *testing.T) {
		a, c := start(t)
		a.Set(func(b *opitest.Behaviour) {
			b.Unimplemented = []string{"ListLogicalBridges", "ListBridgePorts"}
		})
		ok(t, c.EnsureNetwork(t.Context(), red))
		ok(t, c.EnsurePort(t.Context(), port1))
	})

	t.Run("unimplemented", func(t *testing.T) {
		a, c := start(t)
		a.Set(func(b *opitest.Behaviour) { b.Unimplemented = []string{"GetBridgePort"} })
		wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnsupported)
		ok(t, c.Check(t.Context()))
	})
}

func TestListPages(t *testing.T) {
	a, c := start(t)
	var want []string
	for i := range 520 {
		id, err := opi.PortID(subfunction(i))
		ok(t, err)
		ok(t,
			c.EnsurePort(t.Context(),
				opi.Port{ID: id, MAC: net.HardwareAddr{2, 0, 0, 0, byte(i >> 8), byte(i)},
					Networks: port1.Networks}))
		want = append(want, id)
	}

	before := a.Calls("ListBridgePorts")
	list, err := c.ListPorts(t.Context())
	ok(t, err)
	var got []string
	for _, p := range list {
		got = append(got, p.ID)
	}

	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got %d ports, want %d", len(got), len(want))
	}
	if calls := a.Calls("ListBridgePorts") - before; calls != 3 {
		t.Errorf("%d pages, want 3", calls)
	}
	if before > 1 {
		t.Errorf("%d lists for 520 ports of an agent whose Get tells all", before)
	}
}

func subfunction(n int) function.ID { return function.SubfunctionID("0000:03:00.0", uint32(n)) }

func TestWatch(t *testing.T) {
	a := opitest.Start(t)
	c := dial(t, a.Config())
	if c.Connected() {
		t.Error("connected before the first use")
	}

	events := make(chan bool, 16)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Watch(ctx, func(connected bool) { events <- connected }) }()

	next := func(want bool) {
		t.Helper()
		select {
		case got := <-events:
			if got != want {
				t.Fatalf("connected %t, want %t", got, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("no event, want connected %t", want)
		}
	}

	next(true)
	if !c.Connected() {
		t.Error("not connected")
	}

	ok(t, c.EnsureNetwork(t.Context(), blue))
	ok(t, c.EnsurePort(t.Context(), port1))

	a.Stop() // deletes everything
	next(false)
	wantError(t, c.Check(t.Context()), opi.ErrUnavailable)
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrUnavailable)
	ok(t, a.Run())
	next(true)
	wantError(t, c.EnsurePort(t.Context(), port1), opi.ErrNetworkMissing)
	ok(t, c.EnsureNetwork(t.Context(), blue))
	ok(t, c.EnsurePort(t.Context(), port1))
	ok(t, c.EnsurePort(t.Context(), port2))

	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch returned %v", err)
	}
}

func TestDialRejects(t *testing.T) {
	tests := map[string]opi.Config{
		"no port":    {Endpoint: "192.0.2.1", Dialect: evpngw.Dialect()},
		"no host":    {Endpoint: ":50151", Dialect: evpngw.Dialect()},
		"port 0":     {Endpoint: "192.0.2.1:0", Dialect: evpngw.Dialect()},
		"port name":  {Endpoint: "192.0.2.1:opi", Dialect: evpngw.Dialect()},
		"no dialect": {Endpoint: "192.0.2.1:50151"},
	}
	for name, cfg := range tests {
		t.Run(name, func(t *testing.T) {
			if _, err := opi.Dial(cfg); err == nil {
				t.Errorf("Dial(%+v) did not fail", cfg)
			}
		})
	}
}

func TestTLSConfigTellsNoSecret(t *testing.T) {
	const secret = "-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n"
	_, err := opi.TLSConfig([]byte("no certificate"), []byte(secret), nil, "")
	if err == nil || strings.Contains(err.Error(), "c2VjcmV0") {
		t.Errorf("got %v, want an error without the key", err)
	}
}

func TestMutualTLS(t *testing.T) {
	ca := opitest.NewAuthority(t)
	agent := opitest.Start(t)
	agent.Stop()
	cert, key := ca.Issue(t, "127.0.0.1")
	server, err := tls.X509KeyPair(cert, key)
	ok(t, err)
	ok(t,
		agent.RunTLS(&tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: ca.Pool(),
			ClientAuth: tls.RequireAndVerifyClientCert}))

	cfg := agent.Config()
	cert, key = ca.Issue(t, "controller")
	cfg.TLS, err = opi.TLSConfig(cert, key, ca.PEM(), "")
	ok(t, err)
	ok(t, dial(t, cfg).Check(t.Context()))

	other := opitest.NewAuthority(t)
	cert, key = other.Issue(t, "controller")
	cfg.TLS, err = opi.TLSConfig(cert, key, ca.PEM(), "")
	ok(t, err)
	wantError(t, dial(t, cfg).Check(t.Context()), opi.ErrUnavailable)
	cfg.TLS = nil
	wantError(t, dial(t, cfg).Check(t.Context()), opi.ErrUnavailable)
}

// TestReloadedCertificates checks that renewed certificates are used for the next connection, and
// that an unreadable one is reported.
func TestReloadedCertificates(t *testing.T) {
	ca, other := opitest.NewAuthority(t), opitest.NewAuthority(t)
	agent := opitest.Start(t)
	agent.Stop()
	cert, key := ca.Issue(t, "127.0.0.1")
	server, err := tls.X509KeyPair(cert, key)
	ok(t, err)
	required := &tls.Config{Certificates: []tls.Certificate{server}, ClientCAs: ca.Pool(),
		ClientAuth: tls.RequireAndVerifyClientCert}
	ok(t, agent.RunTLS(required))

	var mutex sync.Mutex
	load := func() (*tls.Config, error) { return nil, errors.New("tls.key: no such file") }
	use := func(next func() (*tls.Config, error)) {
		mutex.Lock()
		defer mutex.Unlock()
		load = next
	}

	issue := func(by *opitest.Authority) func() (*tls.Config, error) {
		cert, key := by.Issue(t, "agent")
		return func() (*tls.Config, error) { return opi.TLSConfig(cert, key, ca.PEM(), "") }
	}

	cfg := agent.Config()
	cfg.ReloadTLS = func() (*tls.Config, error) {
		mutex.Lock()
		defer mutex.Unlock()
		return load()
	}

	client := dial(t, cfg)
	eventually := func(what string, check func(error) bool) {
		t.Helper()
		ctx := within(t, 20*time.Second)
		for err := client.Check(ctx); !check(err); err = client.Check(ctx) {
			if ctx.Err() != nil {
				t.Fatalf("%s: %v", what, err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}

	wantError(t, client.Check(t.Context()), opi.ErrUnavailable, "tls.key: no such file")
	use(issue(ca))
	eventually("the files are there", func(err error) bool { return err == nil })
	agent.Stop()
	use(issue(other))
	ok(t, agent.RunTLS(required))
	eventually("they are of an authority that the agent does not know", func(err error) bool {
		return err != nil && strings.Contains(err.Error(), "tls: ")
	})
	use(issue(ca))
	eventually("they are renewed", func(err error) bool { return err == nil })
}
