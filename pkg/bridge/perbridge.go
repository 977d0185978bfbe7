package bridge

import (
	"errors"
	"fmt"
)

// perBridge is the data plane of any Linux: one bridge for each network.
type perBridge struct{ *rtnetlink }

func (perBridge) filtersVLANs() bool { return false }

// ensureNetwork brings up the network's bridge, and the VXLAN port if it has a VNI.
func (b perBridge) ensureNetwork(n segment) (made bool, err error) {
	bridge, made, err := b.ensure(newBridge(bridgeName(n.id)), n.id)
	if err != nil {
		return made, err
	}
	if err := b.settle(bridge); err != nil {
		return made, err
	}
	_, err = b.ensureVXLAN(n, bridge)
	return made, err
}

// removeNetwork removes the network's netdevs. Representors that are still in the bridge are set free by that.
func (b perBridge) removeNetwork(id string) error {
	if err := b.removeOwn(vxlanName(id), "vxlan", id); err != nil {
		return err
	}
	return b.removeOwn(bridgeName(id), "bridge", id)
}

// attach puts the port's representor into the network's bridge, which must be there.
func (b perBridge) attach(port string, to membership) error {
	if to.trunk { // from a state of the other data plane
		return errors.New(noTrunks)
	}
	rep, err := b.representor(port)
	if err != nil {
		return err
	}
	network := to.networks[0].id
	bridge, err := b.own(bridgeName(network), "bridge", network)
	if err != nil {
		return err
	}
	if bridge == nil {
		return fmt.Errorf("netdev %s, the bridge of %s, is missing", bridgeName(network), network)
	}
	if err := b.join(rep, bridge, port); err != nil {
		return err
	}
	return b.forward(rep, to.mac, 0)
}

// noTrunks is what is said about TRUNK ports.
const noTrunks = "ptype TRUNK: needs the data plane " + string(DataPlaneVLANAware) + ", this agent's has a bridge for each network and serves ACCESS ports"

func (b perBridge) sweep(networks []string, ports map[string]membership) error {
	return b.rtnetlink.sweep(networks, networks, ports, func(to membership) string { return to.networks[0].id })
}
