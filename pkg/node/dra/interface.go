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
	chosen := map[deviceKey]chosenName{}
	// taken has the name of the claim for each interface name.
	taken := map[string]string{}
	for _, a := range ofPod {
		if a.Interface.Name == "" { // the Function was only chosen for a share
			continue
		}
		of := deviceKey{a.Claim.UID, a.Claim.Pool, a.Claim.Device, a.Claim.Share}
		chosen[of], taken[a.Interface.Name] = chosenName{name: a.Interface.Name}, a.Claim.Name
	}

	reserved := namesBeside(claims)
	number := 0
	for _, asked := range []bool{true, false} {
		for _, c := range claims {
			if consumer, err := consumer(c); err != nil || consumer.UID != pod.UID {
				continue
			}

			devices, _ := claim.Devices(c) // prepare reports the error
			for _, device := range devices {
				if device.Admin {
					continue
				}

				name := device.Interface.Name
				of := keyOf(c.UID, device)
				if _, done := chosen[of]; done || asked != (name != "") {
					continue
				}

				if asked && taken[name] != "" {
					owner := fmt.Sprintf("claim %s of the same pod", taken[name])
					if taken[name] == c.Name {
						owner = "another request of the same claim"
					}
					chosen[of] = chosenName{err: fmt.Errorf(
						"interfaceName %q: %s has that name already; choose another", name, owner)}
					continue
				}

				for name == "" || taken[name] != "" || reserved[name] && !asked {
					number++
					name = fmt.Sprintf("net%d", number)
				}

				chosen[of], taken[name] = chosenName{name: name}, c.Name
			}
		}
	}

	return chosen
}
