// SPDX-License-Identifier: Apache-2.0

// Package plane is the data plane of opi-bridge: it makes networks and ports with Linux bridges,
// VXLAN and representors, and gateways of networks with VRFs.
//
// In the VLAN-aware mode, all networks share one bridge, or a few if there are many ports. A
// network is a VLAN id in its bridge: ACCESS and VXLAN ports have the VLAN untagged, and a TRUNK
// port has the VLANs of its networks tagged. A shared bridge has no default VLAN and is itself in
// no VLAN, so that neither a netdev that was just added nor the machine is in a network. In the
// other mode, each network has a bridge of its own, and VLAN ids mean nothing.
//
// An SVI makes the machine the gateway of a network. Its netdev is a VLAN netdev on the shared
// bridge, which then is in that VLAN, or the network's own bridge. For other machines the gateway
// is a router with a MAC address of its own: see package sourcefilter.
//
// The plane marks the netdevs that it makes with an alias, and leaves all others alone. They stay
// as they are when the agent stops.
package plane

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync/atomic"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/sourcefilter"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
)

// Mode is how a Plane makes networks with Linux bridges.
type Mode string

const (
	// ModeAuto is ModeVLANAware if the kernel can filter VLANs, else ModeBridgePerNetwork.
	ModeAuto Mode = "auto"
	// ModeVLANAware makes a network as a VLAN of a shared bridge. The kernel needs
	// CONFIG_BRIDGE_VLAN_FILTERING.
	ModeVLANAware Mode = "vlan-aware"
	// ModeBridgePerNetwork makes a bridge for each network. It has no TRUNK ports.
	ModeBridgePerNetwork Mode = "bridge-per-network"
)

// NoTrunks is the reason why a Plane has no TRUNK ports if each network has a bridge of its own.
const NoTrunks = "ptype TRUNK: needs the data plane " + string(ModeVLANAware) +
	", this agent's has a bridge for each network and serves ACCESS ports"

// Config configures a Plane.
type Config struct {
	Mode         Mode     // empty is ModeAuto
	Uplinks      []Uplink // VXLAN is sent from these netdevs
	Underlay     Underlay // empty is UnderlayAuto
	Representors representor.Config
	// Sysctl is a directory with the files of /proc/sys that VXLAN and IPv6 gateways need to write.
	// If it is empty, it is /proc/sys.
	Sysctl string
}

const defaultSysctl = "/proc/sys"

// Segment is a network as the Plane knows it.
type Segment struct {
	ID   string
	VLAN uint16 // 1-4094
	VNI  uint32 // 0 if the network has none
	// VTEP is the address that VXLAN is sent from. If it is zero, the kernel chooses an address of
	// the uplink.
	VTEP netip.Addr
	// Unicast says that frames to unknown addresses are sent to Remotes, and not to a multicast
	// group.
	Unicast bool
	Remotes []netip.Addr
	// Stale are addresses that were in Remotes before. All that are neither in Remotes nor in Stale
	// belong to other programs.
	Stale []netip.Addr
}

// Membership describes a port: the networks that it is in, and the addresses that it may send from.
// A port has one network unless it is a trunk.
type Membership struct {
	MAC      net.HardwareAddr
	Networks []Segment
	Trunk    bool // frames carry the VLAN ids of their networks
	// Sources are what the port may send from in each of Networks, by the network's id. A network
	// without sources lets the port send from any address.
	Sources map[string]Sources
}

// Sources are the source addresses that a port may use in a network.
type Sources struct {
	Filtered bool // the port may send from its MAC only
	// Addresses are the only IP addresses that a filtered port may send from. If there are none, it
	// may send from any address.
	Addresses []netip.Addr
	Shared    bool // ports at other xPUs have the same Addresses
}

