// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// makeAlone deletes the netdevs that are stacked on a netdev of the host, in any network namespace,
// and returns nil once none is left. place is where the pod was.
//
// A pod may create a netdev on top of its own one in another namespace, or move it there. The
// kernel lists such an upper netdev only in its namespace, and a namespace that only a file
// descriptor holds cannot be found. Therefore a BPF program looks at the lower netdev itself: see
// [uppers]. If the kernel cannot run this program, the Engine sends probes, whose answers say
// whether something is stacked on the netdev: see [probes].
//
// If an upper netdev remains because its namespace cannot be found, makeAlone binds the driver of a
// hardware netdev again. This destroys the netdev and all netdevs on top of it, so that makeAlone
// returns [ErrGone].
func (e *Engine) makeAlone(
	ctx context.Context, l *link, place Place, rebinding *Rebinding,
) error {
	on, err := e.stackedAnywhere(ctx, l)
	if err == nil && on == "" && l.infiniBand() {
		// Nothing shows child interfaces in other namespaces: see [Engine.onTop].
		return e.dropEverywhere(ctx, l.Identity.Index, place)
	}
	if on == "" || err != nil {
		return err
	}

	searchErr := e.dropEverywhere(ctx, l.Identity.Index, place)
	if on, err = e.stackedAnywhere(ctx, l); on == "" || err != nil {
		return errors.Join(err, ctx.Err())
	}

	left := fmt.Errorf("%s is on top of it in a network namespace that is not found, made by the "+
		"pod: %w", on, ErrLeaks)
	if ctx.Err() != nil {
		return errors.Join(searchErr, ctx.Err())
	}
	if !l.Identity.IsHardware() || rebinding == nil {
		return errors.Join(left, searchErr)
	}

	if err := e.rebind(ctx, l.Identity, rebinding.Intend); err != nil {
		return errors.Join(left, searchErr, fmt.Errorf("bind its driver again: %w", err))
	}

	return fmt.Errorf("netdev %s is registered anew: %w", l.Name, ErrGone)
}

// stackedAnywhere returns what is stacked on a netdev of the host, in any namespace, or "" for
// nothing.
func (e *Engine) stackedAnywhere(ctx context.Context, l *link) (string, error) {
	on, certain, err := e.onTop(l)
	if on != "" || certain || err != nil {
		return on, err
	}
	return e.tagged(ctx, l)
}

// onTop returns what is stacked on a netdev of the host, or "" for nothing. If certain is false, a
// VLAN may be stacked on it although onTop returns "".
//
// The kernel's list of upper netdevs does not have the child interfaces of an InfiniBand netdev. They
// are seen in the namespace of the host only.
func (e *Engine) onTop(l *link) (on string, certain bool, err error) {
	if l.infiniBand() {
		children, err := stackedOn(e.host, l.Identity.Index, ownNamespace)
		if err != nil || len(children) > 0 {
			return firstOf(children), true, err
		}
	}

	has, known, err := e.upper(l)
	if err != nil || known && !has {
		return "", known, err
	}

	on, err = e.handled(l)
	if known && (on == "" || err != nil) {
		return "a VLAN or another netdev", true, nil
	}

	return on, known, err
}

// firstOf returns the kind and the name of the first netdev, or "" without netdevs.
func firstOf(netdevs []netlink.Link) string {
	if len(netdevs) == 0 {
		return ""
	}
	return netdevs[0].Type() + " " + netdevs[0].Attrs().Name
}

// probes is the network namespace in which probes are requested. A probe is a request for a netdev
// whose name is taken in this namespace. The kernel looks at the lower netdev before it looks at
// the name, so that its answer says what is stacked there, and refuses to create the probe in any
// case.
type probes struct {
	mutex sync.Mutex
	ns    netns.NsHandle
	name  string // "" before the first probe
}

