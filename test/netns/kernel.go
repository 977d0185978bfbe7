// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Feature is something that a kernel may have been built without.
type Feature struct {
	// name says what is missing, and which option of the kernel and which module it needs.
	name string
	// add makes a netdev that only a kernel with the feature can make.
	add func(h *netlink.Handle, attrs netlink.LinkAttrs) error
}

// VRFs are netdevs of kind vrf.
func VRFs() Feature {
	return Feature{"VRFs (CONFIG_NET_VRF, module vrf)",
		func(h *netlink.Handle, a netlink.LinkAttrs) error {
			return h.LinkAdd(&netlink.Vrf{LinkAttrs: a, Table: 1000})
		}}
}

// Bonds are netdevs of kind bond.
func Bonds() Feature {
	return Feature{"bonds (CONFIG_BONDING, module bonding)",
		func(h *netlink.Handle, a netlink.LinkAttrs) error {
			return h.LinkAdd(netlink.NewLinkBond(a))
		}}
}

// VLANs are netdevs of kind vlan.
func VLANs() Feature {
	return Feature{"VLANs (CONFIG_VLAN_8021Q, module 8021q)",
		func(h *netlink.Handle, a netlink.LinkAttrs) error {
			below := netlink.NewLinkAttrs()
			below.Name = "below0"
			if err := h.LinkAdd(&netlink.Bridge{LinkAttrs: below}); err != nil {
				return err
			}
			parent, err := h.LinkByName(below.Name)
			if err != nil {
				return err
			}
			a.ParentIndex = parent.Attrs().Index
			return h.LinkAdd(&netlink.Vlan{LinkAttrs: a, VlanId: 1})
		}}
}

// VLANFiltering is the filter for VLANs of a bridge.
func VLANFiltering() Feature {
	return Feature{"bridges that filter VLANs (CONFIG_BRIDGE_VLAN_FILTERING)",
		func(h *netlink.Handle, a netlink.LinkAttrs) error {
			return h.LinkAdd(&netlink.Bridge{LinkAttrs: a, VlanFiltering: new(true)})
		}}
}

// Has reports whether the kernel has the feature.
func Has(t testing.TB, f Feature) bool {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "feature0"

	err := f.add(New(t).Handle(), attrs)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		t.Fatalf("find out whether the kernel has %s: %v", f.name, err)
	}
	return err == nil
}

// Need skips the test where the kernel lacks one of the features. The guest simnic of test/qemu has
// them all.
func Need(t testing.TB, features ...Feature) {
	t.Helper()
	for _, f := range features {
		if !Has(t, f) {
			t.Skipf("the kernel has no %s", f.name)
		}
	}
}
