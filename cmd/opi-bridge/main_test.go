// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// program runs opi-bridge in a network namespace until the returned function ends it, as SIGTERM
// would.
func program(t *testing.T, n *netns.Namespace, args ...string) (terminate func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var logs bytes.Buffer
	go func() {
		ended <- n.Do(func() error {
			cmd := command(&logs)
			cmd.SetArgs(args)
			return cmd.ExecuteContext(ctx)
		})
	}()

	done := false
	terminate = func() {
		if done {
			return
		}
		done = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("opi-bridge: %v\n%s", err, &logs)
		}
	}

	t.Cleanup(terminate)
	return terminate
}

// dial returns a connection to the agent in the namespace. Calls wait until the agent serves.
func dial(
	t *testing.T, n *netns.Namespace, creds credentials.TransportCredentials,
) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///127.0.0.1:50151",
		grpc.WithTransportCredentials(creds),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
		grpc.WithContextDialer(func(ctx context.Context, addr string) (conn net.Conn, err error) {
			err = n.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", addr)
				return err
			})
			return conn, err
		}))

	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })

	return conn
}

// fetch gets a page from a server in the namespace.
func fetch(n *netns.Namespace, config *tls.Config, url string) (string, error) {
	transport := &http.Transport{TLSClientConfig: config,
		DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
			err = n.Do(func() error {
				conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
				return err
			})
			return conn, err
		}}

	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()

	text, err := io.ReadAll(response.Body)
	return string(text), err
}

func TestServesAndLeavesTheDataPlane(t *testing.T) {
	n := netns.New(t)
	state := filepath.Join(t.TempDir(), "new", "state.db")
	terminate := program(t, n, "--state", state, "--data-plane", "bridge-per-network",
		"--metrics-listen", "127.0.0.1:9100", "--log-format", "json")
	conn := dial(t, n, insecure.NewCredentials())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()

	alive, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil || alive.Status != healthpb.HealthCheckResponse_SERVING {
		t.Fatalf("health: %v, %v", alive, err)
	}

	networks := evpn.NewLogicalBridgeServiceClient(conn)
	lb, err := networks.CreateLogicalBridge(ctx,
		&evpn.CreateLogicalBridgeRequest{
			LogicalBridgeId: "net-blue",
			LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: 10}},
		})

	if err != nil || lb.Status.OperStatus != evpn.LBOperStatus_LB_OPER_STATUS_UP {
		t.Fatalf("create: %v, %v", lb, err)
	}

	metrics, err := fetch(n, nil, "http://127.0.0.1:9100/metrics")
	must.Succeed(t, err)

	for _, want := range []string{
		`opi_bridge_rpc_duration_seconds_count{code="OK",method="CreateLogicalBridge"} 1`,
		`opi_bridge_networks{state="up"} 1`, "xpu_build_info",
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("metrics lack %s", want)
		}
	}

	terminate()
	if _, err := n.Handle().LinkByName("br-net-blue"); err != nil {
		t.Errorf("after the end the bridge is gone: %v", err)
	}

	program(t, n, "--state", state, "--data-plane", "bridge-per-network")
	got, err := networks.GetLogicalBridge(ctx, &evpn.GetLogicalBridgeRequest{Name: lb.Name})
	if err != nil || got.Status.OperStatus != evpn.LBOperStatus_LB_OPER_STATUS_UP {
		t.Errorf("after the restart: %v, %v", got, err)
	}
}

// TestEndedWhileItStarts checks that an agent that is asked to end before it serves ends without an
// error.
func TestEndedWhileItStarts(t *testing.T) {
	n := netns.New(t)
	for range 10 {
		program(t, n, "--state", filepath.Join(t.TempDir(), "state.db"))()
	}
}

// TestHostPFs checks that a client gets the host PFs as the administrator has described them.
func TestHostPFs(t *testing.T) {
	n := netns.New(t)
	program(t, n, "--state", filepath.Join(t.TempDir(), "state.db"), "--data-plane",
		"bridge-per-network",
		"--host-pf", "c1pf0,mac=02:00:00:00:00:01,serial=MT2334XZ0LTK", "--host-pf",
		"0000:3b:00.1=c1pf1")

	agent := evpngw.Dialect().New(dial(t, n, insecure.NewCredentials()))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()

	got, err := agent.HostPFs(ctx)
	if want := (opi.HostPF{
		Name: "c1pf0", MAC: "02:00:00:00:00:01", Serial: "MT2334XZ0LTK",
	}); err != nil || len(got) != 1 || got[0] != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
}

