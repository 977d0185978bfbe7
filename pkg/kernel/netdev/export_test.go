package netdev

import (
	"net/netip"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// AddAddress adds an address as Attach does.
func AddAddress(netNS string, index int, address netip.Prefix) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addAddress(pod, index, address)
}

// AddRoute adds a route as Attach does.
func AddRoute(netNS string, index int, route function.Route) error {
	pod, err := dial(netNS)
	if err != nil {
		return err
	}
	defer pod.close()
	return addRoute(pod, index, route)
}

// WithoutSettings is the snapshot as an older agent took it.
func (s Snapshot) WithoutSettings() Snapshot {
	s.Settings = nil
	return s
}
