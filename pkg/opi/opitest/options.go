// SPDX-License-Identifier: Apache-2.0

package opitest

import (
	"context"
	"path"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	opibridge "github.com/opiproject/xpu-device-plugin/api/opibridge/v1alpha1"
)

// optionsServer implements opi-bridge's extension of the API.
type optionsServer struct {
	opibridge.UnimplementedOptionsServiceServer
	agent *Agent
}

func (s optionsServer) served() error {
	if !s.agent.behaviour.Options {
		return status.Error(codes.Unimplemented,
			"unknown service opi_bridge.v1alpha1.OptionsService")
	}
	return nil
}

func (s optionsServer) UpdateNetworkOptions(
	_ context.Context, req *opibridge.UpdateNetworkOptionsRequest,
) (*opibridge.NetworkOptions, error) {
	if err := s.served(); err != nil {
		return nil, err
	}

	_, network, err := s.agent.networks.find(s.agent.networkNames(), req.GetOptions().GetName())
	if err != nil {
		return nil, err
	}

	network.networkOptions = req.GetOptions()
	return &opibridge.NetworkOptions{MaxMtu: s.agent.behaviour.MTU}, nil
}

func (s optionsServer) UpdatePortOptions(
	_ context.Context, req *opibridge.UpdatePortOptionsRequest,
) (*opibridge.PortOptions, error) {
	if err := s.served(); err != nil {
		return nil, err
	}

	_, port, err := s.agent.ports.find(s.agent.portNames(), req.GetOptions().GetName())
	if err != nil {
		return nil, err
	}

	port.portOptions = req.GetOptions()
	if s.agent.behaviour.NoShared { // a field that it does not know
		port.portOptions.Shared = false
	}
	return port.portOptions, nil
}

// Addresses returns the addresses that were set for a port.
func (a *Agent) Addresses(port string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ports[port] == nil {
		return nil
	}
	return a.ports[port].portOptions.GetAddresses()
}

// Shared reports whether ports at other xPUs share the addresses of a port.
func (a *Agent) Shared(port string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.ports[port] != nil && a.ports[port].portOptions.GetShared()
}

// AddressesIn returns the addresses that were set for a trunk in each network, by the network's id.
func (a *Agent) AddressesIn(port string) map[string][]string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ports[port] == nil {
		return nil
	}
	all := map[string][]string{}
	for _, in := range a.ports[port].portOptions.GetLogicalBridges() {
		all[path.Base(in.GetLogicalBridge())] = in.GetAddresses()
	}
	return all
}

// NetworkOptions returns the last options that were set for a network, or nil.
func (a *Agent) NetworkOptions(network string) *opibridge.NetworkOptions {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.networks[network] == nil {
		return nil
	}
	return a.networks[network].networkOptions
}
