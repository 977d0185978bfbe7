// SPDX-License-Identifier: Apache-2.0

// Package evpngw is the dialect of opi-evpn-bridge, of agents derived from it, and of opi-bridge:
// the LogicalBridges and BridgePorts of the OPI API network/evpn-gw. Create and Delete answer
// before they are carried out.
package evpngw

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/sets"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/keylock"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Names of the dialects in XPUs and configurations.
const (
	Name      = "evpn-gw"
	NameE2000 = "intel-e2000"
)

// Default prefixes of object names, until the agent's answers show others. The API's comments say
// "bridgePorts/{id}", but no evpn-gw agent was observed to find anything under such a name.
const (
	portPrefix    = "//network.opiproject.org/ports/"
	networkPrefix = "//network.opiproject.org/bridges/"
)

// objectNames maps ids to an agent's names for objects of one kind. A name is a prefix, which the
// agent chooses, and the id. Safe for concurrent use.
type objectNames struct{ prefix atomic.Value } // string

func newNames(prefix string) *objectNames {
	n := &objectNames{}
	n.prefix.Store(prefix)
	return n
}

func (n *objectNames) name(id string) string { return n.prefix.Load().(string) + id }

// learn adopts the prefix of the agent's own name for an object with this id.
func (n *objectNames) learn(name, id string) {
	if prefix, isName := strings.CutSuffix(opi.Short(name), id); isName && prefix != "" &&
		prefix != n.prefix.Load().(string) {
		n.prefix.Store(prefix)
	}
}

// pageSize is the maximum page size of the reference agent.
const pageSize = 250

// Limits of what is kept of an agent's answers, so that no agent can exhaust the memory of a client
// of many agents.
const (
	maxObjects = 16 << 10 // a card with several PFs has some thousand Functions
	maxPages   = 1 << 10
	maxMAC     = 32 // bytes; 6 are valid, 17 were observed
	// per port; one more than a valid port has, so that a port with more is not taken for valid
	maxNetworks   = opi.MaxNetworks + 1
	maxComponents = 8 // per object; the reference agent has one or two
)

// list returns the converted objects on all pages of a list.
func list[M, S any](
	convert func(M) S, page func(token string) (objects []M, next string, err error),
) ([]S, error) {
	var all []S
	tokens := sets.New("")
	for token := ""; ; {
		objects, next, err := page(token)
		switch {
		case status.Code(err) == codes.NotFound && token == "" && namesObject(err):
			detail := "the agent cannot list its objects, because it has lost one; look at its " +
				"store and restart it: "
			return nil, &opi.Error{
				Kind: opi.ErrFailed, Detail: detail + opi.Short(status.Convert(err).Message()),
				Err: err,
			}
		case status.Code(err) == codes.NotFound && token == "":
			return nil, nil // the reference agent's answer before its first object

		case status.Code(err) == codes.NotFound:
			return nil, &opi.Error{
				Kind:   opi.ErrUnavailable,
				Detail: "the agent forgot the page token, it was probably restarted", Err: err,
			}
		case err != nil:
			return nil, err
		case len(all)+len(objects) > maxObjects:
			return nil, endless(fmt.Sprintf("more than %d objects", maxObjects))
		case tokens.Len() > maxPages:
			return nil, endless(fmt.Sprintf("more than %d pages", maxPages))
		}

		for _, object := range objects {
			all = append(all, convert(object))
		}
		if next == "" {
			return all, nil
		}
		if tokens.Has(next) {
			return nil, endless("the same page token again")
		}

		tokens.Insert(next)
		token = next
	}
}

func endless(what string) error {
	return &opi.Error{Kind: opi.ErrUnsupported, Detail: "the agent lists " + what}
}

// Dialect returns the dialect of opi-evpn-bridge and opi-bridge. Versions of opi-evpn-bridge are
// told apart by their answers.
func Dialect() opi.Dialect {
	return opi.Dialect{
		Name: Name, New: newAgent,
		Traits: opi.Traits{
			Verifies: true, Networks: true, Trunks: true, Gateways: true,
			Alive: "GetBridgePort for a port that never exists",
			Timing: opi.Timing{
				// Agents answer reads within milliseconds, and may take 40 s for a port.
				Read: 5 * time.Second, Change: 2 * time.Minute,
				// Agents that answer late do so within several seconds. When a connection is lost,
				// they drop calls that they have not begun.
				Late: 10 * time.Second,
				// opi-evpn-bridge retries after 2 s.
				Recovery: 3 * time.Second,
				// opi-evpn-bridge may keep an object forever if it is deleted during an earlier
				// deletion.
				DeleteAgain: 2 * time.Second,
				// opi-evpn-bridge has one task queue, and answers a larger burst with "busy" and
				// delays of seconds.
				InFlight: 8,
			},
		},
	}
}

