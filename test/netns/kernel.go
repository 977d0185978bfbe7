// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
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

// String names the feature, with the option and the module of the kernel.
func (f Feature) String() string { return f.name }

// Try reports whether the kernel has the feature. It makes a netdev in the namespace, and leaves it
// there.
func (n *Namespace) Try(f Feature) (has bool, err error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "feature0"

	err = f.add(n.Handle(), attrs)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find out whether the kernel has %s: %w", f, err)
	}
	return true, nil
}

// Has reports whether the kernel has the feature.
func Has(t testing.TB, f Feature) bool {
	t.Helper()
	has, err := New(t).Try(f)
	if err != nil {
		t.Fatal(err)
	}
	return has
}

// Need skips the test where the kernel lacks one of the features. The guest simnic of test/qemu has
// them all.
func Need(t testing.TB, features ...Feature) {
	t.Helper()
	for _, f := range features {
		if !Has(t, f) {
			t.Skipf("the kernel has no %s", f)
		}
	}
}
