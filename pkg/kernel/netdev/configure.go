// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// step is one step of the configuration of an interface in its pod.
type step struct {
	what   string // for messages and traces
	change func() error
}

// configure carries out the steps of an interface in the pod. With a bond, the interface becomes its
// port, and the steps configure the bond. Each port repeats them, because none knows which is first.
func (e *Engine) configure(
	ctx context.Context, p patience, pod *conn, index int, want function.Interface,
) (Observed, error) {
	if want.Bond == nil {
		err := e.carryOut(ctx, p, want.Name, e.steps(pod, index, want, addRule))
		if err != nil {
			return Observed{}, err
		}
		return observe(pod, index, want)
	}

	err := e.carryOut(ctx, p, want.Name, []step{{"bond " + want.Bond.Name, func() error {
		return e.joinBond(pod, index, want.Bond)
	}}})
	if err != nil {
		return Observed{}, err
	}
	bond, err := existingBond(pod, want.Bond)
	if err != nil {
		return Observed{}, fmt.Errorf("bond %s: %w", want.Bond.Name, err)
	}

	of := want.OfBond()
	if err := e.carryOut(ctx, p, of.Name, e.steps(pod, bond.Index, of, addRuleOfBond)); err != nil {
		return Observed{}, err
	}
	return observeBond(pod, index, want)
}

// carryOut carries out the steps of a netdev in the pod. It repeats a step while the driver is busy,
// and stops at the first step that fails.
func (e *Engine) carryOut(ctx context.Context, p patience, netdev string, steps []step) error {
	for _, s := range steps {
		err := e.step(s.what, func() error { return p.retry(ctx, busy, s.change) })
		if err != nil {
			return fmt.Errorf("interface %s: %w", netdev, err)
		}
	}
	return nil
}

// steps returns the steps of an interface, or of a bond, in the order in which the kernel needs them:
//
//   - The VRF comes before the addresses, because IPv6 addresses are lost when the netdev joins it.
//   - The sysctls come before the netdev is up, because it then answers to ARP and forms IPv6
//     addresses.
//   - VLAN interfaces, routes and neighbors need the netdev up, and routes need the addresses.
func (e *Engine) steps(
	pod *conn, index int, want function.Interface, addRule func(*conn, *netlink.Rule) error,
) (list []step) {
	add := func(what string, change func() error) { list = append(list, step{what, change}) }

	if want.VRF != nil {
		add("VRF "+want.VRF.Name, func() error { return e.joinVRF(pod, index, want.VRF) })
	}
	for _, address := range want.Addresses {
		add("address "+address.String(), func() error {
			return e.address(pod, index, want.Name, address)
		})
	}
	if want.AllMulticast {
		add("allmulticast", func() error {
			return e.set(pod, index, unix.IFF_ALLMULTI, unix.IFF_ALLMULTI)
		})
	}

	if len(want.Addresses) > 0 {
		add("announce addresses", func() error {
			e.announceItself(pod, index, want.Name, want.Addresses)
			return nil
		})
	}
	for _, name := range slices.Sorted(maps.Keys(want.Sysctls)) {
		add("sysctl "+name, func() error {
			return e.setSysctl(pod, name, want.Name, want.Sysctls[name])
		})
	}

	add("up", func() error { return e.set(pod, index, unix.IFF_UP, unix.IFF_UP) })
	for _, vlan := range want.VLANs {
		add("VLAN "+vlan.Name, func() error { return e.addVLAN(pod, index, vlan) })
	}

	for _, route := range want.Routes {
		add("route to "+route.To.String(), func() error {
			return addRoute(pod, index, route.In(want.VRF))
		})
	}
	for _, n := range want.Neighbors {
		add("neighbor "+n.Address.String(), func() error { return addNeighbor(pod, index, n) })
	}
	for _, rule := range kernelRules(want.Name, want.Rules) {
		add(ruleText(rule), func() error { return addRule(pod, rule) })
	}

	return list
}

