// SPDX-License-Identifier: Apache-2.0

// Package dpuoperator is the dialect of the DPU side of dpu-operator, which passes BridgePorts on
// to the plugin of a vendor: Intel NetSec, Marvell, Intel IPU.
//
// The agent has calls to create and to delete a port, and none to read one. It has no networks: a
// port carries the VLAN of its network. It knows a Function by the numbers of its PF and VF. Its
// errors have the code Unknown, so that their texts decide what they mean.
//
// The facts come from openshift/dpu-operator a053698b: internal/daemon/dpusidemanager.go, and the
// plugins in internal/daemon/vendor-specific-plugins.
package dpuoperator

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Name is the dialect's name in XPUs and configurations.
const Name = "dpu-operator"

// Dialect is the [opi.Dialect] of this package.
func Dialect() opi.Dialect {
	return opi.Dialect{
		Name: Name, New: newAgent,
		Traits: opi.Traits{
			Numbered: true,
			// The plugin of the Intel IPU computes the VSI from the second byte of the address.
			HardwareMAC: true,
			Alive:       "HeartbeatService.Ping",
			Timing: opi.Timing{
				// The plugin of Intel NetSec waits up to 40 s for a netdev before it answers.
				Read: 5 * time.Second, Change: 2 * time.Minute, Late: time.Minute,
				Recovery: time.Second, InFlight: 4,
			},
		},
	}
}

func newAgent(conn grpc.ClientConnInterface) opi.Agent {
	return agent{conn: conn, ports: evpn.NewBridgePortServiceClient(conn)}
}

type agent struct {
	conn  grpc.ClientConnInterface
	ports evpn.BridgePortServiceClient
}

// pings are the methods by which versions of the agent show that they are alive. The fields of
// their messages are optional.
var pings = [...]string{
	"/opi_api.lifecycle.v1.HeartbeatService/Ping", // opi-api v1.0.0
	"/opi_api.lifecycle.v1alpha1.HeartbeatService/Ping",
	"/Vendor.HeartbeatService/Ping",
}

// Alive implements [opi.Agent]. An agent without any of the methods answers, and so is alive.
func (a agent) Alive(ctx context.Context) error {
	for _, method := range pings {
		err := a.conn.Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{})
		if status.Code(err) != codes.Unimplemented {
			return err
		}
	}
	return nil
}

// unread is the error of calls that read ports or networks.
func unread() error {
	return &opi.Error{Kind: opi.ErrUnsupported, Detail: "the agent has no calls that read ports"}
}

// Port implements [opi.Agent].
func (agent) Port(context.Context, string) (opi.PortStatus, error) {
	return opi.PortStatus{}, unread()
}

// Ports implements [opi.Agent].
func (agent) Ports(context.Context) ([]opi.PortStatus, error) { return nil, unread() }

// Network implements [opi.Agent].
func (agent) Network(context.Context, string) (opi.NetworkStatus, error) {
	return opi.NetworkStatus{}, unread()
}

// Networks implements [opi.Agent].
func (agent) Networks(context.Context) ([]opi.NetworkStatus, error) { return nil, unread() }

// CreateNetwork implements [opi.Agent]. Networks with a VNI are refused, because a port can carry a
// VLAN only.
func (agent) CreateNetwork(_ context.Context, n opi.Network, _ netip.Addr) error {
	if n.VNI != nil {
		return &opi.Error{
			Kind: opi.ErrInvalid, Field: "VNI",
			Detail: "agents of dpu-operator have VLANs only; leave the VNI out",
		}
	}
	return nil
}

// DeleteNetwork implements [opi.Agent].
func (agent) DeleteNetwork(context.Context, string) error { return nil }

// CreatePort implements [opi.Agent]. A port that the agent says it has already counts as created,
// because a repeated call cannot be told from somebody else's port.
func (a agent) CreatePort(ctx context.Context, p opi.Port) error {
	name, err := portName(p.ID)
	if err != nil {
		return err
	}
	if p.Trunk || len(p.VLANs) != 1 {
		return &opi.Error{
			Kind: opi.ErrInvalid, Field: "Networks",
			Detail: "a port of dpu-operator has one VLAN, and is no trunk",
		}
	}

	_, err = a.ports.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{
		BridgePort: &evpn.BridgePort{
			Name: name,
			Spec: &evpn.BridgePortSpec{
				Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS, MacAddress: p.MAC,
				LogicalBridges: []string{strconv.Itoa(int(p.VLANs[0]))},
			},
		},
	})
	if says(err, "already allocated") { // Intel NetSec
		return nil
	}

	return err
}