// place returns the namespace and the name that is taken in it. It creates the namespace at the
// first call.
func (p *probes) place() (ns netns.NsHandle, name string, err error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	if p.name != "" {
		return p.ns, p.name, nil
	}
	if ns, err = namespace.New(); err != nil {
		return ns, "", err
	}

	own, err := links.Library(ns)
	if err == nil {
		const loopback = 1                             // ifindex of lo in every namespace
		name = fmt.Sprintf("x%014x", rand.Uint64()>>8) // random, so that the host does not use it
		err = own.LinkAddAltName(reference(loopback), name)
		own.Close()
	}

	if err != nil {
		_ = ns.Close()
		return ns, "", err
	}

	p.ns, p.name = ns, name
	return ns, name, nil
}

func (p *probes) close() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.name != "" {
		_ = p.ns.Close()
		p.name = ""
	}
}

// handled returns what takes the frames of the netdev by a handler (rx_handler), such as a macvlan,
// or "" for nothing. All kinds of upper netdevs have such a handler, except for VLANs.
//
// The probe is a macvlan of mode passthru. The kernel refuses it unless it would be the only
// macvlan and the netdev has no other handler, because a netdev has only one
// (macvlan_common_newlink of drivers/net/macvlan.c). The name of the probe is taken, so that the
// kernel never creates it.
func (e *Engine) handled(l *link) (string, error) {
	if l.linkType != unix.ARPHRD_ETHER {
		return "", nil // other types of netdevs cannot have macvlans
	}

	ns, name, err := e.probes.place()
	if err != nil {
		return "", fmt.Errorf("namespace for probes: %w", err)
	}

	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("macvlan"))
	const passthru = 8 // MACVLAN_MODE_PASSTHRU
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(passthru))
	// NLM_F_EXCL is missing, because with it the kernel would look at the name first.
	const flags = unix.NLM_F_CREATE | unix.NLM_F_ACK
	_, err = request.Send(e.host.Socket(), unix.RTM_NEWLINK, flags, linkHeader(0),
		text(unix.IFLA_IFNAME, name), number(unix.IFLA_LINK, l.Identity.Index),
		number(unix.IFLA_NET_NS_FD, int(ns)), info)
	switch {
	case errors.Is(err, unix.EEXIST):
		return "", nil
	case errors.Is(err, unix.EINVAL):
		return "a macvlan or macvtap", nil
	case errors.Is(err, unix.EBUSY):
		return "an ipvlan, or another netdev that takes its frames,", nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return "", e.noHandlers()
	case err == nil:
		return "", fmt.Errorf("the kernel made a probe whose name %s is taken", name)
	}

	return "", fmt.Errorf("ask whether a macvlan is on top of it: %w", err)
}

// noHandlers returns nil if the kernel also lacks ipvlans, because then no upper netdev can be in
// another namespace. It is called if the kernel has neither macvlans nor a module for them.
func (e *Engine) noHandlers() error {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("ipvlan"))
	const flags = unix.NLM_F_CREATE | unix.NLM_F_ACK
	// The request names no lower netdev, so that the kernel creates nothing.
	_, err := request.Send(e.host.Socket(), unix.RTM_NEWLINK, flags, linkHeader(0), info)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}

	return errors.New("whether an ipvlan is on top of it cannot be seen without the kernel's " +
		"module macvlan: load it")
}

// tagged returns a VLAN that is stacked on the netdev, or "" if there is none.
//
// It requests a VLAN for each number, with an MTU that is too large. The kernel refuses a number
// that is in use before it looks at the MTU (vlan_newlink of net/8021q/vlan_netlink.c).
func (e *Engine) tagged(ctx context.Context, l *link) (string, error) {
	if _, err := os.Stat("/proc/net/vlan"); errors.Is(err, fs.ErrNotExist) {
		return "", nil // the kernel has no VLANs, or has not loaded the module
	}
	if l.MTU >= probeMTU {
		return "", fmt.Errorf("MTU %d: must be below %d, so that VLANs on top of it can be found",
			l.MTU, probeMTU)
	}

	for _, protocol := range []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD} {
		if on, err := e.taggedAs(ctx, l.Identity.Index, protocol); on != "" || err != nil {
			return on, err
		}
	}

	return "", nil
}