func TestMutualTLS(t *testing.T) {
	n := netns.New(t)
	ca, other := opitest.NewAuthority(t), opitest.NewAuthority(t)
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}

	cert, key := ca.Issue(t, "127.0.0.1")
	program(t, n, "--listen", "0.0.0.0:50151", "--state", filepath.Join(dir, "state.db"),
		"--tls-cert", write("tls.crt", cert), "--tls-key", write("tls.key", key), "--tls-client-ca",
		write("ca.crt", ca.PEM()),
		"--metrics-listen", "0.0.0.0:9100", "--metrics-tls", "--pprof-listen", "127.0.0.1:6060")

	client := func(by *opitest.Authority) *tls.Config {
		cert, key := by.Issue(t, "controller")
		cfg, err := opi.TLSConfig(cert, key, ca.PEM(), "127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		return cfg
	}

	get := func(
		creds credentials.TransportCredentials, timeout time.Duration, opts ...grpc.CallOption,
	) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeout)
		defer cancel()
		_, err := evpn.NewBridgePortServiceClient(dial(t, n, creds)).GetBridgePort(ctx,
			&evpn.GetBridgePortRequest{Name: "bridgePorts/none"}, opts...)
		return err
	}

	if err := get(credentials.NewTLS(client(ca)),
		20*time.Second); status.Code(err) != codes.NotFound {
		t.Errorf("a client of the authority: %v, want NotFound", err)
	}
	if text, err := fetch(n, client(ca), "https://127.0.0.1:9100/metrics"); !strings.Contains(text,
		"opi_bridge_networks") {
		t.Errorf("metrics for a client of the authority: %.100q, %v", text, err)
	}
	if text, err := fetch(n, client(other), "https://127.0.0.1:9100/metrics"); err == nil {
		t.Errorf("metrics for a client of another authority: %.100q, want an error", text)
	}
	if text, err := fetch(n, nil, "http://127.0.0.1:6060/debug/pprof/cmdline"); err != nil ||
		text == "" {
		t.Errorf("profiles: %v", err)
	}

	failFast := grpc.WaitForReady(false)
	if err := get(credentials.NewTLS(client(other)), 20*time.Second,
		failFast); status.Code(err) != codes.Unavailable {
		t.Errorf("a client of another authority: %v, want Unavailable", err)
	}
	if err := get(insecure.NewCredentials(), 20*time.Second,
		failFast); status.Code(err) != codes.Unavailable {
		t.Errorf("a client without TLS: %v, want Unavailable", err)
	}

	// A renewed certificate is soon used for new connections. This client does not trust it.
	cert, key = other.Issue(t, "127.0.0.1")
	write("tls.crt", cert)
	write("tls.key", key)

	must.Eventually(t, "a connection by the new certificate", func() bool {
		return status.Code(get(credentials.NewTLS(client(ca)), 20*time.Second,
			failFast)) == codes.Unavailable
	})
}

