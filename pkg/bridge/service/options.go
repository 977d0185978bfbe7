// SPDX-License-Identifier: Apache-2.0

package service

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/boltfile"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/refusal"
)

// optionStore keeps the options of networks or of ports, in memory and in the state file. Only work
// of the agent changes them: see [Agent.acquire]. They are read under the agent's lock.
type optionStore[O proto.Message] struct {
	agent    *Agent
	bucket   string // in the state file
	byID     map[string]O
	validate func(id string, options O) error
}

func newOptionStore[O proto.Message](
	a *Agent, of names, validate func(id string, options O) error,
) *optionStore[O] {
	return &optionStore[O]{
		agent: a, bucket: of.bucket + "-options", byID: map[string]O{}, validate: validate,
	}
}

// set stores the options of an object, and reports whether they differ from the options before. The
// error is a gRPC status.
func (s *optionStore[O]) set(id string, options O) (changed bool, err error) {
	if have, known := s.byID[id]; known && proto.Equal(have, options) ||
		!known && proto.Size(options) == 0 {
		return false, nil
	}

	data, err := proto.Marshal(options)
	if err == nil {
		err = s.agent.state.Update(func(tx *boltfile.Tx) error {
			if err := tx.CreateBucket(s.bucket); err != nil {
				return err
			}
			return tx.Put(s.bucket, []byte(id), data)
		})
	}

	if err != nil {
		return false, refusal.New(codes.Internal, refusal.StateFileFails,
			"state: %s %s: %v", s.bucket, id, err)
	}

	s.agent.mu.Lock()
	defer s.agent.mu.Unlock()

	s.byID[id] = options
	return true, nil
}

// delete removes the options of an object from the state file. In memory they stay until forget.
func (s *optionStore[O]) delete(tx *boltfile.Tx, id string) error {
	return tx.Delete(s.bucket, []byte(id))
}

// forget removes the options of an object from memory.
func (s *optionStore[O]) forget(id string) { delete(s.byID, id) }

// load reads all options from the state file.
func (s *optionStore[O]) load(tx *boltfile.Tx) error {
	return tx.ForEach(s.bucket, func(id, data []byte) error {
		var none O
		options := none.ProtoReflect().New().Interface().(O)
		err := cmp.Or(proto.Unmarshal(data, options), s.validate(string(id), options))
		if err != nil {
			return fmt.Errorf("%w (%s %q: %s)", boltfile.ErrCorrupt, s.bucket, id,
				status.Convert(err).Message())
		}
		s.byID[string(id)] = options
		return nil
	})
}

// noOptions are the options of objects that have none.
type noOptions struct{}

func (noOptions) delete(*boltfile.Tx, string) error { return nil }
func (noOptions) forget(string)                     {}

// severalOptions are the options of objects that have several kinds of them.
type severalOptions []options

func (s severalOptions) delete(tx *boltfile.Tx, id string) error {
	var failed []error
	for _, o := range s {
		failed = append(failed, o.delete(tx, id))
	}
	return errors.Join(failed...)
}

func (s severalOptions) forget(id string) {
	for _, o := range s {
		o.forget(id)
	}
}

// optionsServer serves OptionsService.
type optionsServer struct {
	opibridge.UnimplementedOptionsServiceServer
	*Agent
}

// checkMTU returns an error if the interfaces in a network have a larger MTU than VXLAN carries.
func (a *Agent) checkMTU(id string) error {
	mtu, maxMTU := int(a.networkOptions.byID[id].GetMtu()), a.maxMTUs[id]
	if maxMTU == 0 || mtu <= maxMTU {
		return nil
	}
	return fmt.Errorf("mtu %d: VXLAN carries at most %d: set the network's MTU to that or less, "+
		"or raise the MTU of the uplink, and of all that is between the xPUs, by %d", mtu, maxMTU, mtu-maxMTU)
}

