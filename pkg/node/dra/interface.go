// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/optional"
)

// wantedInterface returns the interface that the pod asks for, with the MAC, MTU and addresses of
// the Port, because the xPU already relies on them. A userspace program sets its own MTU.
func wantedInterface(
	device claim.Device, userspace bool, port *v1alpha1.XPUPort,
) (function.Interface, error) {
	wanted := device.Interface
	if userspace {
		var err error
		if wanted, err = claim.Userspace(wanted); err != nil {
			return function.Interface{}, err
		}
	}

	if port == nil {
		return wanted, nil
	}

	mac, err := function.ParseMAC(port.Spec.MAC)
	if err != nil {
		return function.Interface{}, fmt.Errorf("XPUPort %s/%s: spec.mac: %w", port.Namespace,
			port.Name, err)
	}

	wanted.MAC = mac
	if !userspace {
		wanted.MTU = int(optional.Min(port.Spec.MTU, port.Status.MTU))
	}

	wanted.Addresses = nil
	for i, text := range port.Spec.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return function.Interface{}, fmt.Errorf("XPUPort %s/%s: spec.addresses[%d]: %w",
				port.Namespace, port.Name, i, err)
		}
		wanted.Addresses = append(wanted.Addresses, address)
	}

	wanted.VLANs, err = vlansOf(device, port, wanted.MTU)
	if err == nil && userspace && len(wanted.VLANs) > 0 {
		err = errors.New("networks: interfaceName must be absent with a driver that hands the " +
			"Function to a program")
	}

	return wanted, err
}

// vlansOf returns the VLAN interfaces that the pod asks for, with the tags, MTUs and addresses that
// the Port's networks have at the xPU. mtu is the MTU of the interface below them.
func vlansOf(
	device claim.Device, port *v1alpha1.XPUPort, mtu int,
) (vlans []function.VLAN, err error) {
	for _, network := range device.Networks {
		if network.InterfaceName == "" {
			continue
		}

		i := slices.IndexFunc(port.Status.Networks, func(n v1alpha1.XPUPortNetworkStatus) bool {
			return n.Name == network.Name
		})
		if i < 0 {
			return nil, fmt.Errorf("XPUPort %s/%s: its status does not have the tag of network %s yet",
				port.Namespace, port.Name, network.Name)
		}

		joined := port.Status.Networks[i]
		vlan := function.VLAN{
			Name: network.InterfaceName, Tag: int(joined.VLAN),
		}
		if mtu != 0 { // otherwise a VLAN could get a larger MTU than the interface below it
			vlan.MTU = optional.Min(int(joined.MTU), mtu)
		}
		for n, text := range joined.Addresses {
			address, err := netip.ParsePrefix(text)
			if err != nil {
				return nil, fmt.Errorf("XPUPort %s/%s: status.networks[%d].addresses[%d]: %w",
					port.Namespace, port.Name, i, n, err)
			}
			vlan.Addresses = append(vlan.Addresses, address)
		}
		vlans = append(vlans, vlan)
	}

	return vlans, nil
}

// networkData describes an interface as it was observed in the pod, or else as it was requested. The
// name and the addresses of a port are the bond's, because the pod uses the bond. The MAC address is
// the Function's, because the bond's may change.
func networkData(a journal.Attachment) *resourceapi.NetworkDeviceData {
	name, mac, addresses := a.Interface.Name, a.Interface.MAC, a.Interface.Addresses
	if bond := a.Interface.Bond; bond != nil {
		name = bond.Name
	}
	if a.Observed != nil {
		name, mac, addresses = a.Observed.Carrier(), a.Observed.MAC, a.Observed.Addresses
	}

	data := &resourceapi.NetworkDeviceData{InterfaceName: name, HardwareAddress: string(mac)}
	for _, address := range shown(addresses) {
		data.IPs = append(data.IPs, address.String())
	}
	return data
}

// shown returns the addresses that a claim's status has room for. Link-local addresses, which the
// kernel adds by itself, come last, because the status is refused as a whole if it has more.
func shown(addresses []netip.Prefix) []netip.Prefix {
	isLocal := func(p netip.Prefix) bool { return p.Addr().IsLinkLocalUnicast() }
	order := func(a, b netip.Prefix) int {
		switch {
		case isLocal(a) == isLocal(b):
			return 0
		case isLocal(b):
			return -1
		}
		return 1
	}

	sorted := slices.Clone(addresses)
	slices.SortStableFunc(sorted, order)
	return sorted[:min(len(sorted), resourceapi.NetworkDeviceDataMaxIPs)]
}