// TestAuthorization checks that each client may do what its rule allows, also after the file has
// changed.
func TestAuthorization(t *testing.T) {
	n := netns.New(t)
	ca := opitest.NewAuthority(t)
	dir := t.TempDir()
	write := func(name, data string) string {
		path := filepath.Join(dir, name)
		must.Succeed(t, os.WriteFile(path, []byte(data), 0o600))
		return path
	}

	const rules = `
rules:
- {subject: CN=controller, networks: ["*"], ports: ["*"], vlans: [1-4094], vnis: [1-16777215]}
- {subject: CN=tenant, networks: ["net-a-*"], ports: ["vf-*"], vlans: [10-19], vnis: [],
   mostPorts: 1}
- {subject: CN=monitor, networks: ["*"], ports: ["*"], readOnly: true}
`

	cert, key := ca.Issue(t, "127.0.0.1")
	program(t, n, "--state", filepath.Join(dir, "state.db"), "--source-filter=false",
		"--authorization", write("authorization.yaml", rules),
		"--tls-cert", write("tls.crt", string(cert)), "--tls-key", write("tls.key", string(key)),
		"--tls-client-ca", write("ca.crt", string(ca.PEM())))

	as := func(name string) *grpc.ClientConn {
		cert, key := ca.Issue(t, name)
		cfg, err := opi.TLSConfig(cert, key, ca.PEM(), "127.0.0.1")
		must.Succeed(t, err)
		return dial(t, n, credentials.NewTLS(cfg))
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	network := func(conn *grpc.ClientConn, id string, vlan uint32) codes.Code {
		_, err := evpn.NewLogicalBridgeServiceClient(conn).CreateLogicalBridge(ctx,
			&evpn.CreateLogicalBridgeRequest{
				LogicalBridgeId: id,
				LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: vlan}},
			})
		return status.Code(err)
	}

	port := func(conn *grpc.ClientConn, id, network string, mac byte) codes.Code {
		_, err := evpn.NewBridgePortServiceClient(conn).CreateBridgePort(ctx,
			&evpn.CreateBridgePortRequest{
				BridgePortId: id, BridgePort: &evpn.BridgePort{Spec: &evpn.BridgePortSpec{
					MacAddress:     []byte{2, 0, 0, 0, 0, mac},
					Ptype:          evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
					LogicalBridges: []string{"logicalBridges/" + network},
				}},
			})
		return status.Code(err)
	}

	seen := func(conn *grpc.ClientConn) (names []string) {
		networks, err := evpn.NewLogicalBridgeServiceClient(conn).ListLogicalBridges(ctx,
			&evpn.ListLogicalBridgesRequest{})
		must.Succeed(t, err)
		ports, err := evpn.NewBridgePortServiceClient(conn).ListBridgePorts(ctx,
			&evpn.ListBridgePortsRequest{})
		must.Succeed(t, err)

		for _, n := range networks.GetLogicalBridges() {
			names = append(names, path.Base(n.GetName()))
		}

		for _, p := range ports.GetBridgePorts() {
			names = append(names, path.Base(p.GetName()))
		}

		return names
	}

	controller, tenant, monitor, stranger := as("controller"), as("tenant"), as(
		"monitor",
	), as("stranger")
	for i, test := range []struct {
		what string
		got  codes.Code
		want codes.Code
	}{
		{"controller: network", network(controller, "net-b", 20), codes.OK},
		{"controller: port", port(controller, "vf-0000-3b-00-2", "net-b", 1), codes.OK},
		{"tenant: own network", network(tenant, "net-a-1", 10), codes.OK},
		{"tenant: own port", port(tenant, "vf-0000-3b-00-3", "net-a-1", 2), codes.OK},
		{"tenant: another's VLAN", network(tenant, "net-a-2", 21), codes.PermissionDenied},
		{"tenant: more than it may have", port(tenant, "vf-0000-3b-00-5", "net-a-1", 5),
			codes.ResourceExhausted},
		{"tenant: another's network", network(tenant, "net-c", 30), codes.PermissionDenied},
		{"tenant: port on another's network", port(tenant, "vf-0000-3b-00-4", "net-b", 3),
			codes.PermissionDenied},
		{"tenant: another port", port(tenant, "sf-3b-00-0-88", "net-a-1", 4),
			codes.PermissionDenied},
		{"monitor: network", network(monitor, "net-d", 40), codes.PermissionDenied},
		{"stranger: network", network(stranger, "net-e", 50), codes.PermissionDenied},
	} {
		if test.got != test.want {
			t.Errorf("%d. %s: %s, want %s", i, test.what, test.got, test.want)
		}
	}

	ports := evpn.NewBridgePortServiceClient(tenant)
	foreign := "bridgePorts/vf-0000-3b-00-2"
	_, errGet := ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: foreign})
	_, errDelete := ports.DeleteBridgePort(ctx, &evpn.DeleteBridgePortRequest{Name: foreign})

	_, errUpdate := ports.UpdateBridgePort(ctx,
		&evpn.UpdateBridgePortRequest{BridgePort: &evpn.BridgePort{Name: foreign,
			Spec: &evpn.BridgePortSpec{
				MacAddress:     []byte{2, 0, 0, 0, 0, 9},
				Ptype:          evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
				LogicalBridges: []string{"logicalBridges/net-a-1"},
			}}})

	for what, err := range map[string]error{
		"get": errGet, "delete": errDelete, "update": errUpdate,
	} {
		if status.Code(err) != codes.PermissionDenied ||
			!strings.Contains(err.Error(), "CN=tenant") {
			t.Errorf("%s of another's port: %v", what, err)
		}
	}

	for _, test := range []struct {
		conn *grpc.ClientConn
		want []string
	}{
		{controller, []string{"net-a-1", "net-b", "vf-0000-3b-00-2", "vf-0000-3b-00-3"}},
		{monitor, []string{"net-a-1", "net-b", "vf-0000-3b-00-2", "vf-0000-3b-00-3"}},
		{tenant, []string{"net-a-1", "vf-0000-3b-00-3"}},
	} {
		if got := seen(test.conn); !slices.Equal(got, test.want) {
			t.Errorf("sees %q, want %q", got, test.want)
		}
	}

	if _, err := healthpb.NewHealthClient(stranger).Check(ctx,
		&healthpb.HealthCheckRequest{}); err != nil {
		t.Errorf("health for a stranger: %v", err)
	}

	write("authorization.yaml", "rules: [{subject: CN=stranger, networks: [") // changes nothing
	write("authorization.yaml",
		rules+`- {subject: CN=stranger, networks: ["net-e"], ports: [], vlans: [50], vnis: []}`)
	must.Eventually(t, "the stranger may make its network", func() bool {
		return network(stranger, "net-e", 50) == codes.OK
	})
}

