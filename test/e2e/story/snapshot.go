package story

import (
	"context"
	"errors"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// Snapshot is everything that a pod's life may touch and must leave as it was.
type Snapshot struct {
	// Netdevs are those of the nodes' PFs and VFs: "node1/ens1f0v3" and what they are.
	Netdevs map[string]Netdev
	// Representors are those on the xPUs, with the bridge that each is a port of.
	Representors map[string]string
	// Devices are what the ResourceSlices offer, by pool.
	Devices map[string][]resourceapi.Device
	// SliceVersions are the resource versions of the slices: nobody may even have written them.
	SliceVersions map[string]string
	// Ports and Claims are the names of what should not be there any more.
	Ports, Claims []string
}

// Netdev is what the kernel tells of a netdev that someone may have changed.
type Netdev struct {
	MAC      string
	MTU      int
	Up       bool
	Alias    string
	AltNames []string
	Addrs    []string
}

// snapshot looks at nodes, xPUs and API server.
func (w *World) snapshot(ctx context.Context) (Snapshot, error) {
	s := Snapshot{
		Netdevs: map[string]Netdev{}, Representors: map[string]string{},
		Devices: map[string][]resourceapi.Device{}, SliceVersions: map[string]string{},
	}
	for _, x := range w.xpus {
		if err := errors.Join(s.addNode(x.node), s.addXPU(x)); err != nil {
			return Snapshot{}, err
		}
	}
	var slicesList resourceapi.ResourceSliceList
	var ports v1alpha1.XPUPortList
	var claims resourceapi.ResourceClaimList
	if err := errors.Join(w.client.List(ctx, &slicesList), w.client.List(ctx, &ports), w.client.List(ctx, &claims, client.InNamespace("default"))); err != nil {
		return Snapshot{}, err
	}
	for _, slice := range slicesList.Items {
		s.Devices[slice.Spec.Pool.Name] = append(s.Devices[slice.Spec.Pool.Name], slice.Spec.Devices...)
		s.SliceVersions[slice.Name] = slice.ResourceVersion
	}
	for _, port := range ports.Items {
		s.Ports = append(s.Ports, port.Namespace+"/"+port.Name)
	}
	for _, claim := range claims.Items {
		s.Claims = append(s.Claims, claim.Name)
	}
	return s, nil
}

func (s Snapshot) addNode(node Node) error {
	ns, err := netns.GetFromPath(node.NetNS)
	if err != nil {
		return err
	}
	defer ns.Close()
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		a := l.Attrs()
		if !strings.HasPrefix(a.Name, cardName) {
			continue
		}
		addrs, err := handle.AddrList(l, unix.AF_INET)
		if err != nil {
			return err
		}
		n := Netdev{MAC: a.HardwareAddr.String(), MTU: a.MTU, Up: a.RawFlags&unix.IFF_UP != 0, Alias: a.Alias, AltNames: a.AltNames}
		for _, address := range addrs {
			n.Addrs = append(n.Addrs, address.IPNet.String())
		}
		s.Netdevs[node.Name+"/"+a.Name] = n
	}
	return nil
}

// cardName begins the names of all netdevs of the simulated card, which is in slot 3b. One that came back from a pod
// under another name is missed.
const cardName = "enp59s0f"

func (s Snapshot) addXPU(x *xpu) error {
	links, err := x.links.LinkList()
	if err != nil {
		return err
	}
	names := map[int]string{0: "no bridge"}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	for _, l := range links {
		if l.Type() == "veth" {
			s.Representors[x.node.Name+"/"+l.Attrs().Name] = names[l.Attrs().MasterIndex]
		}
	}
	return nil
}

// Diff says what is no longer as it was, "" if nothing is.
func (s Snapshot) Diff(now Snapshot) string { return cmp.Diff(s, now) }
