package bridge

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path"
	"runtime/debug"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/cardid"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// NewServer makes a gRPC server of the agent, which measures and logs calls. See [TLSFiles.ServerOptions] for opts.
func (a *Agent) NewServer(opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(opts,
		grpc.ChainUnaryInterceptor(a.observe, a.recovered),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: time.Minute, Timeout: 20 * time.Second,
			// A client whose certificate has expired or was revoked does not stay.
			MaxConnectionAge: time.Hour, MaxConnectionAgeGrace: time.Minute,
		}),
		grpc.ConnectionTimeout(10*time.Second), // until TLS and HTTP/2 are agreed upon
		grpc.MaxConcurrentStreams(64),          // of one client; work on the data plane is serial
		grpc.MaxRecvMsgSize(1<<20),             // a TRUNK port may name 4094 logical bridges, of 100 bytes each
	)...)
	evpn.RegisterLogicalBridgeServiceServer(s, networkServer{Agent: a})
	evpn.RegisterBridgePortServiceServer(s, portServer{Agent: a})
	ports := patience[[]devlink.Port]{limit: devlinkLimit, call: devlinkPorts}
	inventory.RegisterInventoryServiceServer(s, inventoryServer{hostPFs: a.cfg.HostPFs, ports: ports.do, serial: cardid.Read})
	return s
}

// recovered turns a panic in a call into an error, so that the agent and all other calls go on.
func (a *Agent) recovered(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (_ any, err error) {
	defer func() {
		if p := recover(); p != nil {
			stack := string(debug.Stack())
			a.log.Error(fmt.Errorf("panic: %v", p), "defect in a call", "rpc", path.Base(info.FullMethod), "stack", stack)
			err = status.Error(codes.Internal, "defect in the agent, see its log")
		}
	}()
	return handle(ctx, req)
}

// TLSFiles are the PEM files of a server with mTLS: its certificate chain, its key, and the authorities of its clients.
type TLSFiles struct{ Cert, Key, ClientCA string }

// ServerOptions reads the files now, so that it reports what is wrong with them, and again for each connection, so that
// renewed certificates are used without a restart. No error contains any part of the key.
func (f TLSFiles) ServerOptions() ([]grpc.ServerOption, error) {
	cfg, err := f.load()
	if err != nil {
		return nil, err
	}
	cfg.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.load() }
	return []grpc.ServerOption{grpc.Creds(credentials.NewTLS(cfg))}, nil
}

func (f TLSFiles) load() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("TLS certificate %s and key %s: %w", f.Cert, f.Key, err)
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, fmt.Errorf("TLS client CA: %w", err)
	}
	clients := x509.NewCertPool()
	if !clients.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("TLS client CA %s: no PEM certificate in it", f.ClientCA)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2"},
		Certificates: []tls.Certificate{pair},
		ClientCAs:    clients,
		ClientAuth:   tls.RequireAndVerifyClientCert,
	}, nil
}

// CheckPlaintext refuses an address (host:port) that other machines can reach: without TLS, they could rewire the ports.
func CheckPlaintext(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if host == "localhost" || net.ParseIP(host).IsLoopback() {
		return nil
	}
	return fmt.Errorf("address %s is not a loopback address: without TLS anybody who reaches it could rewire the ports", address)
}