// E2000 returns the dialect of opi-intel-bridge for the IPU E2000. It is derived from
// opi-evpn-bridge. It ignores the id of a port, and computes the vport of the Function from the
// first two bytes of the port's MAC address.
func E2000() opi.Dialect {
	d := Dialect()
	d.Name, d.Traits.HardwareMAC, d.Traits.Trunks = NameE2000, true, false
	// Its VRFs and gateways are made by P4 programs, whose tables nobody has seen at work yet.
	d.Traits.Gateways = false
	return d
}

func newAgent(conn grpc.ClientConnInterface) opi.Agent {
	return agent{
		networks:  evpn.NewLogicalBridgeServiceClient(conn),
		ports:     evpn.NewBridgePortServiceClient(conn),
		health:    healthpb.NewHealthClient(conn),
		inventory: inventory.NewInventoryServiceClient(conn),
		options:   opibridge.NewOptionsServiceClient(conn), vrfs: evpn.NewVrfServiceClient(conn),
		gateways:     evpn.NewSviServiceClient(conn),
		networkNames: newNames(networkPrefix), portNames: newNames(portPrefix),
		vrfNames: newNames(vrfPrefix), gatewayNames: newNames(gatewayPrefix),
		getIsComplete: new(atomic.Bool), macLocks: new(keylock.Locks[string]),
	}
}

type agent struct {
	networks                evpn.LogicalBridgeServiceClient
	ports                   evpn.BridgePortServiceClient
	health                  healthpb.HealthClient
	inventory               inventory.InventoryServiceClient
	options                 opibridge.OptionsServiceClient
	vrfs                    evpn.VrfServiceClient
	gateways                evpn.SviServiceClient
	networkNames, portNames *objectNames
	vrfNames, gatewayNames  *objectNames

	// GetBridgePort has returned all fields of a port since the connection came up
	getIsComplete *atomic.Bool
	// by MAC address; held while checking that the address is unused and creating the port
	macLocks *keylock.Locks[string]
}

// Alive requests a port that never exists, which every agent answers. Other calls are unsuitable:
// the reference agent does not serve grpc.health.v1, its List leaks memory, and its inventory can
// end the process.
func (a agent) Alive(ctx context.Context) error {
	const never = "opi-liveness-check"
	_, err := a.ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: a.portNames.name(never)})
	switch status.Code(err) {
	case codes.NotFound, codes.Unimplemented:
		return nil
	}
	return err
}

