package opi

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Dialect is what one kind of OPI agent makes of the API, which leaves room for it: how objects are named, which calls
// there are, and what errors mean. What follows from that, such as waiting and repeating, is the [Client]'s. Package
// dialects lists those that there are.
type Dialect interface {
	// Agent speaks the dialect over a connection.
	Agent(conn grpc.ClientConnInterface) Agent
}

// Agent are single calls of an OPI agent. Ports and networks have the ids of [PortID] and [NetworkID]; a dialect with
// other names derives them from these. A call may be refused and carried out all the same: see [Agent.Kind]. The methods
// may be called by several goroutines at once.
type Agent interface {
	// Alive returns nil where the agent answers.
	Alive(ctx context.Context) error

	// Port returns what the agent has under the id, with an error of kind [ErrNotFound] where there is nothing. An error of
	// kind [ErrUnsupported] says that the agent does not tell enough to verify anything.
	Port(ctx context.Context, id string) (PortStatus, error)
	// Ports returns all ports, also those of other clients, in the agent's order.
	Ports(ctx context.Context) ([]PortStatus, error)
	// CreatePort asks for a port. [ErrNetworkMissing]: one of its networks is not there.
	CreatePort(ctx context.Context, p Port) error
	// RetryPort has the agent try again to bring a port into service that it has as p and that failed. nil says only that
	// it may be worth another look.
	RetryPort(ctx context.Context, p Port) error
	// DeletePort asks the agent to delete a port. One that is not there is no error, or an [ErrNotFound].
	DeletePort(ctx context.Context, id string) error

	// Network returns what the agent has under the id. Errors are as with Port.
	Network(ctx context.Context, id string) (NetworkStatus, error)
	// CreateNetwork asks for a network.
	CreateNetwork(ctx context.Context, n Network) error
	// DeleteNetwork asks the agent to delete a network. [ErrInUse]: ports use it. One that is not there is no error, or an
	// [ErrNotFound].
	DeleteNetwork(ctx context.Context, id string) error

	// Kind classifies an error of gRPC as one of the Err variables of this package. [KindOf] knows what all agents have in
	// common.
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
