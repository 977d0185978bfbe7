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

	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// makeAlone returns once nothing is stacked on a netdev of the host, in whatever namespace. A pod
// may move what it made on its netdev to another namespace, or make it there. The kernel lists it
// only there, and a namespace that only a file descriptor holds is found by nothing. So a BPF
// program looks at the netdev itself. Without that, the kernel is asked whether the netdev takes
// what it can take only when nothing is stacked on it. place is where the pod was.
func (e *Engine) makeAlone(
	ctx context.Context, l *link, place Place, rebinding *Rebinding,
) error {
	on, err := e.stackedAnywhere(ctx, l)
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

// stackedAnywhere says what is stacked on a netdev of the host, "" for nothing.
func (e *Engine) stackedAnywhere(ctx context.Context, l *link) (string, error) {
	on, certain, err := e.onTop(l)
	if on != "" || certain || err != nil {
		return on, err
	}
	return e.tagged(ctx, l)
}

// onTop says what is on top of a netdev of the host, "" for nothing. If it is not certain, a VLAN
// may be there all the same.
func (e *Engine) onTop(l *link) (on string, certain bool, err error) {
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

// probes are made on netdevs to see what is stacked on them. They are made in a namespace of their
// own, in which their name is taken: the kernel looks at the lower netdev before it refuses them.
type probes struct {
	mutex sync.Mutex
	ns    netns.NsHandle
	name  string // "" before the first probe
}

// place makes the namespace at the first call.
func (p *probes) place() (ns netns.NsHandle, name string, err error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()

	if p.name != "" {
		return p.ns, p.name, nil
	}
	if ns, err = namespace.New(); err != nil {
		return ns, "", err
	}

	own := &conn{ns: ns}
	if err = own.connect(); err == nil {
		const loopback = 1                             // its index in every namespace
		name = fmt.Sprintf("x%014x", rand.Uint64()>>8) // which the host does not have
		err = own.LinkAddAltName(reference(loopback), name)
		own.Handle.Close()
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

// handled says whether the netdev has a macvlan, or another netdev that takes its frames by a
// handler (rx_handler), as all but VLANs do. A macvlan of mode passthru must be the only one, and a
// netdev has one handler (macvlan_common_newlink of drivers/net/macvlan.c). The probe has a name
// that is taken, so that the kernel makes nothing.
func (e *Engine) handled(l *link) (string, error) {
	if l.linkType != unix.ARPHRD_ETHER {
		return "", nil // the kernel has no macvlans on others
	}

	ns, name, err := e.probes.place()
	if err != nil {
		return "", fmt.Errorf("namespace for probes: %w", err)
	}

	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("macvlan"))
	const passthru = 8 // MACVLAN_MODE_PASSTHRU
	info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.IFLA_MACVLAN_MODE, nl.Uint32Attr(passthru))
	// With NLM_F_EXCL, the kernel would look at the name first.
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

// noHandlers returns an error unless the kernel has no kind of netdev that takes frames of one in
// another namespace. It is for a kernel that has no macvlans, nor a module for them.
func (e *Engine) noHandlers() error {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("ipvlan"))
	const flags = unix.NLM_F_CREATE | unix.NLM_F_ACK
	// without a netdev below it
	_, err := request.Send(e.host.Socket(), unix.RTM_NEWLINK, flags, linkHeader(0), info)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}

	return errors.New("whether an ipvlan is on top of it cannot be seen without the kernel's " +
		"module macvlan: load it")
}

// tagged says whether the netdev has a VLAN. The kernel refuses a second one with the same number
// before it looks at the MTU, which is too large in these requests (vlan_newlink of
// net/8021q/vlan_netlink.c).
func (e *Engine) tagged(ctx context.Context, l *link) (string, error) {
	if _, err := os.Stat("/proc/net/vlan"); errors.Is(err, fs.ErrNotExist) {
		return "", nil // the kernel has no VLANs, or has not loaded them
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

// taggedAs is tagged for one protocol.
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
		case errors.Is(err, unix.EOPNOTSUPP): // of this netdev or this protocol
		case !errors.Is(err, unix.EINVAL):
			return "", fmt.Errorf("ask whether VLAN %d is on top of it: %w", id, err)
		}
	}

	return "", nil
}

// probeMTU is the largest MTU that the kernel compares with that of the netdev below.
const probeMTU = 65535

// vlanProbe asks for a VLAN that the kernel does not make.
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

// dropEverywhere deletes what is stacked on a netdev of the host, in all namespaces that are found:
// the host's, those that have a name beside the pod's, and those of all processes.
func (e *Engine) dropEverywhere(ctx context.Context, index int, place Place) error {
	errs := []error{e.dropStacked(ctx, e.host, index, ownNamespace)}
	seen := map[[2]uint64]bool{}
	for _, path := range e.namespaces(place) {
		var stat unix.Stat_t
		if unix.Stat(path, &stat) != nil || seen[[2]uint64{stat.Dev, stat.Ino}] {
			continue
		}

		seen[[2]uint64{stat.Dev, stat.Ino}] = true
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		errs = append(errs, e.dropThere(ctx, path, index))
	}

	return errors.Join(errs...)
}

// namespaces are the paths of network namespaces, of which several may mean the same one.
func (e *Engine) namespaces(place Place) []string {
	patterns := []string{"/run/netns/*", filepath.Join(e.procRoot, "[0-9]*/ns/net")}
	if place.NetNS != "" {
		patterns = append(patterns, filepath.Join(filepath.Dir(place.NetNS), "*"))
	}

	var paths []string
	for _, pattern := range patterns {
		found, _ := filepath.Glob(pattern)
		paths = append(paths, found...)
	}

	return paths
}

// dropThere deletes what is stacked on a netdev of the host in the namespace at the path, which may
// end meanwhile.
func (e *Engine) dropThere(ctx context.Context, path string, index int) error {
	there, err := dial(path)
	if err != nil || there.cookie == e.host.cookie {
		there.close()
		return nil
	}
	defer there.close()

	// the kernel gives the host an id when it lists what is above its netdevs
	if _, err := there.LinkList(); err != nil {
		return err
	}

	host, err := there.GetNetNsIdByFd(int(e.host.ns))
	if err != nil || host == ownNamespace {
		return err
	}

	return e.dropStacked(ctx, there, index, host)
}
