// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"fmt"
	"path"
	"runtime/debug"
	"time"

	opiinventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/inventory"
)

// NewServer returns a gRPC server of the agent. It measures and logs calls. See
// [access.Credentials.ServerOptions] for opts.
func (a *Agent) NewServer(opts ...grpc.ServerOption) *grpc.Server {
	s := grpc.NewServer(append(opts,
		grpc.ChainUnaryInterceptor(a.observe, explain, a.recoverPanic, requireRule),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{
			MinTime: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			Time: time.Minute, Timeout: 20 * time.Second,
			// A client whose certificate has expired or was revoked has to authenticate again.
			MaxConnectionAge: time.Hour, MaxConnectionAgeGrace: time.Minute,
		}),
		grpc.ConnectionTimeout(10*time.Second), // for the handshakes of TLS and HTTP/2
		grpc.MaxConcurrentStreams(64),          // of one client, because work is serial anyway
		// A TRUNK port may name 4094 logical bridges, each with 100 bytes.
		grpc.MaxRecvMsgSize(1<<20),
	)...)

	evpn.RegisterLogicalBridgeServiceServer(s, networkServer{Agent: a})
	evpn.RegisterBridgePortServiceServer(s, portServer{Agent: a})
	evpn.RegisterVrfServiceServer(s, vrfServer{Agent: a})
	evpn.RegisterSviServiceServer(s, sviServer{Agent: a})
	opibridge.RegisterOptionsServiceServer(s, optionsServer{Agent: a})
	opibridge.RegisterCountersServiceServer(s, countersServer{Agent: a})
	opiinventory.RegisterInventoryServiceServer(s,
		inventory.NewServer(a.cfg.Plane.Representors.HostPFs))

	return s
}

// recoverPanic turns a panic in a call into an error, so that the agent and all other calls go on.
func (a *Agent) recoverPanic(
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
