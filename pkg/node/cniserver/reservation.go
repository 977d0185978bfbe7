// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"reflect"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

// checkRepeated refuses a second ADD that asks for something else than the first one. It ignores
// the addresses, because an IPAM plugin may give other addresses each time.
func (s *Server) checkRepeated(a cniRequest, have journal.Attachment) error {
	there, err := s.Lifecycle.IsIn(have, a.NetNS)
	if err != nil {
		return fail(types.ErrIOFailure, "Function %s: CNI_NETNS: %w", a.device, err)
	}

	if !there {
		return fail(CodeTaken, "Function %s is attached as %s of this container in network "+
			"namespace %s, and CNI_NETNS %s is "+
			"another one; DEL must come before an ADD that changes it", a.device, a.IfName,
			have.Place.NetNS, a.NetNS)
	}

	reservation, err := s.reservation(a, have)
	if err != nil {
		return err
	}

	i := reservation.Interface
	i.Addresses, i.Routes = have.Interface.Addresses, have.Interface.Routes
	if a.mac == "" {
		i.MAC = have.Interface.MAC
	}

	// the network limits the MTU
	if a.conf.MTU == 0 || have.Interface.MTU != 0 && have.Interface.MTU < a.conf.MTU {
		i.MTU = have.Interface.MTU
	}

	// The Function may belong to another pool now, and the pool may have another network.
	samePort := a.conf.Network == "" || have.Port != nil &&
		reservation.Port.Network == have.Port.Network && reservation.Port.MAC == have.Port.MAC
	if samePort && reflect.DeepEqual(i, have.Interface) {
		return nil
	}

	return fail(CodeTaken,
		"Function %s is attached as %s of this container with another configuration; "+
			"DEL must come before an ADD that changes it", a.device, a.IfName)
}

// reservation returns the record that the request asks for, given the current record.
func (s *Server) reservation(a cniRequest, have journal.Attachment) (journal.Attachment, error) {
	r := journal.Attachment{
		Function: a.function.ID, PF: a.function.PF, PFName: a.function.PFName,
		VFIndex: a.function.Index, Pod: a.pod,
		CNI: &journal.CNI{
			ContainerID: a.ContainerID, IfName: a.IfName, Network: a.conf.Name, IPAM: a.IPAM,
		},
	}

	complete := s.ofResource
	if have.Claim.UID != "" {
		complete = ofClaim
	}
	if err := complete(&r, a, have); err != nil {
		return journal.Attachment{}, err
	}

	if a.function.Userspace() || r.Setup != nil && r.Setup.Driver != "" {
		if fields := a.wanted.NetdevFields(); len(fields) > 0 {
			return journal.Attachment{}, a.conf.invalid("%s: Function %s is bound to a driver that "+
				"hands it to a program; leave them out, the program configures itself",
				strings.Join(fields, ", "), a.device)
		}

		// The program in the pod sets MTU and addresses, which it finds in the CNI result.
		r.Interface = function.Interface{
			Name: r.Interface.Name, MAC: r.Interface.MAC, VF: r.Interface.VF, Userspace: true,
		}
	}

	if err := r.Interface.Validate(); err != nil {
		return journal.Attachment{}, a.conf.invalid("%w", err)
	}

	return r, nil
}

// ofResource completes the reservation of a Function that the device plugin allocated. The Port
// that Allocate asked for stays, unless the configuration names another network or MAC.
func (s *Server) ofResource(r *journal.Attachment, a cniRequest, have journal.Attachment) error {
	r.Resource, r.Setup = have.Resource, have.Setup
	port := journal.Port{ID: s.PortID(a.device), Network: a.conf.Network, MAC: a.mac}
	if have.Port != nil {
		port.DevicePool = have.Port.DevicePool
		port.Network, port.MAC = cmp.Or(port.Network, have.Port.Network), cmp.Or(port.MAC,
			have.Port.MAC)
	}

	port.MAC = cmp.Or(port.MAC, s.MAC(a.device))
	p, inPool := s.Pools.PoolOf(a.device)
	if inPool {
		port.DevicePool = cmp.Or(port.DevicePool, p.Name)
		// even if the pool was moved to DRA after the allocation
		port.Network = cmp.Or(port.Network, p.Spec.Network)
		if r.Setup == nil {
			r.Setup = setup.Wanted(p.Spec, a.device, "", cmp.Or(a.mac, s.MAC(a.device)))
		}
	}

	// The Function's pool may name a network. Pools are not known at the start, and for a moment
	// after a card came back.
	if !s.Pools.Considered(a.device) && (r.Resource == "" || port.Network == "") {
		return fail(types.ErrTryAgainLater,
			"Function %s: pools have not been read yet since it came", a.device)
	}

	// The resource stays empty if the kubelet gave the Function to no pod. Package health reports
	// such Functions.
	if r.Resource == "" && !(inPool && p.Spec.Publish == v1alpha1.PublishDevicePlugin) {
		return fail(CodeNotOffered,
			"Function %s belongs to no DevicePool with publish: DevicePlugin; "+
				"in one that is published by DRA, the pod must have a claim to it", a.device)
	}

	port.AssignAddresses = a.usesAddressBook()
	if port.AssignAddresses {
		if port.Network == "" {
			return a.conf.invalid("ipam.type %s: gives addresses of a network of the xPU, and "+
				"neither network nor the DevicePool names one",
				wire.IPAM)
		}

		port.Addresses = a.ipam.addresses // from runtimeConfig.ips
		if have.Port != nil && have.Port.AssignAddresses && have.Port.Network == port.Network &&
			len(port.Addresses) == 0 {
			port.Addresses = have.Port.Addresses // this is a repeated ADD
		}
	}

	r.Interface = function.Interface{
		Name: a.IfName, MTU: a.conf.MTU, MAC: a.mac, VF: a.vf, Addresses: a.ipam.addresses,
		Routes: a.ipam.routes,
	}
	addSettings(&r.Interface, a.wanted)

	if err := a.checkLinkType("", port.Network); err != nil {
		return err
	}
	if port.Network != "" {
		r.Port, r.Interface.MAC = &port, port.MAC
	}

	return nil
}

