package dra

import (
	"fmt"
	"net/netip"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// wantedInterface is what the pod asks for with what the Port says about MAC, MTU and addresses, which the xPU
// already counts on. A program of the pod that has the Function has to be content with the MTU that it sets itself.
func wantedInterface(device claim.Device, userspace bool, port *v1alpha1.XPUPort) (function.Interface, error) {
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
		return function.Interface{}, fmt.Errorf("XPUPort %s/%s: spec.mac: %w", port.Namespace, port.Name, err)
	}
	wanted.MAC = mac
	if !userspace {
		wanted.MTU = int(port.Spec.MTU)
	}
	wanted.Addresses = nil
	for i, text := range port.Spec.Addresses {
		address, err := netip.ParsePrefix(text)
		if err != nil {
			return function.Interface{}, fmt.Errorf("XPUPort %s/%s: spec.addresses[%d]: %w", port.Namespace, port.Name, i, err)
		}
		wanted.Addresses = append(wanted.Addresses, address)
	}
	return wanted, nil
}

// networkData is how an attachment is shown in claims and in metadata files: as it was seen in the pod, and before that
// as it is asked for.
func networkData(a journal.Attachment) *resourceapi.NetworkDeviceData {
	name, mac, addresses := a.Interface.Name, a.Interface.MAC, a.Interface.Addresses
	if a.Observed != nil {
		name, mac, addresses = a.Observed.Name, a.Observed.MAC, a.Observed.Addresses
	}
	data := &resourceapi.NetworkDeviceData{InterfaceName: name, HardwareAddress: string(mac)}
	for _, address := range addresses {
		data.IPs = append(data.IPs, address.String())
	}
	return data
}

// metadata is what the pod's containers find in the device metadata file (KEP-5304).
func metadata(a journal.Attachment) *kubeletplugin.DeviceMetadata {
	return &kubeletplugin.DeviceMetadata{
		Attributes: map[string]resourceapi.DeviceAttribute{
			string(deviceattribute.StandardDeviceAttributePCIBusID): {StringValue: new(string(a.Function.Address))},
			string(AttributePF): {StringValue: new(string(a.PF))},
		},
		NetworkData: networkData(a),
	}
}

// nameKey is one interface of a claim, chosenName its name, or why it can have none.
type (
	nameKey struct {
		claim    types.UID
		function function.ID
	}
	chosenName struct {
		name string
		err  error
	}
)

// chooseNames gives every interface of those claims that are the pod's its name. ofPod is what the journal has of the pod. A
// name that an earlier Prepare chose stays; then come those that are asked for; the others are "net1", "net2", ... in the
// order of the claims. A name that is asked for twice is an error for the second.
func chooseNames(pod journal.Pod, claims []*resourceapi.ResourceClaim, ofPod []journal.Attachment) map[nameKey]chosenName {
	chosen := map[nameKey]chosenName{}
	taken := map[string]string{} // the name of the claim that has an interface name
	for _, a := range ofPod {
		chosen[nameKey{a.Claim.UID, a.Function}], taken[a.Interface.Name] = chosenName{name: a.Interface.Name}, a.Claim.Name
	}
	number := 0
	for _, asked := range []bool{true, false} {
		for _, c := range claims {
			if consumer, err := consumer(c); err != nil || consumer.UID != pod.UID {
				continue
			}
			devices, _ := claim.Devices(c) // an error is told where the claim is prepared
			for _, device := range devices {
				key, name := nameKey{c.UID, device.Function}, device.Interface.Name
				if _, done := chosen[key]; done || asked != (name != "") {
					continue
				}
				if asked && taken[name] != "" {
					chosen[key] = chosenName{err: fmt.Errorf(
						"interfaceName %q: claim %s of the same pod has that name already; choose another", name, taken[name])}
					continue
				}
				for name == "" || taken[name] != "" {
					number++
					name = fmt.Sprintf("net%d", number)
				}
				chosen[key], taken[name] = chosenName{name: name}, c.Name
			}
		}
	}
	return chosen
}
