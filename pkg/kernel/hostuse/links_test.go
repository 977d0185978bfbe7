// SPDX-License-Identifier: Apache-2.0

package hostuse

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

// readerOf returns a reader with these links.
func readerOf(all ...netlink.Link) *reader {
	r := &reader{uses: map[int]string{}, defaults: map[int]bool{}}
	r.links = all
	r.readUses()
	return r
}

func attributes(name string, index, parent, master, peerNS int) netlink.LinkAttrs {
	a := netlink.NewLinkAttrs()
	a.Name, a.Index, a.ParentIndex, a.MasterIndex, a.NetNsID = name, index, parent, master, peerNS
	return a
}

// TestKindsOfLinks covers kinds of netdevs that not every kernel can create.
func TestKindsOfLinks(t *testing.T) {
	const here = -1
	vf := &netlink.Device{LinkAttrs: attributes("vf", 3, 0, 0, here)}
	port := func(master int) netlink.Link {
		return &netlink.Device{LinkAttrs: attributes("vf", 3, 0, master, here)}
	}
	program := &netlink.Device{LinkAttrs: attributes("vf", 3, 0, 0, here)}
	program.Xdp = &netlink.LinkXdp{Attached: true, ProgId: 41}

	for name, test := range map[string]struct {
		links []netlink.Link
		want  string
	}{
		"VLAN": {
			[]netlink.Link{vf, &netlink.Vlan{LinkAttrs: attributes("vf.7", 9, 3, 0, here)}},
			"carries vlan vf.7",
		},
		"VLAN of another netdev": {
			[]netlink.Link{vf, &netlink.Vlan{LinkAttrs: attributes("eth0.7", 9, 2, 0, here)}}, "",
		},
		"VLAN on a netdev of another namespace with that index": {
			[]netlink.Link{vf, &netlink.Vlan{LinkAttrs: attributes("v7", 9, 3, 0, 0)}}, "",
		},
		"GRE": {
			[]netlink.Link{
				vf, &netlink.Gretap{
					LinkAttrs: attributes("gre1", 9, 3, 0, here),
					Local:     net.IPv4(192, 0, 2, 1).To4(),
				},
			}, "carries gretap gre1",
		},
		"IPVLAN": {
			[]netlink.Link{vf, &netlink.IPVlan{LinkAttrs: attributes("ipv0", 9, 3, 0, here)}},
			"carries ipvlan ipv0",
		},
		"other end of a pair": {
			[]netlink.Link{vf, &netlink.Veth{LinkAttrs: attributes("peer", 9, 3, 0, here)}}, "",
		},
		"bond": {
			[]netlink.Link{port(9), &netlink.Bond{LinkAttrs: attributes("bond0", 9, 0, 0, here)}},
			"is a port of bond bond0",
		},
		"VRF": {[]netlink.Link{port(9), &netlink.Vrf{LinkAttrs: attributes("red", 9, 0, 0, here)}},
			"is a port of vrf red"},
		"OVS": {
			[]netlink.Link{
				port(9), &netlink.GenericLink{
					LinkAttrs: attributes("ovs-system", 9, 0, 0, here), LinkType: "openvswitch",
				},
			},
			"is a port of openvswitch ovs-system",
		},
		"master that is not shown": {
			[]netlink.Link{port(9)}, "is a port of the netdev with index 9",
		},
		"XDP": {[]netlink.Link{program}, "has XDP program 41"},
		"synthetic netdev of a VF": {[]netlink.Link{
			port(9), &netlink.Device{LinkAttrs: attributes("eth0", 9, 0, 0, here)},
		},
			"is a port of device eth0"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := readerOf(test.links...).netdevs()["vf"].Use; got != test.want {
				t.Errorf("the netdev %q, want %q", got, test.want)
			}
		})
	}
}
