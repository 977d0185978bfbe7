// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// podGroup marks the VRFs and bonds that this program makes in pods (IFLA_GROUP). The bytes are
// "xpu".
const podGroup = 0x787075

// joinVRF makes the netdev a port of the VRF, and makes the VRF if the pod does not have it. The
// netdev must not have addresses yet, because IPv6 addresses are lost when it joins.
func (e *Engine) joinVRF(pod *conn, index int, vrf *function.VRF) error {
	e.masters.Lock()
	defer e.masters.Unlock()

	there, err := pod.LinkByName(vrf.Name)
	if errors.Is(err, links.ErrNotFound) {
		there, err = makeVRF(pod, vrf)
	}
	if err != nil {
		return err
	}

	if v, isVRF := there.(*netlink.Vrf); !isVRF || v.Table != uint32(vrf.Table) {
		return fmt.Errorf("the pod has another %s of this name: %w", there.Type(), unix.EEXIST)
	}

	return errors.Join(
		pod.set(there.Attrs().Index, unix.IFF_UP, unix.IFF_UP),
		pod.set(index, 0, 0, number(unix.IFLA_MASTER, there.Attrs().Index)),
	)
}

// makeVRF makes a VRF. Another program may make it at the same time.
func makeVRF(pod *conn, vrf *function.VRF) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Group = vrf.Name, podGroup
	err := pod.library(func(h *netlink.Handle) error {
		return h.LinkAdd(&netlink.Vrf{LinkAttrs: attrs, Table: uint32(vrf.Table)})
	})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, fmt.Errorf("the node's kernel has no VRFs (CONFIG_NET_VRF, module vrf): %w", err)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, err
	}

	return pod.LinkByName(vrf.Name)
}

// dropVRF removes a VRF of this program that has no ports any more. The netdev must have left it. A
// VRF that stays is a note, because it affects nobody but this pod.
func (e *Engine) dropVRF(pod *conn, vrf *function.VRF) (notes []string) {
	e.masters.Lock()
	defer e.masters.Unlock()

	err := e.step("remove VRF "+vrf.Name, func() error {
		return dropEmpty(pod, vrf.Name, func(l netlink.Link) bool {
			v, isVRF := l.(*netlink.Vrf)
			return isVRF && v.Table == uint32(vrf.Table)
		})
	})
	if err != nil && !errors.Is(err, errStays) {
		notes = append(notes, fmt.Sprintf("VRF stays in the pod: %v", err))
	}

	return notes
}
