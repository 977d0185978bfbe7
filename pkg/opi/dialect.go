// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Dialect makes the [Agent] at the other end of a connection. It knows how one kind of OPI agent
// names objects, which calls the agent has, and what its errors mean; [Client] waits and retries.
// Package dialects lists the dialects.
type Dialect func(conn grpc.ClientConnInterface) Agent

// Agent makes single calls to an OPI agent. Ports and networks have the ids of [PortID] and
// [NetworkID]; a dialect with other names derives them from these. What the methods return is
// bounded, whatever the agent sends. The agent may carry out a call although it returns an error.
// The methods may be called by several goroutines at once.
//
// What an agent does not tell is unknown. It is neither filled in, nor taken for absent.
type Agent interface {
	// Alive returns nil if the agent answers.
	Alive(ctx context.Context) error

	// Port returns what the agent has under the id, with an error of kind [ErrNotFound] where the
	// agent says that there is nothing, and of kind [ErrUnknown] where no call of the agent tells
	// all of Port's fields.
	Port(ctx context.Context, id string) (PortStatus, error)
	// Ports returns all ports, also those of other clients, in the agent's order. One of which not
	// all is told is [StateUnknown].
	Ports(ctx context.Context) ([]PortStatus, error)
	// CreatePort asks for a port. [ErrNetworkMissing]: one of its networks is not there.
	CreatePort(ctx context.Context, p Port) error
	// RetryPort asks the agent to try again to bring the port p into service, which failed before.
	// nil does not mean that the port is in service.
	RetryPort(ctx context.Context, p Port) error
	// DeletePort asks the agent to delete a port. For a port that does not exist it returns nil or
	// an [ErrNotFound], which it returns for nothing else.
	DeletePort(ctx context.Context, id string) error

	// Network returns what the agent has under the id. Errors are as with Port.
	Network(ctx context.Context, id string) (NetworkStatus, error)
	// Networks returns all networks, also those of other clients, in the agent's order.
	Networks(ctx context.Context) ([]NetworkStatus, error)
	// CreateNetwork asks for a network.
	CreateNetwork(ctx context.Context, n Network) error
	// DeleteNetwork asks the agent to delete a network. [ErrInUse]: ports use it. For a network
	// that does not exist it returns nil or an [ErrNotFound].
	DeleteNetwork(ctx context.Context, id string) error

	Options

	// HostPFs returns the PFs that the xPU gives its host, at most [MaxHostPFs]; none for an agent
	// that does not tell.
	HostPFs(ctx context.Context) ([]HostPF, error)

	// Reconnected is called when the connection came up anew: the agent may be another release
	// since.
	Reconnected()

	// Kind classifies an error of gRPC as one of the Err variables of this package. [KindOf] does
	// so for the errors that mean the same for all agents.
	Kind(err error) error
}

// KindOf classifies an error of gRPC by its code alone.
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
