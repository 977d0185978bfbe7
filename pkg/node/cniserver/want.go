package cniserver

import (
	"cmp"
	"net/netip"
	"reflect"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/setup"
)

// sameAsBefore refuses a second ADD that wants something else than the first. What IPAM says does not count: it may
// give other addresses each time it is asked.
func (s *Server) sameAsBefore(a addRequest, have journal.Attachment) error {
	want, err := s.want(a, have)
	if err != nil {
		return err
	}
	want.Interface.Addresses, want.Interface.Routes = have.Interface.Addresses, have.Interface.Routes
	if a.network == "" { // the pool may have got another one since
		want.Port = have.Port
	}
	if a.mac == "" {
		want.Interface.MAC = have.Interface.MAC
	}
	if a.mtu == 0 || have.Interface.MTU != 0 && have.Interface.MTU < a.mtu { // it is the network's
		want.Interface.MTU = have.Interface.MTU
	}
	if reflect.DeepEqual(want.Interface, have.Interface) && samePort(want.Port, have.Port) {
		return nil
	}
	return fail(CodeTaken, "Function %s is attached as %s of this container with another configuration; "+
		"DEL must come before an ADD that changes it", a.device, a.request.IfName)
}

// samePort says whether the xPU serves the same, whichever pool the Function belongs to by now.
func samePort(a, b *journal.Port) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Network == b.Network && a.MAC == b.MAC
}

// want is the record that the request leads to, from the one that there is.
func (s *Server) want(a addRequest, have journal.Attachment) (journal.Attachment, error) {
	want := journal.Attachment{
		Function: a.function.ID, PF: a.function.PF, PFName: a.function.PFName, VFIndex: a.function.Index, Pod: a.pod,
		CNI: &journal.CNI{
			ContainerID: a.request.ContainerID, IfName: a.request.IfName, Network: a.conf, IPAM: a.request.IPAM,
		},
	}
	var err error
	if have.Claim.UID != "" {
		err = s.wantOfClaim(a, have, &want)
	} else {
		err = s.wantOfResource(a, have, &want)
	}
	if err != nil {
		return journal.Attachment{}, err
	}
	if a.function.Userspace() || want.Setup != nil && want.Setup.Driver != "" {
		// Its program sets MTU and addresses; the result says which.
		want.Interface = function.Interface{
			Name: want.Interface.Name, MAC: want.Interface.MAC, VF: want.Interface.VF, Userspace: true,
		}
	}
	if err := want.Interface.Validate(); err != nil {
		return journal.Attachment{}, fail(types.ErrInvalidNetworkConfig, "network configuration %s: %w", a.conf, err)
	}
	return want, nil
}

// wantOfResource is about a Function that the device plugin handed out. What Allocate had the xPU serve stays, unless
// the configuration names another network.
func (s *Server) wantOfResource(a addRequest, have journal.Attachment, want *journal.Attachment) error {
	network, devicePool, offered := a.network, "", false
	want.Resource = cmp.Or(have.Resource, a.resource)
	want.Setup = have.Setup
	if have.Port != nil {
		network, devicePool = cmp.Or(network, have.Port.Network), have.Port.DevicePool
	}
	if p, ok := s.Pools.PoolOf(a.device); ok {
		devicePool = cmp.Or(devicePool, p.Name)
		if want.Setup == nil {
			want.Setup = setup.Wanted(p.Spec, a.device, "", cmp.Or(a.mac, s.MAC(a.device)))
		}
		offered = p.Spec.Publish == v1alpha1.PublishDevicePlugin
		if network == "" { // also where the pool was moved to DRA since
			network = p.Spec.Network
		}
	}
	// A Function whose pool names the network would be taken for one without, and the xPU not be asked. That is so at the
	// start, and for a moment after each time that a card came back.
	if !s.Pools.Considered(a.device) && (want.Resource == "" || network == "") {
		return fail(types.ErrTryAgainLater, "Function %s: pools have not been read yet since it came", a.device)
	}
	// The resource stays empty where the kubelet did not give the Function to anybody: health tells of that.
	if want.Resource == "" && !offered {
		return fail(CodeNotOffered, "Function %s belongs to no DevicePool with publish: DevicePlugin; "+
			"in one that is published by DRA, the pod must have a claim to it", a.device)
	}
	want.Interface = function.Interface{
		Name: a.request.IfName, MTU: a.mtu, MAC: a.mac, VF: a.vf, Addresses: a.addresses(), Routes: a.ipam.routes,
	}
	if network == "" {
		return nil
	}
	if want.Interface.MAC == "" && have.Port != nil {
		want.Interface.MAC = have.Port.MAC
	}
	if want.Interface.MAC == "" {
		want.Interface.MAC = s.MAC(a.device)
	}
	want.Port = &journal.Port{DevicePool: devicePool, Network: network, MAC: want.Interface.MAC}
	return nil
}

