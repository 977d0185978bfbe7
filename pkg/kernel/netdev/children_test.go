// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"testing"

	"github.com/vishvananda/netlink"
)

// TestIsStacked covers which netdevs count as stacked on the netdev with index 7.
func TestIsStacked(t *testing.T) {
	const index = 7
	ofDevice := netlink.LinkAttrs{ParentDev: "0000:3b:00.2", NetNsID: -1}
	for name, test := range map[string]struct {
		link  netlink.Link
		isPod bool
		want  bool
	}{
		"child of InfiniBand": {
			link: &netlink.IPoIB{LinkAttrs: netlink.LinkAttrs{ParentIndex: index, NetNsID: -1}},
			want: true,
		},
		"child of another one": {
			link: &netlink.IPoIB{LinkAttrs: netlink.LinkAttrs{ParentIndex: 8, NetNsID: -1}},
		},
		"child with a parent elsewhere": {
			link: &netlink.IPoIB{LinkAttrs: netlink.LinkAttrs{ParentIndex: index, NetNsID: 1}},
		},
		// The kernel gives the netdev of a VF the same kind as its children.
		"another InfiniBand VF in the pod": {link: &netlink.IPoIB{LinkAttrs: ofDevice}, isPod: true},
		"another InfiniBand VF":            {link: &netlink.IPoIB{LinkAttrs: ofDevice}},
		"of unknown parent in the pod": {
			link: &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{NetNsID: -1}}, isPod: true, want: true,
		},
		"of unknown parent on the host": {
			link: &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{NetNsID: -1}},
		},
		"no such kind": {
			link: &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{ParentIndex: index, NetNsID: -1}},
		},
	} {
		if got := isStacked(test.link, test.isPod, index, ownNamespace); got != test.want {
			t.Errorf("%s: %t, want %t", name, got, test.want)
		}
	}
}
