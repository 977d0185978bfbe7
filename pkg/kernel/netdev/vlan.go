// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// addVLAN makes a VLAN interface on top of the netdev, with its addresses. Restore deletes it as it
// deletes whatever is stacked on the netdev.
func (e *Engine) addVLAN(pod *conn, index int, vlan function.VLAN) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.ParentIndex, attrs.MTU = vlan.Name, index, vlan.MTU
	err := pod.library(func(h *netlink.Handle) error {
		return h.LinkAdd(&netlink.Vlan{LinkAttrs: attrs, VlanId: vlan.Tag})
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("the node's kernel has no VLANs (CONFIG_VLAN_8021Q, module 8021q), or the "+
			"driver takes none: %w", err)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}

	made, findErr := pod.LinkByName(vlan.Name)
	if findErr != nil {
		return errors.Join(err, findErr)
	}
	// The interface exists if an address was refused for a moment, and the step is repeated.
	v, isVLAN := made.(*netlink.Vlan)
	if !isVLAN || v.ParentIndex != index || v.VlanId != vlan.Tag {
		return fmt.Errorf("the pod has another %s of this name: %w", made.Type(), unix.EEXIST)
	}

	above := v.Index
	for _, address := range vlan.Addresses {
		if err := e.address(pod, above, vlan.Name, address); err != nil {
			return fmt.Errorf("address %s: %w", address, err)
		}
	}
	e.announceItself(pod, above, vlan.Name, vlan.Addresses)

	return pod.set(above, unix.IFF_UP, unix.IFF_UP)
}
