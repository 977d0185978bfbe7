// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"context"
	"net/netip"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Dialect describes one kind of OPI agent: how the agent names objects, which calls it has, and
// what its errors mean. [Client] adds waiting and retries. Package dialects lists the dialects.
type Dialect struct {
	// Name is the dialect's name in XPUs and configurations.
	Name   string
	Traits Traits
	// New returns the agent at the other end of a connection.
	New func(conn grpc.ClientConnInterface) Agent
}

// Traits are what agents of a dialect can do and what they need.
type Traits struct {
	// Verifies means that the agent reports its ports and networks. If it does not, the success of
	// a call is the only evidence that a port exists or is gone. Each port is then created again on
	// each new connection, because the agent may have lost it with the last one, and what other
	// clients do at the agent remains unknown.
	Verifies bool
	// Networks means that networks are objects of the agent. Otherwise a network exists at the
	// agent only as the VLAN of its ports.
	Networks bool
	// Gateways means that agents of the dialect may have VRFs and gateways. Whether an agent has
	// them, its answers say.
	Gateways bool
	// Trunks means that a port can be in several networks, with the VLAN tags of the networks. The
	// agent needs [Traits.Networks] for that.
	Trunks bool
	// Numbered means that the agent knows a Function by the numbers of its PF and VF, so that the
	// ids of ports must come from [PortIDAt].
	Numbered bool
	// HardwareMAC means that the agent knows a Function by its MAC address, so that a port must
	// have the address that the Function has by itself.
	HardwareMAC bool
	// Alive describes the call that finds out whether the agent answers, for people.
	Alive string

	Timing Timing
}

// Timing is how much time agents of a dialect need.
type Timing struct {
	// Read bounds a call that changes nothing, and Change a call that does. A call that changes
	// something is not cancelled with its caller's context, because the agent goes on with it.
	Read, Change time.Duration
	// Late is how long an agent may still carry out a call whose answer was lost.
	Late time.Duration
	// Recovery is how long a failed port or network may take to recover by itself.
	Recovery time.Duration
	// DeleteAgain is the time after which a port's deletion without effect is assumed to be lost.
	DeleteAgain time.Duration
	// InFlight bounds the calls to one agent at a time, for changing and reading calls separately.
	InFlight int64
}

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
	// is none, and [ErrUnknown] if no call of the agent returns all fields of Port. Without
	// [Traits.Verifies], Port, Ports, Network and Networks return [ErrUnsupported].
	Port(ctx context.Context, id string) (PortStatus, error)
	// Ports returns all ports in the agent's order, including other clients'. A port with unknown
	// fields has [StateUnknown].
	Ports(ctx context.Context) ([]PortStatus, error)
	// CreatePort requests a port. The error is [ErrNetworkMissing] if one of its networks does not
	// exist, and [ErrNoTrunks] if the port is a trunk and the agent has none.
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
	// address that the agent chooses if vtep is zero. Without [Traits.Networks], it only checks
	// whether the agent's ports can be in such a network.
	CreateNetwork(ctx context.Context, n Network, vtep netip.Addr) error
	// DeleteNetwork requests the deletion of a network. The error is [ErrInUse] if ports use it.
	// For a network that does not exist it returns nil or [ErrNotFound].
	DeleteNetwork(ctx context.Context, id string) error

	Options
	Gateways

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
