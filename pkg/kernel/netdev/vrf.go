// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"cmp"
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
// netdev must not have addresses yet, because IPv6 addresses are lost when it joins. The lock keeps
// this program from deleting the VRF in between. A program of the pod may do that, so that a VRF
// that has vanished is made once more.
func (e *Engine) joinVRF(pod *conn, index int, vrf *function.VRF) error {
	e.masters.Lock()
	defer e.masters.Unlock()

	err := e.tryVRF(pod, index, vrf)
	if errors.Is(err, errVanished) {
		err = e.tryVRF(pod, index, vrf)
	}
	return err
}

// errVanished says that a VRF was deleted before the netdev was a port of it.
var errVanished = errors.New("it was deleted by another program at this moment")

func (e *Engine) tryVRF(pod *conn, index int, vrf *function.VRF) error {
	there, err := pod.LinkByName(vrf.Name)
	if errors.Is(err, links.ErrNotFound) {
		there, err = e.makeVRF(pod, vrf)
	}
	if err != nil {
		return err
	}
	if v, isVRF := there.(*netlink.Vrf); !isVRF || v.Table != uint32(vrf.Table) {
		return fmt.Errorf("the pod has another %s of this name: %w", there.Type(), unix.EEXIST)
	}

	e.trace("join VRF " + vrf.Name)
	master := there.Attrs().Index
	err = errors.Join(
		pod.set(master, unix.IFF_UP, unix.IFF_UP),
		pod.set(index, 0, 0, number(unix.IFLA_MASTER, master)),
	)

	// The kernel refuses the index of a netdev that is gone by EINVAL (do_set_master of
	// net/core/rtnetlink.c), and makes a port of one that goes then free again.
	if l, gone := pod.at(master); gone == nil && l == nil {
		return fmt.Errorf("%w: %w", errVanished, cmp.Or[error](err, unix.ENODEV))
	}
	return err
}

// makeVRF makes a VRF. Another program may make it at the same time, or delete it again, which is
// errVanished.
func (e *Engine) makeVRF(pod *conn, vrf *function.VRF) (netlink.Link, error) {
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

	e.trace("find VRF " + vrf.Name)
	made, err := pod.LinkByName(vrf.Name)
	if errors.Is(err, links.ErrNotFound) {
		return nil, errVanished
	}
	return made, err
}

// dropVRF removes a VRF of this program that has no ports any more. The netdev must have left it. A
// VRF that stays is a note, because it affects nobody but this pod.
//
// The rule for the traffic of VRFs stays (priority 1000, "l3mdev"). The kernel adds it with the
// first VRF of a network namespace, and never again (vrf_newlink of drivers/net/vrf.c), so that
// without it no later VRF of the pod would work. Without a VRF it matches nothing.
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
