// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"context"
	"fmt"
	"net"
	"path"
	"runtime/debug"
	"strings"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/cardid"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// NewServer makes a gRPC server of the agent, which measures and logs calls. See
// [Credentials.ServerOptions] for opts.
func (a *Agent) NewServer(opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(opts,
		grpc.ChainUnaryInterceptor(a.observe, a.recovered, authorize),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: time.Minute, Timeout: 20 * time.Second,
			// A client whose certificate has expired or was revoked does not stay.
			MaxConnectionAge: time.Hour, MaxConnectionAgeGrace: time.Minute,
		}),
		grpc.ConnectionTimeout(10*time.Second), // until TLS and HTTP/2 are agreed upon
		grpc.MaxConcurrentStreams(64),          // of one client; work on the data plane is serial
		// a TRUNK port may name 4094 logical bridges, of 100 bytes each
		grpc.MaxRecvMsgSize(1<<20),
	)...)

	evpn.RegisterLogicalBridgeServiceServer(s, networkServer{Agent: a})
	evpn.RegisterBridgePortServiceServer(s, portServer{Agent: a})
	opibridge.RegisterOptionsServiceServer(s, optionsServer{Agent: a})
	ports := patience[[]devlink.Port]{limit: devlinkLimit, call: devlinkPorts}
	inventory.RegisterInventoryServiceServer(s,
		inventoryServer{hostPFs: a.cfg.HostPFs, ports: ports.do, serial: cardid.Read})

	return s
}

// authorize refuses calls of clients that no rule is for, all but those that tell whether the agent
// works.
func authorize(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	if !strings.HasPrefix(info.FullMethod, "/grpc.health.v1.Health/") {
		if err := clientOf(ctx).known(); err != nil {
			return nil, err
		}
	}
	return handle(ctx, req)
}

// recovered turns a panic in a call into an error, so that the agent and all other calls go on.
func (a *Agent) recovered(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (_ any, err error) {
	defer func() {
		if p := recover(); p != nil {
			stack := string(debug.Stack())
			a.log.Error(fmt.Errorf("panic: %v", p), "defect in a call",
				"rpc", path.Base(info.FullMethod), "stack", stack)
			err = status.Error(codes.Internal, "defect in the agent, see its log")
		}
	}()
	return handle(ctx, req)
}

// CheckPlaintext refuses an address (host:port) that other machines can reach: without TLS, they
// could rewire the ports.
func CheckPlaintext(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("address %q is not host:port: %w", address, err)
	}
	if host == "localhost" || net.ParseIP(host).IsLoopback() {
		return nil
	}
	return fmt.Errorf("address %s is not a loopback address: without TLS anybody who reaches it "+
		"could rewire the ports", address)
}