func TestRefuses(t *testing.T) {
	dir := t.TempDir()
	ended, end := context.WithCancel(t.Context())
	end() // an agent that does not refuse must not serve this machine

	tests := map[string]struct {
		args []string
		says string
	}{
		"plaintext for everybody": {
			[]string{"--listen", "0.0.0.0:50151"}, "not a loopback address",
		},
		"half of TLS": {[]string{"--tls-cert", "x"}, "tls-key"},
		"TLS and not": {
			[]string{"--tls-cert", "x", "--tls-key", "x", "--tls-client-ca", "x", "--insecure"},
			"insecure",
		},
		"missing certificate": {
			[]string{"--tls-cert", dir + "/x", "--tls-key", dir + "/x", "--tls-client-ca", dir +
				"/x"}, dir + "/x",
		},
		"log format": {[]string{"--log-format", "xml"}, "text or json"},
		"metrics by TLS without": {
			[]string{"--metrics-listen", "127.0.0.1:0", "--metrics-tls"}, "needs --tls-cert",
		},
		"profiles for everybody": {[]string{"--listen", "127.0.0.1:0", "--pprof-listen", ":6060"},
			"not a loopback address"},
		"rules without TLS": {[]string{"--authorization", dir + "/x"}, "needs --tls-cert"},
		"representor": {
			[]string{"--representor", "*"}, `representor "*": must be the name of a netdev`,
		},
		"arguments": {[]string{"start"}, "start"},
		"data plane": {
			[]string{"--data-plane", "ovs"},
			`"ovs": must be auto, vlan-aware or bridge-per-network`,
		},
		"missing remotes": {[]string{"--remotes", dir + "/x"}, "--remotes: stat " + dir + "/x"},
		"host PF": {
			[]string{"--host-pf", "0000:3b:00.0=p0"},
			"must be like 0000:3b:00.0=c1pf0,offset=2,stride=1",
		},
		"host PFs of one name": {
			[]string{"--host-pf", "0000:3b:00.0=pf0", "--host-pf", "0000:3b:00.1=pf0"},
			"are both pf0",
		},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cmd := command(io.Discard)
			cmd.SetArgs(append(test.args, "--state", filepath.Join(dir, "state.db")))
			if err := cmd.ExecuteContext(ended); err == nil ||
				!strings.Contains(err.Error(), test.says) {
				t.Errorf("got %v, want an error with %q", err, test.says)
			}
		})
	}
}