// metadata returns the content of the device metadata file of the pod's containers (KEP-5304).
func metadata(a journal.Attachment) *kubeletplugin.DeviceMetadata {
	return &kubeletplugin.DeviceMetadata{
		Attributes: map[string]resourceapi.DeviceAttribute{
			string(deviceattribute.StandardDeviceAttributePCIBusID): {
				StringValue: new(string(a.Function.Address)),
			},
			"pf": {StringValue: new(string(a.PF))},
		},
		NetworkData: networkData(a),
	}
}

// deviceKey identifies a device in an allocation, or a share of a device.
type deviceKey struct {
	claim        types.UID
	pool, device string
	share        types.UID
}

func keyOf(claim types.UID, device claim.Device) deviceKey {
	return deviceKey{claim, device.Pool, device.Name, device.Share}
}

// chosenName is the name of an interface, or the reason why it has none.
type chosenName struct {
	name string
	err  error
}

// namesBeside returns the names of the VLAN interfaces, VRFs and bonds that claims ask for. No
// interface may get such a name by itself.
func namesBeside(claims []*resourceapi.ResourceClaim) map[string]bool {
	names := map[string]bool{}
	for _, c := range claims {
		devices, _ := claim.Devices(c) // prepare reports the error
		for _, device := range devices {
			for _, network := range device.Networks {
				names[network.InterfaceName] = true
			}
			if vrf := device.Interface.VRF; vrf != nil {
				names[vrf.Name] = true
			}
			if bond := device.Interface.Bond; bond != nil {
				names[bond.Name] = true
			}
		}
	}

	delete(names, "")
	return names
}

// chooseNames chooses the interface names of the Functions of the pod's claims. ofPod has the pod's
// attachments in the journal, which keep their names. Names that claims ask for come next. If two
// claims ask for the same name, the second one gets an error. The other interfaces get "net1",
// "net2", ... in the order of the claims.
func chooseNames(
	pod journal.Pod, claims []*resourceapi.ResourceClaim, ofPod []journal.Attachment,
) map[deviceKey]chosenName {
	n := names{
		chosen: map[deviceKey]chosenName{}, owners: map[string]string{},
		beside: namesBeside(claims),
	}
	for _, a := range ofPod {
		if a.Interface.Name != "" { // otherwise the Function was only chosen for a share
			of := deviceKey{a.Claim.UID, a.Claim.Pool, a.Claim.Device, a.Claim.Share}
			n.give(of, a.Interface.Name, a.Claim.Name)
		}
	}

	var others []nameless
	for _, one := range namelessOf(pod, claims) {
		switch _, done := n.chosen[one.key]; {
		case done:
		case one.wants == "":
			others = append(others, one)
		default:
			n.giveWanted(one)
		}
	}

	for _, one := range others {
		n.give(one.key, n.next(), one.claim)
	}

	return n.chosen
}

// nameless is a device of a claim whose interface needs a name.
type nameless struct {
	key   deviceKey
	claim string // name
	wants string // the name that the claim asks for, or ""
}

// namelessOf returns the devices of the pod's claims whose interfaces need names.
func namelessOf(pod journal.Pod, claims []*resourceapi.ResourceClaim) (list []nameless) {
	for _, c := range claims {
		if consumer, err := consumer(c); err != nil || consumer.UID != pod.UID {
			continue
		}

		devices, _ := claim.Devices(c) // prepare reports the error
		for _, device := range devices {
			if !device.Admin {
				list = append(list, nameless{keyOf(c.UID, device), c.Name, device.Interface.Name})
			}
		}
	}
	return list
}

// names are the names of a pod's interfaces while they are chosen.
type names struct {
	chosen map[deviceKey]chosenName
	owners map[string]string // name of the claim by interface name; "" for a CNI request's
	beside map[string]bool   // see [namesBeside]
	number int               // of the last name of the form "net1"
}

func (n *names) give(key deviceKey, name, claim string) {
	n.chosen[key], n.owners[name] = chosenName{name: name}, claim
}

// giveWanted gives an interface the name that its claim asks for, unless another one has it.
func (n *names) giveWanted(one nameless) {
	owner, taken := n.owners[one.wants]
	if !taken {
		n.give(one.key, one.wants, one.claim)
		return
	}

	other := fmt.Sprintf("claim %s of the same pod", owner)
	switch owner {
	case one.claim:
		other = "another request of the same claim"
	case "":
		other = "a CNI network of the same pod"
	}
	n.chosen[one.key] = chosenName{err: fmt.Errorf(
		"interfaceName %q: %s has that name already; choose another", one.wants, other)}
}

// next returns the next name of the form "net1" that is free.
func (n *names) next() string {
	for {
		n.number++
		name := fmt.Sprintf("net%d", n.number)
		if _, taken := n.owners[name]; !taken && !n.beside[name] {
			return name
		}
	}
}
