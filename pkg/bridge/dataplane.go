// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path"
	"strings"

	"github.com/go-logr/logr"
	"golang.org/x/sys/unix"
)

// DataPlane is how an Agent makes networks with Linux bridges.
type DataPlane string

const (
	// DataPlaneAuto is DataPlaneVLANAware if the kernel can filter VLANs, else
	// DataPlaneBridgePerNetwork.
	DataPlaneAuto DataPlane = "auto"
	// DataPlaneVLANAware is one bridge, in which a network is its VLAN id. The kernel needs
	// CONFIG_BRIDGE_VLAN_FILTERING.
	DataPlaneVLANAware DataPlane = "vlan-aware"
	// DataPlaneBridgePerNetwork is a bridge for each network. It has no TRUNK ports.
	DataPlaneBridgePerNetwork DataPlane = "bridge-per-network"
)

// segment is a network for the data plane.
type segment struct {
	id   string
	vlan uint16 // 1-4094
	vni  uint32 // 0: the network has none
}

// membership is a port's address and networks for the data plane. There is one network unless the
// port is a trunk.
type membership struct {
	mac      net.HardwareAddr
	networks []segment
	trunk    bool // frames carry the VLAN ids of their networks
	filtered bool // the port may send with its MAC address only
	// addresses are those that a filtered port may send from; none: any.
	addresses []netip.Addr
}

// dataplane realises networks and ports. All calls may be repeated.
type dataplane interface {
	// filtersVLANs tells whether there are trunks, and no two networks can have one VLAN id.
	filtersVLANs() bool
	// ensureNetwork returns the largest MTU with which frames reach other xPUs, 0 without a VNI.
	ensureNetwork(segment) (mtu int, err error)
	removeNetwork(id string) error
	attach(port string, to membership) error
	detach(port string) error
	// made returns the names of netdevs that networks and ports have, whoever asked for these.
	made() ([]string, error)
	// sweep removes what the agent has made, with either data plane, for other networks and ports
	// than these.
	sweep(networks []string, ports map[string]membership) error
	// sweepFilter ends the filtering of what has not been attached since the start.
	sweepFilter() error
	// restoreFilter makes the source filter anew, which somebody else changed.
	restoreFilter() error
	// dropped returns how many frames the source filter has dropped, by the port, or the network by
	// VXLAN, that they came from. It may be called at any time.
	dropped() (map[task]uint64, error)
	// watch calls emit with what each event may have changed. It returns nil after close.
	watch(emit func(task)) error
	// close ends watch. What was realised stays as it is.
	close()
}

// openDataPlane opens a data plane that stays in the network namespace of the calling thread.
func openDataPlane(cfg Config, log logr.Logger) (dataplane, error) {
	which := cfg.DataPlane
	switch which {
	case "", DataPlaneAuto, DataPlaneVLANAware, DataPlaneBridgePerNetwork:
	default:
		return nil, fmt.Errorf("data plane %q: must be %s, %s or %s",
			which, DataPlaneAuto, DataPlaneVLANAware, DataPlaneBridgePerNetwork)
	}

	if err := errors.Join(checkHostPFs(cfg.HostPFs), checkPatterns(cfg.Representors)); err != nil {
		return nil, err
	}

	underlay := cmp.Or(cfg.Underlay, UnderlayAuto)
	if err := errors.Join(checkUplinks(cfg.Uplinks), underlay.check()); err != nil {
		return nil, err
	}

	resolver := portResolver{sysfs: "/sys", hostPFs: cfg.HostPFs, representors: cfg.Representors}
	plane, err := openBridgePlane(cfg.Uplinks, underlay, resolver,
		which != DataPlaneBridgePerNetwork)
	if err != nil {
		return nil, err
	}

	if len(cfg.Uplinks) > 0 {
		if err := raiseGroupLimits(cmp.Or(cfg.Sysctl, "/proc/sys")); err != nil {
			log.Info("few networks may have a VNI", "reason", err.Error())
		}
	}

	if err := plane.filter.Supported(); err != nil {
		log.Info("no source filter", "reason", err.Error())
	}

	if plane.vlanAware {
		err := plane.probeVLANFiltering()
		if err == nil {
			log.Info("data plane", "is", DataPlaneVLANAware)
			return plane, nil
		}
		if which == DataPlaneVLANAware || !errors.Is(err, errNoVLANFiltering) {
			plane.close()
			return nil, fmt.Errorf("data plane %s: %w", DataPlaneVLANAware, err)
		}

		log.Info("no "+string(DataPlaneVLANAware)+" data plane", "reason", err.Error())
		plane.vlanAware = false
	}

	log.Info("data plane", "is", DataPlaneBridgePerNetwork)
	return plane, nil
}

// checkPatterns finds patterns for names of representors that match nothing, or more than people
// mean.
func checkPatterns(patterns []string) error {
	var failed []error
	for _, pattern := range patterns {
		if _, err := path.Match(pattern, ""); err != nil || strings.Trim(pattern, "*?") == "" {
			failed = append(failed,
				fmt.Errorf("representor %q: must be the name of a netdev, or a "+
					"pattern of names such as sim-*", pattern))
		}
	}

	return errors.Join(failed...)
}

// probeVLANFiltering makes the shared bridge. The error is an errNoVLANFiltering if the kernel
// cannot filter VLANs.
func (b *bridgePlane) probeVLANFiltering() error {
	bridge, err := b.ensureBridge(sharedBridge, sharedID)
	if err == nil {
		_, err = b.vlansOf(bridge.Attrs().Index)
	}

	if errors.Is(err, unix.EOPNOTSUPP) {
		err = fmt.Errorf("%w: %w", errNoVLANFiltering, err)
	}

	if errors.Is(err, errNoVLANFiltering) {
		err = errors.Join(err, b.removeOwn(sharedBridge, "bridge", sharedID))
	}

	return err
}
