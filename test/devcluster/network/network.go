// SPDX-License-Identifier: Apache-2.0

// Package network assigns the addresses of a cluster and creates its links: a bridge in the
// cluster's network namespace, and a veth pair to every node's.
//
// All clusters use the same addresses, because each has separate network namespaces.
package network

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

const (
	// Bridge is the bridge of the nodes, in the cluster's network namespace.
	Bridge = "br0"
	// Uplink is the node's end of its veth pair.
	Uplink = "eth0"
	// Subnet contains the nodes.
	Subnet = "10.77.0.0/24"
	// Gateway is the bridge's address: the control plane, and every node's default route.
	Gateway = "10.77.0.1"
	// ServiceSubnet contains the addresses of Services.
	ServiceSubnet = "10.96.0.0/16"
	// ServiceAddress is the first address of ServiceSubnet, which the kubernetes Service has.
	ServiceAddress = "10.96.0.1"
	// MaxNodes keeps node and pod addresses within one octet.
	MaxNodes = 100
)

const prefixLength = 24

// NodeAddress returns the address of the node with this number, from 1 to MaxNodes.
func NodeAddress(number int) string { return fmt.Sprintf("10.77.0.%d", 10+number) }

// PodSubnet returns the subnet of the node's pods.
func PodSubnet(number int) string { return fmt.Sprintf("10.88.%d.0/24", number) }

// Port returns the name of the bridge's end of a node's veth pair.
func Port(node string) string { return node }

// SetUpCluster creates the bridge and the Service address in the caller's network namespace, and
// enables forwarding.
func SetUpCluster() error {
	if err := Loopback(); err != nil {
		return err
	}

	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("network: lo: %w", err)
	}

	service := &netlink.Addr{
		IPNet: &net.IPNet{IP: net.ParseIP(ServiceAddress), Mask: net.CIDRMask(32, 32)},
	}
	if err := netlink.AddrAdd(lo, service); err != nil {
		return fmt.Errorf("network: address %s: %w", ServiceAddress, err)
	}

	bridge := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
	bridge.Name = Bridge
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("network: bridge %s: %w", Bridge, err)
	}
	if err := netlink.AddrAdd(bridge, address(Gateway)); err != nil {
		return fmt.Errorf("network: bridge %s: %w", Bridge, err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("network: bridge %s: %w", Bridge, err)
	}

	return forward()
}

// Loopback enables lo and forwarding in the caller's network namespace.
func Loopback() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("network: lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("network: lo: %w", err)
	}
	return forward()
}

func forward() error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return fmt.Errorf("network: %w", err)
	}
	return nil
}

// Attach creates the veth pair of a node whose PID 1 is pid (in the caller's PID namespace), sets
// the node's address and default route, and routes its pods' subnet to it. It replaces what an
// earlier run of the node left.
func Attach(node string, number, pid int) error {
	if err := attach(node, number, pid); err != nil {
		return fmt.Errorf("network: %s: %w", node, err)
	}
	return nil
}

func attach(node string, number, pid int) error {
	if err := Detach(node); err != nil {
		return err
	}

	bridge, err := netlink.LinkByName(Bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", Bridge, err)
	}

	veth := &netlink.Veth{
		LinkAttrs: netlink.NewLinkAttrs(), PeerName: Uplink, PeerNamespace: netlink.NsPid(pid),
	}
	veth.Name = Port(node)
	veth.MasterIndex = bridge.Attrs().Index
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("veth %s: %w", veth.Name, err)
	}
	if err := netlink.LinkSetUp(veth); err != nil {
		return fmt.Errorf("veth %s: %w", veth.Name, err)
	}
	if err := configureUplink(pid, NodeAddress(number)); err != nil {
		return fmt.Errorf("%s: %w", Uplink, err)
	}

	_, pods, err := net.ParseCIDR(PodSubnet(number))
	if err != nil {
		return err
	}

	if err := netlink.RouteReplace(&netlink.Route{
		Dst: pods, Gw: net.ParseIP(NodeAddress(number)), LinkIndex: bridge.Attrs().Index,
	}); err != nil {
		return fmt.Errorf("route to %s: %w", pods, err)
	}

	return nil
}

func configureUplink(pid int, own string) error {
	ns, err := netns.GetFromPid(pid)
	if err != nil {
		return err
	}
	defer ns.Close()

	handle, err := netlink.NewHandleAt(ns)
	if err != nil {
		return err
	}
	defer handle.Close()

	uplink, err := handle.LinkByName(Uplink)
	if err != nil {
		return err
	}
	if err := handle.AddrAdd(uplink, address(own)); err != nil {
		return fmt.Errorf("address %s: %w", own, err)
	}
	if err := handle.LinkSetUp(uplink); err != nil {
		return err
	}

	if err := handle.RouteAdd(&netlink.Route{
		Gw: net.ParseIP(Gateway), LinkIndex: uplink.Attrs().Index,
	}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}

	return nil
}

// Detach deletes a node's veth pair if it exists.
func Detach(node string) error {
	link, err := netlink.LinkByName(Port(node))
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("veth %s: %w", Port(node), err)
	}
	// The end of the node's namespace also deletes the pair, at some time.
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("veth %s: %w", Port(node), err)
	}

	return nil
}

// Connect sets the bridge's end of a node's veth pair up or down, like a cable plugged in or out.
func Connect(node string, connected bool) error {
	link, err := netlink.LinkByName(Port(node))
	if err != nil {
		return fmt.Errorf("network: %s: %w", node, err)
	}

	set := netlink.LinkSetDown
	if connected {
		set = netlink.LinkSetUp
	}
	if err := set(link); err != nil {
		return fmt.Errorf("network: %s: %w", node, err)
	}

	return nil
}

func address(ip string) *netlink.Addr {
	return &netlink.Addr{
		IPNet: &net.IPNet{IP: net.ParseIP(ip).To4(), Mask: net.CIDRMask(prefixLength, 32)},
	}
}