// RetryPort implements [opi.Agent]. It is not called, because the agent reports no failed ports.
func (agent) RetryPort(context.Context, opi.Port) error { return unread() }

// DeletePort implements [opi.Agent].
func (a agent) DeletePort(ctx context.Context, id string) error {
	name, err := portName(id)
	if err != nil {
		return err
	}

	_, err = a.ports.DeleteBridgePort(ctx,
		&evpn.DeleteBridgePortRequest{Name: name, AllowMissing: true})
	if says(err, "not allocated") || says(err, "no port named") { // Intel NetSec, Open vSwitch
		return &opi.Error{
			Kind: opi.ErrNotFound, Detail: opi.Short(status.Convert(err).Message()), Err: err,
		}
	}

	return err
}

// says reports whether the agent's error has this text.
func says(err error, text string) bool {
	return status.Code(err) == codes.Unknown && strings.Contains(status.Convert(err).Message(), text)
}

// numbered matches the id of a VF's port: see [opi.PortIDAt]. The numbers have at most five digits.
var numbered = regexp.MustCompile(`^pf(0|[1-9][0-9]{0,4})vf(0|[1-9][0-9]{0,4})$`)

// portName returns the agent's name for a port: "host0-3" for VF 3 of PF 0.
func portName(id string) (string, error) {
	numbers := numbered.FindStringSubmatch(id)
	if numbers == nil {
		return "", &opi.Error{
			Kind: opi.ErrInvalid, Field: "ID",
			Detail: fmt.Sprintf("agents of dpu-operator know VFs by the numbers of PF and VF, as "+
				"in pf0vf3, and %q has none; see whether the node's XPUNode has the PF, and use "+
				"VFs only", id),
		}
	}
	return "host" + numbers[1] + "-" + numbers[2], nil
}

// SetNetworkOptions implements [opi.Options].
func (agent) SetNetworkOptions(context.Context, opi.Network) (mtu int, err error) {
	return 0, errNoOptions()
}

// SetPortOptions implements [opi.Options].
func (agent) SetPortOptions(context.Context, opi.Port) error { return errNoOptions() }

func errNoOptions() error {
	return &opi.Error{Kind: opi.ErrUnsupported, Detail: "the agent has no options"}
}

// VRF implements [opi.Gateways].
func (agent) VRF(context.Context, string) (opi.VRFStatus, error) {
	return opi.VRFStatus{}, errNoGateways()
}

// VRFs implements [opi.Gateways].
func (agent) VRFs(context.Context) ([]opi.VRFStatus, error) { return nil, errNoGateways() }

// CreateVRF implements [opi.Gateways].
func (agent) CreateVRF(context.Context, opi.VRF) error { return errNoGateways() }

// DeleteVRF implements [opi.Gateways].
func (agent) DeleteVRF(context.Context, string) error { return errNoGateways() }

// Gateway implements [opi.Gateways].
func (agent) Gateway(context.Context, string) (opi.GatewayStatus, error) {
	return opi.GatewayStatus{}, errNoGateways()
}

// Gateways implements [opi.Gateways].
func (agent) Gateways(context.Context) ([]opi.GatewayStatus, error) { return nil, errNoGateways() }

// CreateGateway implements [opi.Gateways].
func (agent) CreateGateway(context.Context, string, opi.Gateway) error { return errNoGateways() }

// DeleteGateway implements [opi.Gateways].
func (agent) DeleteGateway(context.Context, string) error { return errNoGateways() }

func errNoGateways() error {
	return &opi.Error{Kind: opi.ErrUnsupported, Detail: "the agent has no gateways"}
}

// HostPFs implements [opi.Agent]. The agent does not report the PFs of its host.
func (agent) HostPFs(context.Context) ([]opi.HostPF, error) { return nil, nil }

// Reconnected implements [opi.Agent].
func (agent) Reconnected() {}

// Kind implements [opi.Agent].
func (agent) Kind(err error) error {
	if kind := opi.KindOf(err); !errors.Is(kind, opi.ErrNotFound) {
		return kind
	}
	return opi.ErrFailed // the agent does not use the code for ports that do not exist
}