// addresses are IPAM's, or else those that the runtime asks for.
func (a addRequest) addresses() []netip.Prefix {
	if a.ipam.result != nil {
		return a.ipam.addresses
	}
	return a.ips
}

// wantOfClaim is about a Function that belongs to a claim of the pod. The claim decides about the xPU's side, network
// and MAC; the configuration adds to what the claim says about the interface.
func (s *Server) wantOfClaim(a addRequest, have journal.Attachment, want *journal.Attachment) error {
	claimed := have.Interface
	if have.CNI != nil && have.CNI.Claimed != nil {
		claimed = *have.CNI.Claimed
	}
	if a.network != "" {
		return fail(types.ErrInvalidNetworkConfig,
			"network configuration %s: network %q: Function %s belongs to claim %s, which decides about the network; "+
				"leave network out",
			a.conf, a.network, a.device, have.Claim.Name)
	}
	if a.mac != "" && claimed.MAC != "" && a.mac != claimed.MAC {
		return fail(types.ErrInvalidNetworkConfig,
			"network configuration %s: mac %s: Function %s belongs to claim %s, which has %s, and the xPU may count on it; "+
				"leave mac out",
			a.conf, a.mac, a.device, have.Claim.Name, claimed.MAC)
	}
	want.Claim, want.Pod, want.Port, want.Setup = have.Claim, have.Pod, have.Port, have.Setup
	want.CNI.Claimed = &claimed
	want.Interface = claimed
	want.Interface.Name = a.request.IfName
	want.Interface.MTU = smaller(claimed.MTU, a.mtu)
	want.Interface.VF = over(claimed.VF, a.vf)
	if a.mac != "" {
		want.Interface.MAC = a.mac
	}
	if addresses := a.addresses(); len(addresses) > 0 {
		want.Interface.Addresses = addresses
	}
	if a.ipam.result != nil {
		want.Interface.Routes = a.ipam.routes
	}
	return nil
}

// smaller is the smaller MTU of those that are given.
func smaller(a, b int) int {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

// over is base with what more asks for.
func over(base, more *function.VFConfig) *function.VFConfig {
	if base == nil || more == nil {
		if more == nil {
			return base
		}
		return more
	}
	c := *base
	if more.VLAN != nil {
		c.VLAN, c.QoS, c.Proto = more.VLAN, more.QoS, more.Proto
	}
	for _, f := range []struct{ to, from **int }{{&c.MinTxRate, &more.MinTxRate}, {&c.MaxTxRate, &more.MaxTxRate}} {
		if *f.from != nil {
			*f.to = *f.from
		}
	}
	for _, f := range []struct{ to, from **bool }{{&c.Trust, &more.Trust}, {&c.SpoofCheck, &more.SpoofCheck}} {
		if *f.from != nil {
			*f.to = *f.from
		}
	}
	if more.LinkState != "" {
		c.LinkState = more.LinkState
	}
	return &c
}