func (s optionsServer) GetNetworkOptions(
	ctx context.Context, req *opibridge.GetNetworkOptionsRequest,
) (*opibridge.NetworkOptions, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, _, err := s.networks.find(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	return s.networkOptionsOf(id), nil
}

// networkOptionsOf returns the message about a network's options.
func (s optionsServer) networkOptionsOf(id string) *opibridge.NetworkOptions {
	reply := &opibridge.NetworkOptions{}
	if kept := s.networkOptions.byID[id]; kept != nil {
		reply = proto.CloneOf(kept)
	}
	reply.Name = networkNames.prefix + id
	reply.MaxMtu = uint32(s.maxMTUs[id])
	return reply
}

func (s optionsServer) UpdateNetworkOptions(
	ctx context.Context, req *opibridge.UpdateNetworkOptionsRequest,
) (*opibridge.NetworkOptions, error) {
	release, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	want := req.GetOptions()
	id, o, err := s.networks.findForChange(ctx, want.GetName())
	if err == nil && o.deleting {
		err = s.networks.beingDeleted(id)
	}

	if err == nil {
		err = checkNetworkOptions(id, want)
	}
	if err != nil {
		return nil, err
	}

	kept := &opibridge.NetworkOptions{SourceFilter: want.GetSourceFilter(), Mtu: want.GetMtu()}
	changed, err := s.networkOptions.set(id, kept)
	if err != nil {
		return nil, err
	}

	if changed {
		s.networks.reconcile(id, true)
	}

	return s.networkOptionsOf(id), nil
}

func checkNetworkOptions(id string, want *opibridge.NetworkOptions) error {
	if _, known := opibridge.SourceFilter_name[int32(want.GetSourceFilter())]; !known {
		return refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
			"options of logical bridge %s: source_filter %d is not known",
			id, want.GetSourceFilter())
	}

	if mtu := want.GetMtu(); mtu != 0 && (mtu < 68 || mtu > 65535) {
		return refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
			"options of logical bridge %s: mtu %d: must be 68-65535, or 0 if it is not known",
			id, mtu)
	}

	return nil
}

func (s optionsServer) GetPortOptions(
	ctx context.Context, req *opibridge.GetPortOptionsRequest,
) (*opibridge.PortOptions, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	id, _, err := s.ports.find(ctx, req.GetName())
	if err != nil {
		return nil, err
	}
	return s.portOptionsOf(id), nil
}

// portOptionsOf returns the message about a port's options.
func (s optionsServer) portOptionsOf(id string) *opibridge.PortOptions {
	kept := s.portOptions.byID[id]
	return &opibridge.PortOptions{
		Name: portNames.prefix + id, Addresses: kept.GetAddresses(),
		LogicalBridges: kept.GetLogicalBridges(), Shared: kept.GetShared(),
	}
}

func (s optionsServer) UpdatePortOptions(
	ctx context.Context, req *opibridge.UpdatePortOptionsRequest,
) (*opibridge.PortOptions, error) {
	release, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer release()

	id, o, err := s.ports.findForChange(ctx, req.GetOptions().GetName())
	if err == nil && o.deleting {
		err = s.ports.beingDeleted(id)
	}
	if err != nil {
		return nil, err
	}

	wanted, err := normalPortOptions(id, req.GetOptions())
	if err == nil {
		err = checkMembership(id, networksOf(o.spec), wanted)
	}
	if err == nil {
		err = s.checkNoGateways(access.FromContext(ctx), id, networksOf(o.spec), wanted)
	}
	if err != nil {
		return nil, err
	}

	changed, err := s.portOptions.set(id, wanted)
	if err != nil {
		return nil, err
	}

	if changed {
		s.ports.reconcile(id, false)
	}

	return s.portOptionsOf(id), nil
}

// checkMembership returns a gRPC status if a port has options for a network that it is not in.
func checkMembership(id string, networks []string, options *opibridge.PortOptions) error {
	for _, in := range options.GetLogicalBridges() {
		if network := path.Base(in.GetLogicalBridge()); !slices.Contains(networks, network) {
			return refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
				"options of bridge port %s: logical_bridges: the port is not in logical bridge %s, "+
					"but in %s", id, network, strings.Join(networks, ", "))
		}
	}
	return nil
}

