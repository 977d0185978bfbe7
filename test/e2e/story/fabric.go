// SPDX-License-Identifier: Apache-2.0

package story

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// fabric is the network between the xPUs: a switch that is also a VTEP and a router, like a leaf of
// a data center's fabric. It is in the cluster's network namespace, which routes between nodes and
// pods.
type fabric struct {
	links *netlink.Handle
	ns    vnetns.NsHandle
}

// The fabric's underlay, from which VXLAN packets are sent.
const (
	fabricBridge  = "fabric"
	fabricAddress = "192.168.77.254/24"
	underlayMTU   = 1500
)

func newFabric(cluster Cluster) (*fabric, error) {
	ns, err := vnetns.GetFromPath(cluster.NetNS)
	if err != nil {
		return nil, err
	}

	links, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}

	f := &fabric{links, ns}
	// Without a querier, an IGMP-snooping bridge would forget the receivers of a VXLAN's group.
	snooping := false
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: fabricBridge, MTU: underlayMTU},
		MulticastSnooping: &snooping}
	if err := f.add(bridge, fabricAddress); err != nil {
		return nil, errors.Join(err, f.close())
	}

	return f, nil
}

func (f *fabric) close() error {
	f.links.Close()
	return f.ns.Close()
}

// add creates a link with an address, and sets it up.
func (f *fabric) add(link netlink.Link, address string) error {
	a, err := netlink.ParseAddr(address)
	if err != nil {
		return err
	}
	if err := f.links.LinkAdd(link); err != nil {
		return fmt.Errorf("%s of the fabric: %w", link.Attrs().Name, err)
	}
	return errors.Join(f.links.AddrAdd(link, a), f.links.LinkSetUp(link))
}

// plug connects the uplink of an xPU.
func (f *fabric) plug(x *xpu, address string) error {
	bridge, err := f.links.LinkByName(fabricBridge)
	if err != nil {
		return err
	}

	port := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{
			Name: "up-" + x.node.Name, MTU: underlayMTU, MasterIndex: bridge.Attrs().Index,
		},
		PeerName: "uplink", PeerNamespace: netlink.NsFd(x.ns), PeerMTU: underlayMTU,
	}

	if err := f.links.LinkAdd(port); err != nil {
		return fmt.Errorf("uplink of xPU %s: %w", x.node.Name, err)
	}

	return errors.Join(f.links.LinkSetUp(port), x.setUp("uplink", address))
}

// route makes the fabric the router of a VXLAN segment. The address has a prefix length. Nodes and
// pods can reach the segment, and the segment can reach them.
func (f *fabric) route(vni int, address string) error {
	bridge, err := f.links.LinkByName(fabricBridge)
	if err != nil {
		return err
	}
	return f.add(&netlink.Vxlan{
		LinkAttrs: netlink.LinkAttrs{Name: segmentName(vni), MTU: underlayMTU - 50},
		VxlanId:   vni, VtepDevIndex: bridge.Attrs().Index, Port: 4789, Learning: true,
		// the group that opi-bridge uses
		Group: net.IPv4(239, byte(vni>>16), byte(vni>>8), byte(vni)).To4(),
	}, address)
}

// unroute undoes route.
func (f *fabric) unroute(vni int) error {
	link, err := f.links.LinkByName(segmentName(vni))
	if err != nil {
		return err
	}
	return f.links.LinkDel(link)
}

func segmentName(vni int) string { return fmt.Sprintf("vxlan%d", vni) }