// taggedAs does the work of tagged for one protocol.
func (e *Engine) taggedAs(ctx context.Context, index int, protocol uint16) (string, error) {
	const count = 4095
	messages := make([]request.Message, count)
	for id := range messages {
		messages[id] = vlanProbe(index, protocol, uint16(id))
	}

	for id, err := range request.SendAll(ctx, e.host.Socket(), messages) {
		switch {
		case errors.Is(err, unix.EEXIST):
			return fmt.Sprintf("a VLAN %d", id), nil
		case errors.Is(err, unix.EOPNOTSUPP): // the netdev or the protocol does not support VLANs
		case !errors.Is(err, unix.EINVAL):
			return "", fmt.Errorf("ask whether VLAN %d is on top of it: %w", id, err)
		}
	}

	return "", nil
}

// probeMTU is the largest MTU that the kernel compares with the MTU of the lower netdev.
const probeMTU = 65535

// vlanProbe returns a request for a VLAN that the kernel always refuses.
func vlanProbe(index int, protocol, id uint16) request.Message {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("vlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_VLAN_ID, nl.Uint16Attr(id))
	data.AddRtAttr(nl.IFLA_VLAN_PROTOCOL, []byte{byte(protocol >> 8), byte(protocol)})

	return request.Message{
		Type: unix.RTM_NEWLINK, Flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL, Header: linkHeader(0),
		Attributes: []*nl.RtAttr{
			number(unix.IFLA_LINK, index), number(unix.IFLA_MTU, probeMTU), info,
		},
	}
}

// dropEverywhere deletes what is stacked on a netdev of the host in all namespaces that can be
// found: the namespace of the host, named namespaces beside the one of the pod, and the namespaces
// of all processes.
func (e *Engine) dropEverywhere(ctx context.Context, index int, place Place) error {
	errs := []error{e.dropStacked(ctx, e.host, index, ownNamespace)}
	for _, path := range e.namespaces(place) {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, e.dropThere(ctx, path, index))
	}

	return errors.Join(errs...)
}

// namespaces returns paths of network namespaces, each of another one.
func (e *Engine) namespaces(place Place) (paths []string) {
	patterns := []string{"/run/netns/*", filepath.Join(e.procRoot, "[0-9]*/ns/net")}
	if place.NetNS != "" {
		patterns = append(patterns, filepath.Join(filepath.Dir(place.NetNS), "*"))
	}

	seen := map[[2]uint64]bool{}
	for _, pattern := range patterns {
		found, _ := filepath.Glob(pattern)
		for _, path := range found {
			var stat unix.Stat_t
			if unix.Stat(path, &stat) != nil || seen[[2]uint64{stat.Dev, stat.Ino}] {
				continue
			}
			seen[[2]uint64{stat.Dev, stat.Ino}] = true
			paths = append(paths, path)
		}
	}

	return paths
}

// dropThere deletes what is stacked on a netdev of the host in the namespace at the path. The
// namespace may end meanwhile.
func (e *Engine) dropThere(ctx context.Context, path string, index int) error {
	there, err := dial(path)
	if err != nil || there.cookie == e.host.cookie {
		there.close()
		return nil
	}
	defer there.close()

	// The kernel assigns an id to the host's namespace when it lists a netdev here whose lower
	// netdev is on the host.
	if _, err := there.LinkList(); err != nil {
		return err
	}

	var host int
	err = there.library(func(h *netlink.Handle) error {
		host, err = h.GetNetNsIdByFd(int(e.host.ns))
		return err
	})
	if err != nil || host == ownNamespace {
		return err
	}

	return e.dropStacked(ctx, there, index, host)
}