// checkNoGateways returns a gRPC status if the gateway of a network of a port has one of the
// addresses that the port may use there.
func (a *Agent) checkNoGateways(
	client access.Client, port string, networks []string, options *opibridge.PortOptions,
) error {
	for _, network := range networks {
		for _, address := range addressesIn(network, options) {
			if svi := a.gatewayAt(address, network); svi != "" {
				return refusal.New(codes.AlreadyExists, refusal.AddressInUse,
					"options of bridge port %s: address %s is already in use by %s", port, address,
					a.textFor(client, plane.Object{Kind: plane.KindSVI, ID: svi}))
			}
		}
	}
	return nil
}

func checkPortOptions(id string, want *opibridge.PortOptions) error {
	_, err := normalPortOptions(id, want)
	return err
}

// normalPortOptions returns options in the form in which they are stored: without a name, and
// sorted. The error is a gRPC status.
func normalPortOptions(id string, want *opibridge.PortOptions) (*opibridge.PortOptions, error) {
	addresses, err := normalAddresses(id, want.GetAddresses())
	if err != nil {
		return nil, err
	}

	normal := &opibridge.PortOptions{Addresses: addresses, Shared: want.GetShared()}
	for _, in := range want.GetLogicalBridges() {
		network, err := networkNames.parseName(in.GetLogicalBridge())
		if err != nil {
			return nil, refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
				"options of bridge port %s: logical_bridges: %s", id,
				status.Convert(err).Message())
		}
		if addresses, err = normalAddresses(id, in.GetAddresses()); err != nil {
			return nil, err
		}
		normal.LogicalBridges = append(normal.LogicalBridges, &opibridge.LogicalBridgeAddresses{
			LogicalBridge: networkNames.prefix + network, Addresses: addresses,
		})
	}

	slices.SortFunc(normal.LogicalBridges, func(a, b *opibridge.LogicalBridgeAddresses) int {
		return strings.Compare(a.GetLogicalBridge(), b.GetLogicalBridge())
	})
	for i, in := range normal.LogicalBridges {
		if i > 0 && in.GetLogicalBridge() == normal.LogicalBridges[i-1].GetLogicalBridge() {
			return nil, refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
				"options of bridge port %s: logical_bridges: must name %s only once", id,
				path.Base(in.GetLogicalBridge()))
		}
	}

	return normal, nil
}

// maxAddresses limits the addresses of a port.
const maxAddresses = 64

// normalAddresses returns addresses in the form in which they are stored, sorted. The error is a
// gRPC status.
func normalAddresses(id string, texts []string) ([]string, error) {
	if len(texts) > maxAddresses {
		return nil, refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
			"options of bridge port %s: %d addresses, at most %d may be given", id, len(texts),
			maxAddresses)
	}

	var addresses []string
	for _, text := range texts {
		address, err := netip.ParseAddr(text)
		if err != nil || address.Zone() != "" || !address.IsGlobalUnicast() &&
			!address.IsLinkLocalUnicast() {
			return nil, refusal.New(codes.InvalidArgument, refusal.InvalidOptions,
				"options of bridge port %s: address %q: must be a unicast address without prefix "+
					"length, such as 10.1.0.2 or fd00::2", id, text)
		}
		addresses = append(addresses, address.Unmap().String())
	}

	slices.Sort(addresses)
	return slices.Compact(addresses), nil
}

// addressesIn returns the addresses that a port may send from in a network. If there are none, it
// may send from any address.
func (a *Agent) addressesIn(network, port string) []netip.Addr {
	return addressesIn(network, a.portOptions.byID[port])
}

// addressesIn is [Agent.addressesIn] for a port with these options, which were checked.
func addressesIn(network string, options *opibridge.PortOptions) []netip.Addr {
	texts := options.GetAddresses()
	for _, in := range options.GetLogicalBridges() {
		if path.Base(in.GetLogicalBridge()) == network {
			texts = in.GetAddresses()
		}
	}

	var addresses []netip.Addr
	for _, text := range texts {
		if address, err := netip.ParseAddr(text); err == nil {
			addresses = append(addresses, address)
		}
	}
	return addresses
}

// filterOf returns the source filter of ports in a network.
func (a *Agent) filterOf(network string) opibridge.SourceFilter {
	if !a.cfg.SourceFilter {
		return opibridge.SourceFilter_SOURCE_FILTER_NONE
	}
	return max(opibridge.SourceFilter_SOURCE_FILTER_ADDRESSES,
		a.networkOptions.byID[network].GetSourceFilter())
}
