// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Dialect creates the [Agent] for a connection. It knows how one kind of OPI agent names objects,
// which calls the agent has, and what its errors mean. [Client] adds waiting and retries. Package
// dialects lists the dialects.
type Dialect func(conn grpc.ClientConnInterface) Agent

// Agent makes single calls to an OPI agent. Ports and networks have the ids of [PortID] and
// [NetworkID]; a dialect with other names derives the names from the ids. Results are bounded,
// whatever the agent sends. The agent may carry out a call although the method returns an error.
// Methods are safe for concurrent use.
//
// What an agent leaves out is unknown. It must neither be filled in nor be taken for absent.
type Agent interface {
	// Alive returns nil if the agent answers.
	Alive(ctx context.Context) error

	// Port returns the port with the id. The error is [ErrNotFound] if the agent reports that there
	// is none, and [ErrUnknown] if no call of the agent returns all fields of Port.
	Port(ctx context.Context, id string) (PortStatus, error)
	// Ports returns all ports in the agent's order, including other clients'. A port with unknown
	// fields has [StateUnknown].
	Ports(ctx context.Context) ([]PortStatus, error)
	// CreatePort requests a port. The error is [ErrNetworkMissing] if one of its networks does not
	// exist.
	CreatePort(ctx context.Context, p Port) error
	// RetryPort asks the agent to try again to bring a failed port into service. A nil error does
	// not mean that the port is in service.
	RetryPort(ctx context.Context, p Port) error
	// DeletePort requests the deletion of a port. For a port that does not exist it returns nil or
	// [ErrNotFound], and [ErrNotFound] means nothing else.
	DeletePort(ctx context.Context, id string) error

	// Network returns the network with the id. Errors are like those of Port.
	Network(ctx context.Context, id string) (NetworkStatus, error)
	// Networks returns all networks in the agent's order, including other clients'.
	Networks(ctx context.Context) ([]NetworkStatus, error)
	// CreateNetwork requests a network. If it has a VNI, its VXLAN is sent from vtep, or from an
	// address that the agent chooses if vtep is zero.
	CreateNetwork(ctx context.Context, n Network, vtep netip.Addr) error
	// DeleteNetwork requests the deletion of a network. The error is [ErrInUse] if ports use it.
	// For a network that does not exist it returns nil or [ErrNotFound].
	DeleteNetwork(ctx context.Context, id string) error

	Options

	// HostPFs returns the PFs that the xPU provides to its host, at most [MaxHostPFs]. It returns
	// none if the agent does not report them.
	HostPFs(ctx context.Context) ([]HostPF, error)

	// Reconnected is called after each new connection, because the agent may have been upgraded
	// meanwhile.
	Reconnected()

	// Kind classifies a gRPC error as one of the Err variables of this package. [KindOf] classifies
	// the errors that mean the same for all agents.
	Kind(err error) error
}

// KindOf classifies a gRPC error by its code alone.
func KindOf(err error) error {
	switch status.Code(err) {
	case codes.NotFound:
		return ErrNotFound
	case codes.InvalidArgument, codes.OutOfRange:
		return ErrInvalid
	case codes.AlreadyExists:
		return ErrConflict
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return ErrUnavailable
	case codes.Unimplemented:
		return ErrUnsupported
	}
	return ErrFailed
}