// Plane makes networks and ports. All its calls may be repeated. Only one goroutine may use it at a
// time, but Watch may run at any time.
type Plane struct {
	*conn
	vlanAware    bool
	uplinks      []Uplink // VXLAN is refused if there are none
	underlay     Underlay
	events       *nl.NetlinkSocket // of netdevs and addresses
	fdbEvents    *nl.NetlinkSocket // of static entries of forwarding databases
	routeEvents  *nl.NetlinkSocket // of unreachable routes that were removed
	closed       atomic.Bool
	devlink      *devlink.Conn
	representors *representor.Finder
	filter       *sourcefilter.Filter
	counters     *Counters

	// vlans are the VLAN ids of networks in the VLAN-aware mode. If two networks want one VLAN id,
	// the first one has it.
	vlans     map[string]uint16
	placement *placement     // of networks, in the VLAN-aware mode
	svis      map[string]SVI // as they were made last, by id
	// routers are the MAC addresses that gateways have at other machines, by network.
	routers      map[string]net.HardwareAddr
	tables       *tables
	ownVLANs     *ownVLANs
	destinations *destinations
	sysctls      *sysctls
	owners       *owners
	forwarding   *forwarding
	uplinkStates *uplinkStates
}

// Open opens a Plane in the network namespace of the calling thread, and stays there.
func Open(cfg Config, log logr.Logger) (*Plane, error) {
	switch cfg.Mode {
	case "", ModeAuto, ModeVLANAware, ModeBridgePerNetwork:
	default:
		return nil, fmt.Errorf("data plane %q: must be %s, %s or %s",
			cfg.Mode, ModeAuto, ModeVLANAware, ModeBridgePerNetwork)
	}

	cfg.Underlay = cmp.Or(cfg.Underlay, UnderlayAuto)
	if err := cfg.Representors.Check(); err != nil {
		return nil, err
	}
	if err := errors.Join(checkUplinks(cfg.Uplinks), cfg.Underlay.check()); err != nil {
		return nil, err
	}

	p, err := open(cfg)
	if err != nil {
		return nil, err
	}

	if len(cfg.Uplinks) > 0 {
		if err := raiseGroupLimits(cmp.Or(cfg.Sysctl, defaultSysctl)); err != nil {
			log.Info("few networks may have a VNI", "reason", err.Error())
		}
	}

	if err := p.filter.Supported(); err != nil {
		log.Info("no source filter", "reason", err.Error())
	}

	if err := p.chooseMode(cfg.Mode, log); err != nil {
		p.Close()
		return nil, err
	}

	return p, nil
}

// open opens the sockets of a Plane whose mode is cfg.Mode, or else ModeVLANAware.
func open(cfg Config) (_ *Plane, err error) {
	p := &Plane{
		vlanAware: cfg.Mode != ModeBridgePerNetwork, uplinks: cfg.Uplinks, underlay: cfg.Underlay,
		vlans: map[string]uint16{}, placement: newPlacement(), owners: newOwners(),
		forwarding: newForwarding(), uplinkStates: newUplinkStates(cfg.Uplinks),
		svis: map[string]SVI{}, routers: map[string]net.HardwareAddr{}, tables: newTables(),
		ownVLANs: newOwnVLANs(), destinations: newDestinations(),
		sysctls: openSysctls(cmp.Or(cfg.Sysctl, defaultSysctl)),
	}

	defer func() {
		if err != nil {
			p.Close()
		}
	}()

	// The subscription comes before any list of netdevs, so that no change is missed.
	p.events, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR,
		unix.RTNLGRP_IPV6_IFADDR, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
	if err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: %w", err)
	}
	// The buffer takes a burst of some hundred netdevs. If it overflows, Watch reports that
	// everything may have changed.
	if err := p.events.SetReceiveBufferSize(1<<20, false); err != nil {
		return nil, fmt.Errorf("subscribe to netdev events: receive buffer: %w", err)
	}
	if p.fdbEvents, err = subscribeToEntries(); err != nil {
		return nil, fmt.Errorf("subscribe to forwarding databases: %w", err)
	}
	if p.routeEvents, err = subscribeToLostEnds(); err != nil {
		return nil, fmt.Errorf("subscribe to routes: %w", err)
	}
	if p.conn, err = dial(); err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}

	for _, u := range cfg.Uplinks {
		if link, err := p.find(u.Name); err == nil && link != nil {
			p.uplinkStates.byName[u.Name] = uplinkStateOf(link.Attrs())
		}
	}

	if p.devlink, err = devlink.Dial(threadNamespace()); err != nil {
		return nil, err
	}
	if p.filter, err = sourcefilter.Open(); err != nil {
		return nil, err
	}

	if p.counters, err = openCounters(p.owners, p.filter); err != nil {
		return nil, err
	}

	ports := representor.NewPortLister(p.devlink.Ports)
	p.representors = representor.NewFinder(cfg.Representors, p.handle, ports.List)

	return p, nil
}

