// Package evpngw is the dialect of opi-evpn-bridge, of the agents derived from it, and of opi-bridge: LogicalBridges and
// BridgePorts of the OPI API network/evpn-gw. Create and Delete answer before they are carried out.
package evpngw

import (
	"context"
	"fmt"
	"strings"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Name is what XPUs and configurations call the dialect.
const Name = "evpn-gw"

// The names of objects. The API's comments say "bridgePorts/{id}", but no evpn-gw agent finds anything there.
const (
	portPrefix    = "//network.opiproject.org/ports/"
	networkPrefix = "//network.opiproject.org/bridges/"
)

// pageSize is the most that the reference agent gives in one page.
const pageSize = 250

// Dialect makes agents.
type Dialect struct{}

// Agent implements [opi.Dialect].
func (Dialect) Agent(conn grpc.ClientConnInterface) opi.Agent {
	return agent{networks: evpn.NewLogicalBridgeServiceClient(conn), ports: evpn.NewBridgePortServiceClient(conn)}
}

type agent struct {
	networks evpn.LogicalBridgeServiceClient
	ports    evpn.BridgePortServiceClient
}

// Alive asks for a port that never exists: every agent answers that, while grpc.health.v1 is not served by the reference
// agent, its List leaks memory and its inventory can end the process.
func (a agent) Alive(ctx context.Context) error {
	const never = "opi-liveness-check"
	_, err := a.ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: portPrefix + never})
	switch status.Code(err) {
	case codes.NotFound, codes.Unimplemented:
		return nil
	}
	return err
}

// hints are parts of the messages with which opi-evpn-bridge tells failures apart that all have the code Unknown.
var hints = [...]struct {
	text string
	kind error
}{
	{"has not been found", opi.ErrNetworkMissing},
	{"unable to find key", opi.ErrNetworkMissing},
	{"key not found", opi.ErrNetworkMissing}, // a TRUNK of all networks while the agent has none
	{"already associated", opi.ErrConflict},
	{"already in use", opi.ErrConflict}, // a VNI
	{"is not empty", opi.ErrInUse},
	{"missing required field", opi.ErrInvalid},
	{"user-settable ID", opi.ErrInvalid},
}

// Kind implements [opi.Agent].
func (agent) Kind(err error) error {
	switch status.Code(err) {
	case codes.Unknown, codes.FailedPrecondition:
		for _, hint := range hints {
			if strings.Contains(status.Convert(err).Message(), hint.text) {
				return hint.kind
			}
		}
	}
	return opi.KindOf(err)
}

// statusOf is what an object's operational status and its components say. Only a component in state ERROR counts as
// failed: others may still be at work.
func statusOf(up, deleting bool, components []*evpn.Component) opi.Status {
	var details []string
	for _, comp := range components {
		if comp.GetStatus() == evpn.CompStatus_COMP_STATUS_ERROR {
			details = append(details, comp.GetName()+": "+comp.GetDetails())
		}
	}
	status := opi.Status{Detail: strings.Join(details, "; ")}
	switch {
	case up:
		status.State = opi.StateUp
	case deleting:
		status.State = opi.StateDeleting
	case len(details) > 0:
		status.State = opi.StateFailed
	}
	return status
}

// lastSegment is the id in a resource name. Agents differ in what stands before it.
func lastSegment(name string) string {
	return name[strings.LastIndexByte(name, '/')+1:]
}

// unverifiable is the error of an agent that leaves out what was asked for.
func unverifiable(call string) error {
	return &opi.Error{
		Kind: opi.ErrUnsupported, Detail: fmt.Sprintf("the agent's %s answers without a spec, so nothing can be verified", call),
	}
}
