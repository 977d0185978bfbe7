// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
)

// addPort adds the xPU's side.
func (f *facts) addPort(i *Interface, port *v1alpha1.XPUPort) {
	if port == nil {
		return
	}

	i.Network, i.XPU = networksOf(port), port.Spec.XPU
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	i.Card = &Side{
		MAC: port.Spec.MAC, MTU: port.Status.MTU, Addresses: port.Status.Addresses,
		Port:  port.Status.BridgePort,
		State: cmp.Or(ready.Reason, "not looked at yet"),
	}

	if network := f.networks[port.Spec.Network]; network != nil {
		i.Card.VLAN = network.Spec.VLAN
	}
}

// networksOf returns the networks of a Port, separated by commas. Tagged networks are followed by
// tag and addresses if these are known.
func networksOf(port *v1alpha1.XPUPort) string {
	texts := port.Spec.AllNetworks()
	for i, name := range texts {
		for _, network := range port.Status.Networks {
			if network.Name == name {
				tag := fmt.Sprintf("%s (VLAN %d", name, network.VLAN)
				texts[i] = strings.Join(append([]string{tag}, network.Addresses...), ", ") + ")"
			}
		}
	}
	return strings.Join(texts, ", ")
}

// addHost adds the pod's side, from the agent or else from the claim's status.
func (i *Interface) addHost(a *nodestate.Attachment, status *resourceapi.AllocatedDeviceStatus) {
	switch {
	case a != nil:
		i.Name = a.Interface.Name
		i.Host = &Side{MAC: string(a.Interface.MAC), VLAN: int32(a.Interface.VLAN),
			MTU: int32(a.Interface.MTU), State: a.State}
		for _, address := range a.Interface.Addresses {
			i.Host.Addresses = append(i.Host.Addresses, address.String())
		}
	case status != nil && status.NetworkData != nil:
		i.Name = status.NetworkData.InterfaceName
		i.Host = &Side{MAC: status.NetworkData.HardwareAddress, Addresses: status.NetworkData.IPs}
	}
}

// compare finds contradictions between the two sides.
func compare(i *Interface) {
	if i.Host == nil || i.Card == nil || i.Host.State != "Attached" && i.Host.State != "" {
		return
	}

	differ := func(format string, args ...any) {
		i.Differences = append(i.Differences, fmt.Sprintf(format, args...))
	}
	if i.Host.MAC != "" && !strings.EqualFold(i.Host.MAC, i.Card.MAC) {
		differ(
			"the interface has MAC %s in the pod, but the xPU knows %s: it drops what the pod sends", i.Host.MAC, i.Card.MAC,
		)
	}

	if i.Card.MTU != 0 && i.Host.MTU > i.Card.MTU {
		differ("the interface has MTU %d in the pod, but the network carries %d: large packets "+
			"are lost", i.Host.MTU, i.Card.MTU)
	}

	if i.Host.VLAN != 0 {
		differ(
			"the PF tags what the pod sends with VLAN %d, but the xPU's port takes untagged frames",
			i.Host.VLAN,
		)
	}

	for _, address := range i.Card.Addresses {
		if !slices.Contains(i.Host.Addresses, address) {
			differ("the network gave the interface %s, but the pod does not have it", address)
		}
	}
}