// threadNamespace returns a path to the network namespace of the calling thread, or "" if it is the
// namespace of the process, because entering a namespace by a path needs CAP_SYS_ADMIN.
func threadNamespace() string {
	const path = "/proc/thread-self/ns/net"
	ofProcess, err := os.Readlink("/proc/self/ns/net")
	ofThread, errThread := os.Readlink(path)
	if err == nil && errThread == nil && ofThread == ofProcess {
		return ""
	}
	return path
}

// chooseMode sets the mode that the kernel supports.
func (p *Plane) chooseMode(mode Mode, log logr.Logger) error {
	if p.vlanAware {
		err := p.probeVLANFiltering()
		if err == nil {
			log.Info("data plane", "is", ModeVLANAware)
			return nil
		}
		if mode == ModeVLANAware || !errors.Is(err, errNoVLANFiltering) {
			return fmt.Errorf("data plane %s: %w", ModeVLANAware, err)
		}

		log.Info("no "+string(ModeVLANAware)+" data plane", "reason", err.Error())
		p.vlanAware = false
	}

	log.Info("data plane", "is", ModeBridgePerNetwork)
	return nil
}

// probeVLANFiltering makes the first shared bridge. The error is an errNoVLANFiltering if the
// kernel cannot filter VLANs.
func (p *Plane) probeVLANFiltering() error {
	bridge, err := p.ensureBridge(sharedBridge, sharedID)
	if err == nil {
		_, err = p.vlansOf(bridge.Attrs().Index)
	}

	if errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("%w: %w", errNoVLANFiltering, err)
	}

	if errors.Is(err, errNoVLANFiltering) {
		err = errors.Join(err, p.removeOwn(sharedBridge, "bridge", sharedID))
	}

	return err
}

// Close ends Watch. Networks and ports stay as they are.
func (p *Plane) Close() {
	p.closed.Store(true)
	if p.events != nil {
		_ = p.events.Close()
	}

	for _, socket := range []*nl.NetlinkSocket{p.fdbEvents, p.routeEvents} {
		if socket != nil {
			_ = socket.Close()
		}
	}

	p.sysctls.close()

	if p.conn != nil {
		p.close()
	}

	if p.devlink != nil {
		p.devlink.Close()
	}

	if p.counters != nil {
		p.counters.close()
	}
	if p.filter != nil {
		_ = p.filter.Close()
	}
}

// VLANAware reports whether the mode is ModeVLANAware: there are TRUNK ports, and no two networks
// can have the same VLAN id.
func (p *Plane) VLANAware() bool { return p.vlanAware }

// SourceFilter returns the filter of the frames that ports send.
func (p *Plane) SourceFilter() SourceFilter { return SourceFilter{p.filter} }

// SourceFilter drops frames with a false source address. The rule of [Plane] about goroutines holds
// for it too.
type SourceFilter struct {
	filter *sourcefilter.Filter
}

// Sweep ends the filtering of all netdevs that were not attached since the Plane was opened.
func (f SourceFilter) Sweep() error { return f.filter.Sweep() }

// Restore makes the filter anew after another program has changed it.
func (f SourceFilter) Restore() error { return f.filter.Restore() }

// Counters returns the counters of ports and networks. They can be read until Close.
func (p *Plane) Counters() *Counters { return p.counters }