// hints are parts of error messages of opi-evpn-bridge, which uses the code Unknown for different
// kinds of errors.
var hints = [...]struct {
	text string
	kind error
}{
	{"has not been found", opi.ErrNetworkMissing},
	{"unable to find key", opi.ErrNetworkMissing},
	{"key not found", opi.ErrNetworkMissing}, // a trunk of all networks while the agent has none
	{"already associated", opi.ErrConflict},
	{"already in use", opi.ErrConflict}, // said of a VNI
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

// Network implements [opi.Agent].
func (a agent) Network(ctx context.Context, id string) (opi.NetworkStatus, error) {
	return lookup[opi.NetworkStatus]{
		noun: "network", get: a.getNetwork, list: a.Networks,
		id:         func(n opi.NetworkStatus) string { return n.ID },
		status:     func(n *opi.NetworkStatus) *opi.Status { return &n.Status },
		consistent: func(opi.NetworkStatus, opi.NetworkStatus) bool { return true },
	}.find(ctx, id)
}

func (a agent) getNetwork(ctx context.Context, id string) (opi.NetworkStatus, error) {
	got, err := a.networks.GetLogicalBridge(ctx,
		&evpn.GetLogicalBridgeRequest{Name: a.networkNames.name(id)})
	if err != nil {
		return opi.NetworkStatus{}, err
	}
	n := networkStatus(got)
	n.ID = id
	return n, nil
}

// Networks implements [opi.Agent].
func (a agent) Networks(ctx context.Context) ([]opi.NetworkStatus, error) {
	return list(networkStatus, func(token string) ([]*evpn.LogicalBridge, string, error) {
		page, err := a.networks.ListLogicalBridges(ctx,
			&evpn.ListLogicalBridgesRequest{PageSize: pageSize, PageToken: token})
		for _, lb := range page.GetLogicalBridges() {
			a.networkNames.learn(lb.GetName(), lastSegment(lb.GetName()))
		}
		return page.GetLogicalBridges(), page.GetNextPageToken(), err
	})
}

// CreateNetwork implements [opi.Agent].
func (a agent) CreateNetwork(ctx context.Context, n opi.Network, vtep netip.Addr) error {
	spec := &evpn.LogicalBridgeSpec{VlanId: uint32(n.VLAN), Vni: n.VNI}
	if n.VNI != nil {
		prefix, err := a.vtepPrefix(ctx, vtep)
		if err != nil {
			return err
		}
		spec.VtepIpPrefix = prefix
	}

	made, err := a.networks.CreateLogicalBridge(ctx, &evpn.CreateLogicalBridgeRequest{
		LogicalBridgeId: n.ID, LogicalBridge: &evpn.LogicalBridge{Spec: spec},
	})
	a.networkNames.learn(made.GetName(), n.ID)

	return err
}

// DeleteNetwork implements [opi.Agent].
func (a agent) DeleteNetwork(ctx context.Context, id string) error {
	if err := a.checkUnused(ctx, id); err != nil {
		return err
	}

	_, err := a.networks.DeleteLogicalBridge(ctx,
		&evpn.DeleteLogicalBridgeRequest{Name: a.networkNames.name(id), AllowMissing: true})
	if status.Code(err) == codes.FailedPrecondition {
		return &opi.Error{
			Kind: opi.ErrInUse, Detail: opi.Short(status.Convert(err).Message()), Err: err,
		}
	}

	return err
}

// Port implements [opi.Agent].
func (a agent) Port(ctx context.Context, id string) (opi.PortStatus, error) {
	return lookup[opi.PortStatus]{
		noun: "port", get: a.getPort, list: a.Ports,
		id:     func(p opi.PortStatus) string { return p.ID },
		status: func(p *opi.PortStatus) *opi.Status { return &p.Status },
		consistent: func(got, listed opi.PortStatus) bool {
			return len(got.MAC) == 0 || bytes.Equal(got.MAC, listed.MAC)
		},
	}.find(ctx, id)
}

func (a agent) getPort(ctx context.Context, id string) (opi.PortStatus, error) {
	got, err := a.ports.GetBridgePort(ctx, &evpn.GetBridgePortRequest{Name: a.portNames.name(id)})
	if err != nil {
		return opi.PortStatus{}, err
	}
	p := portStatus(got)
	p.ID = id
	a.getIsComplete.Store(p.State != opi.StateUnknown)
	return p, nil
}

// Ports implements [opi.Agent].
func (a agent) Ports(ctx context.Context) ([]opi.PortStatus, error) {
	return list(portStatus, func(token string) ([]*evpn.BridgePort, string, error) {
		page, err := a.ports.ListBridgePorts(ctx,
			&evpn.ListBridgePortsRequest{PageSize: pageSize, PageToken: token})
		for _, bp := range page.GetBridgePorts() {
			a.portNames.learn(bp.GetName(), lastSegment(bp.GetName()))
		}
		return page.GetBridgePorts(), page.GetNextPageToken(), err
	})
}

// CreatePort implements [opi.Agent].
func (a agent) CreatePort(ctx context.Context, p opi.Port) error {
	if p.Trunk {
		// The reference agent keeps references of a trunk to a network that does not exist. They
		// make the other networks undeletable.
		for _, id := range p.Networks {
			network, err := a.Network(ctx, id)
			switch {
			case status.Code(err) == codes.NotFound:
				return &opi.Error{Kind: opi.ErrNetworkMissing, Detail: id, Err: err}
			case err != nil:
				return err
			case network.State != opi.StateUp:
				detail := fmt.Sprintf("%s is %s: %s", id, network.State, network.Detail)
				return &opi.Error{Kind: opi.ErrNetworkMissing, Detail: detail}
			}
		}
	}

	if !a.getIsComplete.Load() {
		unlock, err := a.macLocks.Lock(ctx, p.MAC.String())
		if err != nil {
			return status.FromContextError(ctx.Err()).Err()
		}
		defer unlock()
		if err := a.checkMAC(ctx, p); err != nil {
			return err
		}
	}

	made, err := a.ports.CreateBridgePort(ctx, &evpn.CreateBridgePortRequest{
		BridgePortId: p.ID, BridgePort: &evpn.BridgePort{Spec: a.spec(p)},
	})
	a.portNames.learn(made.GetName(), p.ID)

	switch {
	case p.Trunk && status.Code(err) == codes.Unimplemented:
		return &opi.Error{
			Kind: opi.ErrNoTrunks, Err: err,
			Detail: "name one network, or start the agent so that it has trunks, as opi-bridge " +
				"with --data-plane vlan-aware; the agent says: " +
				opi.Short(status.Convert(err).Message()),
		}
	case lacksNetdev(err):
		return &opi.Error{Kind: opi.ErrFailed, Detail: netdevMessage(err), Err: err}
	case status.Code(err) == codes.NotFound:
		return &opi.Error{
			Kind: opi.ErrNetworkMissing, Detail: opi.Short(status.Convert(err).Message()), Err: err,
		}
	}

	return err
}

// RetryPort sends an Update that changes nothing, because a restarted agent does not retry by
// itself. An Update that changes a port would leave agents with ports and networks that cannot be
// deleted any more.
func (a agent) RetryPort(ctx context.Context, p opi.Port) error {
	_, err := a.ports.UpdateBridgePort(ctx, &evpn.UpdateBridgePortRequest{
		BridgePort: &evpn.BridgePort{Name: a.portNames.name(p.ID), Spec: a.spec(p)},
	})
	switch status.Code(err) {
	case codes.Unimplemented, codes.NotFound, codes.Unknown:
		return nil // Get will show the result
	}
	return err
}

// DeletePort implements [opi.Agent].
func (a agent) DeletePort(ctx context.Context, id string) error {
	_, err := a.ports.DeleteBridgePort(ctx,
		&evpn.DeleteBridgePortRequest{Name: a.portNames.name(id), AllowMissing: true})
	if status.Code(err) == codes.NotFound &&
		!strings.Contains(status.Convert(err).Message(), a.portNames.name(id)) {
		return &opi.Error{
			Kind: opi.ErrFailed, Detail: "the agent cannot delete it: " + netdevMessage(
				err), Err: err,
		}
	}

	return err
}

// Reconnected implements [opi.Agent].
func (a agent) Reconnected() { a.getIsComplete.Store(false) }

// SetNetworkOptions implements [opi.Options].
func (a agent) SetNetworkOptions(ctx context.Context, n opi.Network) (mtu int, err error) {
	got, err := a.options.UpdateNetworkOptions(ctx,
		&opibridge.UpdateNetworkOptionsRequest{Options: &opibridge.NetworkOptions{
			Name: a.networkNames.name(n.ID), Mtu: uint32(n.MTU),
			SourceFilter: sourceFilters[n.SourceFilter],
		}})
	return int(min(got.GetMaxMtu(), math.MaxUint16)), err
}

var sourceFilters = map[opi.SourceFilter]opibridge.SourceFilter{
	opi.SourceFilterAddresses: opibridge.SourceFilter_SOURCE_FILTER_ADDRESSES,
	opi.SourceFilterMAC:       opibridge.SourceFilter_SOURCE_FILTER_MAC,
	opi.SourceFilterNone:      opibridge.SourceFilter_SOURCE_FILTER_NONE,
}

// SetPortOptions implements [opi.Options].
func (a agent) SetPortOptions(ctx context.Context, p opi.Port) error {
	options := &opibridge.PortOptions{
		Name: a.portNames.name(p.ID), Addresses: texts(p.AllAddresses()),
		Shared: p.Shared,
	}
	for _, id := range p.Networks {
		if p.Trunk {
			options.LogicalBridges = append(options.LogicalBridges,
				&opibridge.LogicalBridgeAddresses{
					LogicalBridge: a.networkNames.name(id), Addresses: texts(p.AddressesIn[id]),
				})
		}
	}

	got, err := a.options.UpdatePortOptions(ctx,
		&opibridge.UpdatePortOptionsRequest{Options: options})
	if err == nil && p.Shared && !got.GetShared() {
		return status.Error(codes.FailedPrecondition, "the agent does not know addresses that ports at "+
			"other xPUs share; upgrade opi-bridge, or give the bond Functions of one xPU")
	}
	return err
}

func texts(addresses []netip.Addr) (texts []string) {
	for _, address := range addresses {
		texts = append(texts, address.String())
	}
	return texts
}

// HostPFs implements [opi.Agent]. It asks only agents that announce an inventory by grpc.health.v1.
// The reference agent lacks that service, and its inventory can end its process.
func (a agent) HostPFs(ctx context.Context) ([]opi.HostPF, error) {
	has, err := a.health.Check(ctx,
		&healthpb.HealthCheckRequest{Service: inventory.InventoryService_ServiceDesc.ServiceName})
	switch code := status.Code(err); {
	case code == codes.Unimplemented, code == codes.NotFound,
		err == nil && has.GetStatus() != healthpb.HealthCheckResponse_SERVING:
		return nil, nil
	case err != nil:
		return nil, err
	}

	all, err := a.inventory.GetInventory(ctx, &inventory.GetInventoryRequest{Name: "xpu"})
	if err != nil {
		return nil, err
	}

	var pfs []opi.HostPF
	for _, device := range all.GetPci() {
		if !strings.HasPrefix(device.GetSubsystem(), opi.HostPFPrefix) {
			continue
		}

		pf, err := opi.ParseHostPF(device.GetSubsystem())
		if err != nil {
			return nil, &opi.Error{
				Kind: opi.ErrUnsupported, Detail: "the agent's inventory: " + err.Error(),
			}
		}

		if len(pfs) == opi.MaxHostPFs {
			return nil, endless(fmt.Sprintf("more than %d PFs of its host", opi.MaxHostPFs))
		}

		pfs = append(pfs, pf)
	}

	return pfs, nil
}

func (a agent) spec(p opi.Port) *evpn.BridgePortSpec {
	spec := &evpn.BridgePortSpec{
		MacAddress: p.MAC, Ptype: evpn.BridgePortType_BRIDGE_PORT_TYPE_ACCESS,
	}
	if p.Trunk {
		spec.Ptype = evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK
	}

	for _, id := range p.Networks {
		spec.LogicalBridges = append(spec.LogicalBridges, a.networkNames.name(id))
	}
	return spec
}

func networkStatus(lb *evpn.LogicalBridge) opi.NetworkStatus {
	n := opi.NetworkStatus{Network: opi.Network{
		ID: lastSegment(lb.GetName()), VLAN: uint16(min(lb.GetSpec().GetVlanId(), math.MaxUint16)),
	}}
	// Some proto3 agents report a missing VNI as 0.
	if vni := lb.GetSpec().GetVni(); vni != 0 {
		n.VNI = &vni
	}

	state := lb.GetStatus().GetOperStatus()
	n.Status = statusOf(state == evpn.LBOperStatus_LB_OPER_STATUS_UP,
		state == evpn.LBOperStatus_LB_OPER_STATUS_TO_BE_DELETED,
		lb.GetStatus().GetComponents())
	if n.VLAN == 0 {
		n.Status = incomplete(n.Status, "its VLAN")
	}

	return n
}

func portStatus(bp *evpn.BridgePort) opi.PortStatus {
	mac := bp.GetSpec().GetMacAddress()
	p := opi.PortStatus{Port: opi.Port{
		ID:    lastSegment(bp.GetName()),
		MAC:   slices.Clone(mac[:min(len(mac), maxMAC)]),
		Trunk: bp.GetSpec().GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_TRUNK,
	}}

	networks := bp.GetSpec().GetLogicalBridges()
	for _, name := range networks[:min(len(networks), maxNetworks)] {
		p.Networks = append(p.Networks, lastSegment(name))
	}

	state := bp.GetStatus().GetOperStatus()
	p.Status = statusOf(state == evpn.BPOperStatus_BP_OPER_STATUS_UP,
		state == evpn.BPOperStatus_BP_OPER_STATUS_TO_BE_DELETED,
		bp.GetStatus().GetComponents())
	switch {
	case bp.GetSpec().GetPtype() == evpn.BridgePortType_BRIDGE_PORT_TYPE_UNSPECIFIED:
		p.Status = incomplete(p.Status, "its type")
	case len(p.Networks) == 0 && !p.Trunk: // a trunk without networks is in all networks
		p.Status = incomplete(p.Status, "its network")
	case len(p.MAC) == 0:
		p.Status = incomplete(p.Status, "its MAC address")
	}

	return p
}

// statusOf derives the status from an object's operational status and its components. Only a
// component in state ERROR means failed, because components in other states may still be in
// progress.
func statusOf(up, deleting bool, components []*evpn.Component) opi.Status {
	var details []string
	for _, comp := range components[:min(len(components), maxComponents)] {
		if comp.GetStatus() == evpn.CompStatus_COMP_STATUS_ERROR {
			details = append(details, opi.Short(comp.GetName()+": "+comp.GetDetails()))
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

// lastSegment returns the id in a resource name. The prefix depends on the agent.
func lastSegment(name string) string {
	return opi.Short(name[strings.LastIndexByte(name, '/')+1:])
}