// address adds an address. If IPv6 is off in the namespace, it switches IPv6 on for this interface,
// because the owner asked for an IPv6 address.
func (e *Engine) address(pod *conn, index int, name string, address netip.Prefix) error {
	err := addAddress(pod, index, address)
	// The kernel returns EACCES if IPv6 is off (inet6_addr_add of net/ipv6/addrconf.c).
	if !errors.Is(err, unix.EACCES) || !address.Addr().Is6() {
		return err
	}

	e.trace("disable_ipv6 0")
	if on := e.writeConf6(pod, name, "disable_ipv6", 0); on != nil {
		return errors.Join(err, fmt.Errorf("switch IPv6 on for the interface: %w", on))
	}

	return addAddress(pod, index, address)
}

// Remains is what an attachment adds to a pod's namespace and what the kernel does not remove with
// the netdev. The kernel removes addresses, routes and neighbours with it, and resets the sysctls.
type Remains struct {
	Interface string          `json:"interface"` // name in the pod, which the rules match
	Rules     []function.Rule `json:"rules,omitempty"`
	VRF       *function.VRF   `json:"vrf,omitempty"`
	// Bond has the rules and is in the VRF, if there is one. Rules and VRF then go with the bond.
	Bond *function.Bond `json:"bond,omitempty"`
}

// remainsOf returns what an attachment leaves in the namespace, or nil if that is nothing.
func remainsOf(want function.Interface) *Remains {
	if len(want.Rules) == 0 && want.VRF == nil && want.Bond == nil {
		return nil
	}
	return &Remains{Interface: want.Name, Rules: want.Rules, VRF: want.VRF, Bond: want.Bond}
}

// dropMasters removes the bond and the VRF of the attachment when the last port has left. The
// namespace may not exist any more.
func (e *Engine) dropMasters(pod *conn, remains *Remains) (notes []string) {
	if pod == nil || remains == nil {
		return nil
	}
	if remains.Bond != nil {
		notes = e.dropBond(pod, remains)
	}
	if remains.VRF != nil {
		notes = append(notes, e.dropVRF(pod, remains.VRF)...)
	}
	return notes
}

// offloadOf returns the attributes of RTM_NEWLINK that set the sizes of offloads. The sizes for IPv4
// come after the general ones, because the kernel sets both with a general one.
func offloadOf(want *function.Offload) (list []*nl.RtAttr) {
	if want == nil {
		return nil
	}

	for _, s := range []struct{ attribute, size int }{
		{unix.IFLA_GSO_MAX_SIZE, want.GSOMaxSize}, {unix.IFLA_GRO_MAX_SIZE, want.GROMaxSize},
		{unix.IFLA_GSO_IPV4_MAX_SIZE, want.GSOIPv4MaxSize},
		{unix.IFLA_GRO_IPV4_MAX_SIZE, want.GROIPv4MaxSize},
	} {
		if s.size != 0 {
			list = append(list, number(s.attribute, s.size))
		}
	}

	return list
}

// setSysctl writes a sysctl of [function.SysctlNames] for an interface of the pod.
func (e *Engine) setSysctl(pod *conn, name, netdev, value string) error {
	directory, file := function.SysctlFile(name, netdev)
	dir := sysfs.Root(e.procRoot).Dir("sys", directory)
	return namespace.Do(pod.ns, func() error { return dir.Write(file, value) })
}

// addNeighbor adds a permanent entry to the neighbour table, or changes the entry of the address.
func addNeighbor(pod *conn, index int, n function.Neighbor) error {
	entry := &netlink.Neigh{
		LinkIndex: index, IP: net.IP(n.Address.AsSlice()), HardwareAddr: n.MAC.HardwareAddr(),
		State: unix.NUD_PERMANENT,
	}
	return pod.library(func(h *netlink.Handle) error { return h.NeighSet(entry) })
}