// ofClaim completes the reservation of a Function that belongs to a claim of the pod. The claim
// decides about the xPU's side, network and MAC. The configuration adds to the interface of the
// claim.
func ofClaim(r *journal.Attachment, a cniRequest, have journal.Attachment) error {
	claimed := have.Interface
	if have.CNI != nil && have.CNI.Claimed != nil {
		claimed = *have.CNI.Claimed
	}

	if a.conf.Network != "" {
		return a.conf.invalid("network %q: Function %s belongs to claim %s, which decides about "+
			"the network; leave network out",
			a.conf.Network, a.device, have.Claim.Name)
	}

	if claimed.Bond != nil {
		return a.conf.invalid("Function %s is a port of bond %s of claim %s, which has its addresses; "+
			"leave the network out of the pod's annotation: the interface is attached without it",
			a.device, claimed.Bond.Name, have.Claim.Name)
	}

	if a.usesAddressBook() {
		return a.conf.invalid("ipam.type %s: Function %s belongs to claim %s, which has its "+
			"addresses; leave ipam out",
			wire.IPAM, a.device, have.Claim.Name)
	}

	if a.mac != "" && claimed.MAC != "" && a.mac != claimed.MAC {
		return a.conf.invalid("mac %s: Function %s belongs to claim %s, which has %s, and the "+
			"xPU may count on it; leave mac out",
			a.mac, a.device, have.Claim.Name, claimed.MAC)
	}

	if err := addressesOfClaim(a, claimed, have.Claim.Name); err != nil {
		return err
	}

	r.Claim, r.Pod, r.Port, r.Setup = have.Claim, have.Pod, have.Port, have.Setup
	r.Devices = have.Devices
	r.CNI.Claimed = &claimed
	r.Interface = claimed
	r.Interface.Name = a.IfName
	r.Interface.MTU = optional.Min(claimed.MTU, a.conf.MTU)
	r.Interface.VF = mergeVF(claimed.VF, a.vf)
	r.Interface.MAC = cmp.Or(a.mac, claimed.MAC)
	addSettings(&r.Interface, a.wanted)
	if len(a.ipam.addresses) > 0 {
		r.Interface.Addresses = a.ipam.addresses
	}

	if a.ipam.result != nil {
		r.Interface.Routes = a.ipam.routes
	}

	return nil
}

// addressesOfClaim refuses addresses that differ from the claim's, if the claim has any. The
// network's address book may give other addresses to another interface, and the xPU drops packets
// with such addresses.
func addressesOfClaim(a cniRequest, claimed function.Interface, claim string) error {
	for _, address := range a.ipam.addresses {
		if len(claimed.Addresses) > 0 && !slices.Contains(claimed.Addresses, address) {
			return a.conf.invalid("address %s: Function %s belongs to claim %s, which has %s, "+
				"and the xPU may count on them; "+
				"leave ipam and ips out, and write the address into the claim's InterfaceConfig",
				address, a.device, claim, claimed.Addresses)
		}
	}
	return nil
}

// mergeVF returns base with every field replaced that over sets. A VLAN's QoS and protocol belong
// to the VLAN.
func mergeVF(base, over *function.VFConfig) *function.VFConfig {
	if base == nil || over == nil {
		return cmp.Or(over, base)
	}

	vlan := base
	if over.VLAN != nil {
		vlan = over
	}

	return &function.VFConfig{
		VLAN: vlan.VLAN, QoS: vlan.QoS, Proto: vlan.Proto,
		Trust:      cmp.Or(over.Trust, base.Trust),
		SpoofCheck: cmp.Or(over.SpoofCheck, base.SpoofCheck),
		MinTxRate:  cmp.Or(over.MinTxRate, base.MinTxRate),
		MaxTxRate:  cmp.Or(over.MaxTxRate, base.MaxTxRate),
		LinkState:  cmp.Or(over.LinkState, base.LinkState),
		NodeGUID:   cmp.Or(over.NodeGUID, base.NodeGUID),
		PortGUID:   cmp.Or(over.PortGUID, base.PortGUID),
	}
}
