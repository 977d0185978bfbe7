// SPDX-License-Identifier: Apache-2.0

// Package netdev moves a netdev into the network namespace of a pod, and back with all its
// properties. It is the netlink part of an Attachment, and knows neither Kubernetes nor the
// journal.
//
// An attachment consists of three steps:
//
//	Plan (look, change nothing) -> Attach (move, configure) -> Restore (move back, undo, verify)
//
// Restore needs only the values that Plan returns. A caller that records these values durably
// before Attach can undo an attachment that was interrupted at any point. Restore may be called in
// any state and as often as needed.
package netdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// Options configures an [Engine]. The zero value suits a process in the host's network namespace.
type Options struct {
	HostNetNS string // path of the host's network namespace, "" for the namespace of this process
	// ProcRoot is the path where procfs is mounted, "" for "/proc". Container runtimes may name a
	// network namespace by a process in this procfs. If sys/net below it is writable, the IPv6
	// sysctls of netdevs are restored.
	ProcRoot string
	// SysRoot is the path where sysfs is mounted, "" for "/sys". Settings of queues are restored
	// only if this sysfs shows the netdevs of the host's network namespace. A mount shows the
	// netdevs of the namespace in which it was made.
	SysRoot   string
	Eswitches Eswitches // limit the rates of Functions; nil if no eswitch does
	// Trace is called before each change and each wait, on the goroutine that called the Engine. It
	// may be nil.
	Trace func(step string)
}

// Engine changes netdevs. Several goroutines may use it at once, each for another netdev.
type Engine struct {
	host      *conn
	procRoot  string
	sysRoot   string
	ethtool   *ethtool.Conn // in the host's namespace
	rdma      rdmaSystem
	settings  []settingGroup
	eswitches Eswitches // nil if no eswitch limits rates
	uppers    uppers
	tcx       *tcxLister
	probes    probes
	planned   handover
	trace     func(step string)
	// masters is held while a netdev joins a VRF or a bond, and while one without ports is deleted.
	// Otherwise a netdev could join one that is about to be deleted.
	masters sync.Mutex

	pfs pfPort
	// set changes a netdev, as [conn.set] does. busyTime limits how long a call waits for busy
	// drivers, and settleTime how long it waits for an accepted value to be in effect. Tests
	// replace all three.
	set func(
		c *conn, index int, flags, mask uint32, attributes ...*nl.RtAttr,
	) error
	busyTime, settleTime time.Duration
}

// New returns an Engine for the host's network namespace. The caller closes the Engine.
func New(options Options) (*Engine, error) {
	// /proc/self would be the main thread, which other code of the process may have moved to
	// another namespace.
	path := cmp.Or(options.HostNetNS, "/proc/thread-self/ns/net")
	host, err := dial(path)
	if err != nil {
		return nil, fmt.Errorf("the host's %w", err)
	}

	e := &Engine{
		host: host, procRoot: cmp.Or(options.ProcRoot, "/proc"),
		sysRoot:   cmp.Or(options.SysRoot, "/sys"),
		eswitches: options.Eswitches, trace: options.Trace, rdma: rdma.System{},
		pfs: host, set: (*conn).set, busyTime: quirk.BusyPatience, settleTime: quirk.SettleTime,
	}

	e.settings = e.settingGroups()
	e.tcx = newTCXLister(e.procRoot)
	if e.trace == nil {
		e.trace = func(string) {}
	}

	err = namespace.Do(host.ns, func() error {
		host.conf6 = unix.Access(string(e.conf6Dir("default"))+"/forwarding", unix.W_OK) == nil
		return nil
	})

	if err == nil {
		e.ethtool, err = ethtool.Dial(host.ns)
	}
	if err != nil {
		_ = host.close()
		return nil, fmt.Errorf("the host's network namespace %s: %w", path, err)
	}

	return e, nil
}

// step traces a change, makes it, and adds its name to the error.
func (e *Engine) step(what string, change func() error) error {
	e.trace(what)
	if err := change(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Close releases the host's namespace.
func (e *Engine) Close() error {
	e.planned.close()
	e.uppers.close()
	e.probes.close()
	e.ethtool.Close()
	return e.host.close()
}

// Plan reads a netdev on the host and finds a place for it in the namespace at the path netNS. It
// changes nothing. It returns an error if it can foresee that [Engine.Attach] would fail.
func (e *Engine) Plan(
	ctx context.Context, device Device, netNS string, want function.Interface,
) (Snapshot, Place, error) {
	if err := want.Validate(); err != nil {
		return Snapshot{}, Place{}, err
	}

	before, settings, err := e.snapshot(ctx, device, want)
	defer settings()

	if err != nil {
		return Snapshot{}, Place{}, err
	}
	if err := enforceable(want.VF, device, before); err != nil {
		return Snapshot{}, Place{}, err
	}
	if want.Userspace && want.MAC != "" && before.VF == nil {
		return Snapshot{}, Place{}, fmt.Errorf("%s: has no PF that the MAC could be set with",
			before.title())
	}
	if before.RDMA, err = e.planRDMA(device.RDMA); err != nil {
		return Snapshot{}, Place{}, err
	}

	place, err := e.planPlace(before, netNS, want)
	if err != nil {
		return Snapshot{}, Place{}, err
	}

	before.Settings = settings()
	if err := e.checkDriver(before, want); err != nil {
		return Snapshot{}, Place{}, err
	}
	_, before.WritesTable = want.Ethtool[function.RSSGroup][function.RSSTable]

	return before, place, nil
}

// planPlace finds a place for a netdev in the namespace at the path. It keeps the connection to the
// namespace for the Attach that follows.
func (e *Engine) planPlace(
	before Snapshot, netNS string, want function.Interface,
) (place Place, err error) {
	pod, err := e.dial(netNS)
	if err != nil {
		return Place{}, err
	}

	defer func() {
		if err != nil {
			_ = pod.close()
			return
		}
		e.planned.give(place, pod, handoverTime)
	}()

	if pod.cookie == e.host.cookie {
		return Place{}, fmt.Errorf("network namespace %s: is the host's own", netNS)
	}

	place = Place{NetNS: netNS, Cookie: pod.cookie, Remains: remainsOf(want)}
	if want.Userspace {
		return place, nil
	}
	if err := nameFree(pod, want.Name); err != nil {
		return Place{}, err
	}
	for _, vlan := range want.VLANs {
		// Another name for the interface would not help, so that this is not ErrNameTaken.
		if err := nameFree(pod, vlan.Name); err != nil {
			return Place{}, fmt.Errorf("VLAN %d: %v", vlan.Tag, err)
		}
	}
	if err := checkBond(pod, want.Bond); err != nil {
		return Place{}, err
	}
	if err := checkRules(pod, want); err != nil {
		return Place{}, err
	}
	if place.Index, err = freeIndex(pod, before.Identity.Index); err != nil {
		return Place{}, fmt.Errorf("network namespace %s: %w", netNS, err)
	}

	return place, nil
}

// Snapshot reads a netdev on the host that is about to lose its driver. It changes nothing. The
// caller gives the snapshot to [Engine.Restore] without a place, once the driver has made a new
// netdev, which then gets the properties in the snapshot.
func (e *Engine) Snapshot(ctx context.Context, device Device) (Snapshot, error) {
	s, settings, err := e.snapshot(ctx, device, function.Interface{})
	s.Settings = settings()
	return s, err
}

// snapshot reads everything but the settings. It returns a function that waits for the settings and
// returns them. The caller must call this function even after an error. The settings are read at
// the same time, because they take as long as the rest.
//
// The eswitch is asked only if the pod wants a rate, because its answer takes longer.
func (e *Engine) snapshot(
	ctx context.Context, device Device, want function.Interface,
) (s Snapshot, settings func() Settings, err error) {
	settings = func() Settings { return nil }
	if !want.VF.Rated() {
		device.Port = nil
	}
	if want.Userspace {
		s, err = e.plan(ctx, s, device, want)
		return s, settings, err
	}

	l, err := e.host.named(device.Name)
	if err != nil {
		return s, settings, err
	}

	settings = e.startReading(l, e.settings)
	if err := e.checkUnused(l); err != nil {
		return s, settings, err
	}
	if want.MAC != "" && l.infiniBand() {
		return s, settings, fmt.Errorf("mac: netdev %s: %w", l.Name, function.ErrNoMAC)
	}

	s, err = e.plan(ctx, l.Snapshot, device, want)
	return s, settings, err
}

// checkUnused returns an error that says how the host uses a netdev, or nil if the host does not
// use it.
func (e *Engine) checkUnused(l *link) error {
	switch {
	case l.master != 0:
		return inUse(l.Name, fmt.Sprintf("as a port of the netdev with index %d", l.master))
	case l.Carried.XDP != "":
		return inUse(l.Name, "by XDP program "+l.Carried.XDP)
	}

	use, err := e.carriedOnHost(l)
	if use != "" {
		err = errors.Join(inUse(l.Name, "by "+use), err)
	}

	return err
}

// plan adds to the snapshot what the PF and the eswitch enforce before the attachment, and which of
// these properties the attachment changes.
func (e *Engine) plan(
	ctx context.Context, s Snapshot, device Device, want function.Interface,
) (Snapshot, error) {
	if device.PF != nil {
		r, err := e.baseline(ctx, device.PF, want)
		if err != nil {
			return Snapshot{}, err
		}
		if err := r.suits(want, device.PF); err != nil {
			return Snapshot{}, err
		}
		s.VF = r.vf
	}

	if s.VF != nil {
		s.Sets = &Sets{MAC: want.MAC != "", Rate: want.VF.Rated(), GUID: want.VF.Identified()}
	}

	s, err := e.limited(s, device)
	if s.Rate != nil && s.Sets != nil {
		s.Sets.Rate = false // the eswitch enforces the rate instead of the PF
	}

	return s, err
}

// enforced adds to the snapshot what the PF and the eswitch enforce now. The PF must have reported
// the VF before.
func (e *Engine) enforced(
	ctx context.Context, p patience, s Snapshot, device Device,
) (Snapshot, error) {
	if device.PF != nil {
		r, err := e.known(ctx, p, device.PF)
		if err != nil {
			return Snapshot{}, err
		}
		s.VF = r.vf
	}
	return e.limited(s, device)
}

// limited adds the rate that the eswitch enforces, if it has a rate object for the device.
func (e *Engine) limited(s Snapshot, device Device) (Snapshot, error) {
	if device.Port == nil || e.eswitches == nil {
		return s, nil
	}

	rate, limits, err := e.rate(*device.Port)
	if err != nil {
		return Snapshot{}, fmt.Errorf("rate of %s: %w", device.Port, err)
	}

	if limits {
		s.Rate = &rate
		if s.VF != nil {
			// Some PFs show the limits of the rate object, but cannot set them.
			s.VF.MinTxRate, s.VF.MaxTxRate = 0, 0
		}
	}

	return s, nil
}

func nameFree(pod *conn, name string) error {
	other, err := pod.with(name)
	switch {
	case err != nil:
		return fmt.Errorf("interface name %q: %w", name, err)
	case other == nil:
		return nil
	case other.Name == name:
		return fmt.Errorf("interface name %q: %w", name, ErrNameTaken)
	}

	return fmt.Errorf("interface name %q: %w, as an altname of %s", name, ErrNameTaken, other.Name)
}

// freeIndex returns the preferred ifindex if it is free in the pod, or else an index above all
// indexes in use.
func freeIndex(pod *conn, preferred int) (int, error) {
	if l, err := pod.at(preferred); err != nil || l == nil {
		return preferred, err
	}

	links, err := request.Consistent(pod.LinkList)
	if err != nil {
		return 0, err
	}

	highest := 0
	for _, l := range links {
		highest = max(highest, l.Attrs().Index)
	}

	return highest + 1, nil
}

// Attach moves a netdev to its place in a pod and configures it as want says. before and place come
// from the preceding [Engine.Plan]. If Attach fails, it undoes its changes. If that fails too, or
// if the process ends in the middle, [Engine.Restore] undoes them.
func (e *Engine) Attach(
	ctx context.Context, device Device, before Snapshot, place Place, want function.Interface,
) (Observed, error) {
	observed, err := e.attach(ctx, device.as(before), before, place, want)
	if err == nil {
		return observed, nil
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()

	if _, undo := e.Restore(ctx, device, before, place); undo != nil {
		err = errors.Join(err, fmt.Errorf("undo: %w", undo))
	}
	return Observed{}, err
}

// dialAgain returns a connection to the namespace of a planned place. It reuses the connection that
// Plan opened, if the path still refers to the same namespace.
func (e *Engine) dialAgain(place Place) (*conn, error) {
	if pod := e.planned.take(place); pod != nil {
		if namespace.IsAt(pod.ns, e.hostPath(place.NetNS)) {
			return pod, nil
		}
		_ = pod.close()
	}

	pod, err := e.dial(place.NetNS)
	if err != nil {
		return nil, err
	}
	if pod.cookie != place.Cookie {
		_ = pod.close()
		return nil, fmt.Errorf("network namespace %s: is another one than before", place.NetNS)
	}

	return pod, nil
}

// undoTime limits how long the undo of a failed attachment may take. It applies even if the
// caller's time is over.
const undoTime = 10 * time.Second

func (e *Engine) attach(
	ctx context.Context, device Device, before Snapshot, place Place, want function.Interface,
) (Observed, error) {
	pod, err := e.dialAgain(place)
	if err != nil {
		return Observed{}, err
	}
	defer pod.close()

	p := e.patient(ctx)
	if err := e.enforce(ctx, p, device, before, before.enforcing(want)); err != nil {
		return Observed{}, err
	}
	if err := e.tuneDriver(ctx, p, before, want); err != nil {
		return Observed{}, err
	}
	if err := ctx.Err(); err != nil {
		return Observed{}, err
	}

	observed, err := e.enter(ctx, p, pod, device, before, place, want)
	if err == nil && device.RDMA != nil {
		err = e.rdmaToPod(pod, before.RDMA, device.RDMA.Nodes)
	}
	return observed, err
}

// enter moves the netdev, if the Function has one, to its place in the pod, and configures it there.
func (e *Engine) enter(
	ctx context.Context, p patience, pod *conn, device Device, before Snapshot, place Place,
	want function.Interface,
) (Observed, error) {
	if want.Userspace {
		return e.observeVF(ctx, p, device, want)
	}
	if err := e.awaitGUIDs(ctx, p, before, want.VF); err != nil {
		return Observed{}, err
	}

	index, err := e.moveAndOpen(ctx, p, pod, before, place, want)
	if err != nil {
		return Observed{}, err
	}

	observed, err := e.configure(ctx, p, pod, index, want)
	if err == nil && want.MAC != "" && observed.MAC != want.MAC {
		err = fmt.Errorf("interface %s: mac %s: the driver took it, and tells %s", want.Name,
			want.MAC, observed.MAC)
	}

	return observed, err
}

// moveAndOpen moves the netdev to the pod. The handle that configure needs opens while the kernel
// waits for the end of the move. If this fails, configure tries again and returns the error.
func (e *Engine) moveAndOpen(
	ctx context.Context, p patience, pod *conn, before Snapshot, place Place,
	want function.Interface,
) (index int, err error) {
	var opening sync.WaitGroup
	opening.Go(func() { _, _ = pod.openLibrary() })
	defer opening.Wait()

	return e.moveToPod(ctx, p, pod, before, place, want)
}

// enforce makes the PF and the eswitch enforce the properties in to. It stops at the first refusal.
func (e *Engine) enforce(ctx context.Context, p patience, device Device, from, to Snapshot) error {
	if from.VF != nil && to.VF != nil {
		if err := e.order(ctx, p, device.PF, *from.VF, *to.VF); err != nil {
			return err
		}
	}
	return e.changeRate(device, from.Rate, to.Rate)
}

// transfer is the move of a netdev to a pod, with its new name, MTU and MAC.
type transfer struct {
	before     Snapshot
	place      Place
	wishes     string       // for messages to users
	mac        function.MAC // "" if the MAC does not change
	wanted     bool         // the pod asked for the MAC, so that a refusal is an error
	properties []*nl.RtAttr
}

// transferTo returns the transfer of a netdev to its place. If the pod does not ask for a MAC, the
// netdev gets the MAC that an administrator set for the VF, because the PF may drop frames with
// another one.
func transferTo(before Snapshot, place Place, want function.Interface) transfer {
	t := transfer{before: before, place: place, wishes: want.Name}
	t.mac, t.wanted = want.MAC, want.MAC != ""
	t.properties = []*nl.RtAttr{text(unix.IFLA_IFNAME, want.Name)}
	if want.MTU != 0 && want.MTU != before.MTU {
		t.wishes += fmt.Sprintf(" with MTU %d", want.MTU)
		t.properties = append(t.properties, number(unix.IFLA_MTU, want.MTU))
	}

	t.properties = append(t.properties, offloadOf(want.Offload)...)
	if !t.wanted {
		t.mac = before.administrativeMAC()
	}

	if t.mac == before.MAC {
		t.mac = ""
	}

	if t.mac != "" {
		t.wishes += fmt.Sprintf(" with MAC %s", t.mac)
	}

	return t
}

// moveToPod moves a netdev, renames it, and sets its MTU and MAC, all by one message. One message
// has two advantages: the pod never sees an intermediate state, and the kernel waits for an RCU
// grace period only once. It returns the ifindex in the pod.
func (e *Engine) moveToPod(
	ctx context.Context, p patience, pod *conn, before Snapshot, place Place,
	want function.Interface,
) (int, error) {
	if err := e.dropTakenAltNames(pod, before, want.Name); err != nil {
		return 0, err
	}

	t := transferTo(before, place, want)
	e.trace("move to pod")
	if err := e.move(ctx, p, pod, t); err != nil {
		return 0, fmt.Errorf("netdev %s: move to the pod as %s: %w", before.Name, t.wishes, err)
	}

	l, err := find(pod, before.Identity, Identity.same, place.Index, want.Name)
	if err == nil && l == nil {
		err = errors.New("is not there after the move")
	}
	if err != nil {
		return 0, fmt.Errorf("netdev %s in the pod: %w", want.Name, err)
	}

	return l.Identity.Index, nil
}

// move sends the message of a transfer, and repeats it while the driver is busy. If the driver
// refuses the MAC or the MTU, the kernel may have moved the netdev already. In this case move does
// the rest in the pod.
func (e *Engine) move(ctx context.Context, p patience, pod *conn, t transfer) error {
	message := append(slices.Clone(t.properties), number(unix.IFLA_NET_NS_FD, int(pod.ns)))
	if t.mac != "" {
		message = append(message, hardwareAddr(unix.IFLA_ADDRESS, t.mac))
	}

	var moved *link
	var refused error
	err := p.retry(ctx, busy, func() error {
		who := t.before.Identity
		placed := append(message, number(unix.IFLA_NEW_IFINDEX, t.place.Index))
		refused = e.set(e.host, who.Index, 0, 0, placed...)
		if errors.Is(refused, unix.EBUSY) { // the index was taken since Plan
			refused = e.set(e.host, who.Index, 0, 0, message...)
		}
		if refused == nil {
			return nil
		}

		moved, _ = find(pod, who, Identity.same, t.place.Index, t.before.Name)
		if moved != nil {
			return nil
		}

		return refused
	})

	if moved == nil {
		return err
	}

	if t.mac != "" && moved.MAC != t.mac {
		switch err := e.takeMAC(ctx, p, pod, moved.Identity.Index, t); {
		case err == nil, !t.wanted:
		case busy(refused):
			return err
		default:
			return errors.Join(refused, err)
		}
	}

	return p.retry(ctx, busy, func() error {
		return e.set(pod, moved.Identity.Index, 0, 0, t.properties...)
	})
}

// takeMAC sets the MAC of a netdev in the pod, after the message of the transfer failed to set it.
func (e *Engine) takeMAC(ctx context.Context, p patience, pod *conn, index int, t transfer) error {
	address := hardwareAddr(unix.IFLA_ADDRESS, t.mac)
	err := p.retry(ctx, busy, func() error { return e.set(pod, index, 0, 0, address) })
	if err != nil && !busy(err) && t.before.VF != nil {
		return e.adoptMAC(ctx, p, pod, index, t.mac, t.wanted)
	}
	return err
}

// adoptMAC makes a netdev that is down take the MAC that the PF set for the VF: see quirk "MAC
// after a reset". follows says that the PF enforces this MAC, so that the driver may set it on the
// netdev by itself.
func (e *Engine) adoptMAC(
	ctx context.Context, p patience, c *conn, index int, mac function.MAC, follows bool,
) error {
	flags := func(what string, flags uint32) error {
		return e.step(what, func() error {
			return p.retry(ctx, busy, func() error { return e.set(c, index, flags, unix.IFF_UP) })
		})
	}

	if err := flags("up to reset the VF", unix.IFF_UP); err != nil {
		return err
	}
	if err := flags("down to reset the VF", 0); err != nil {
		return err
	}

	has := func() (bool, error) {
		l, err := c.existing(index)
		return err == nil && l.MAC == mac, err
	}
	if adopted, err := has(); adopted || err != nil {
		return err
	}

	e.trace("MAC " + string(mac))
	address := hardwareAddr(unix.IFLA_ADDRESS, mac)
	err := p.retry(ctx, busy, func() error { return e.set(c, index, 0, 0, address) })
	if err == nil || !follows {
		return err
	}

	// qede sets the PF's MAC on the netdev a moment later, and refuses every request to change it.
	late := p.atMost(e.settleTime)
	return late.retry(ctx, func(error) bool { return true }, func() error {
		if adopted, _ := has(); adopted {
			return nil
		}
		return err
	})
}

// dropTakenAltNames removes the altnames of the netdev that are taken in the pod, and an altname
// that is equal to the new name. Both would fail the move, because names and altnames share one
// table.
func (e *Engine) dropTakenAltNames(pod *conn, before Snapshot, name string) error {
	for _, alt := range before.AltNames {
		other, err := pod.with(alt)
		if err != nil {
			return fmt.Errorf("altname %s in the pod: %w", alt, err)
		}
		if other == nil && alt != name {
			continue
		}
		if err := e.dropAltName(e.host, before.Identity.Index, alt); err != nil {
			return fmt.Errorf("netdev %s: %w", before.Name, err)
		}
	}
	return nil
}

func (e *Engine) dropAltName(c *conn, index int, name string) error {
	return e.step("remove altname "+name, func() error {
		return c.library(func(h *netlink.Handle) error {
			return h.LinkDelAltName(reference(index), name)
		})
	})
}

// observe reads the interface. It returns an error if the interface lacks something that no step
// reported, such as an IPv6 address that a sysctl has removed.
func observe(pod *conn, index int, want function.Interface) (Observed, error) {
	l, err := pod.existing(index)
	if err != nil {
		return Observed{}, fmt.Errorf("netdev in the pod: %w", err)
	}

	all, err := addresses(pod, index)
	if err != nil {
		return Observed{}, fmt.Errorf("interface %s: addresses: %w", l.Name, err)
	}

	for _, address := range want.Addresses {
		if !slices.Contains(all, address) {
			return Observed{}, fmt.Errorf("interface %s: address %s: the kernel accepted it, and the "+
				"interface does not have it", l.Name, address)
		}
	}
	if want.VRF != nil && l.master == 0 {
		return Observed{}, fmt.Errorf("interface %s: is no longer in VRF %s", l.Name, want.VRF.Name)
	}

	global := slices.DeleteFunc(all, func(p netip.Prefix) bool {
		return p.Addr().IsLinkLocalUnicast() && p.Addr().Is6()
	})
	return Observed{Name: l.Name, MAC: l.MAC, MTU: l.MTU, Addresses: global, Index: index}, nil
}

// observeVF returns what a pod sees of a Function without a netdev.
func (e *Engine) observeVF(
	ctx context.Context, p patience, device Device, want function.Interface,
) (Observed, error) {
	observed := Observed{Name: want.Name, Addresses: want.Addresses}
	now, err := e.enforced(ctx, p, Snapshot{}, Device{PF: device.PF})
	if now.VF != nil {
		observed.MAC = now.VF.MAC
	}
	return observed, err
}

// find looks for a netdev by ifindex, then by names, and finally among all netdevs if the identity
// is certain. It returns nil if there is no such netdev, or if several netdevs match.
func find(
	c *conn, who Identity, same func(Identity, Identity) bool, index int, names ...string,
) (*link, error) {
	if l, err := c.at(index); err != nil || l != nil && same(who, l.Identity) {
		return l, err
	}

	for _, name := range names {
		if name == "" {
			continue
		}
		if l, err := c.with(name); err != nil || l != nil && same(who, l.Identity) {
			return l, err
		}
	}

	if !who.certain() {
		return nil, nil
	}

	links, err := request.Consistent(c.LinkList)
	if err != nil {
		return nil, err
	}

	matches := slices.DeleteFunc(links, func(l netlink.Link) bool {
		return !same(who, identityOf(l))
	})
	if len(matches) != 1 {
		return nil, nil
	}

	return c.at(matches[0].Attrs().Index)
}

// dial opens the namespace at a path of the host. Some runtimes, such as cri-dockerd, name a
// namespace by a process in it: /proc/4711/ns/net. dial looks for such a path in the host's procfs,
// because the procfs of the agent's container numbers processes differently.
func (e *Engine) dial(path string) (*conn, error) {
	pod, err := dial(e.hostPath(path))
	if err == nil {
		pod.isPod = pod.cookie != e.host.cookie
	}
	return pod, err
}

// hostPath returns the path by which this process reaches a path of the host.
func (e *Engine) hostPath(path string) string {
	if process, ok := strings.CutPrefix(path, "/proc/"); ok {
		return filepath.Join(e.procRoot, process)
	}
	return path
}

// dialPlace opens the namespace of a place. It returns nil if the namespace is gone: the path does
// not exist, refers to another namespace, or is a plain file on which nothing is mounted.
func (e *Engine) dialPlace(place Place) (*conn, error) {
	if place.NetNS == "" {
		return nil, nil
	}

	pod, err := e.dial(place.NetNS)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESRCH), errors.Is(err, errNotMounted):
		return nil, nil
	case err != nil:
		return nil, err
	case pod.cookie != place.Cookie:
		pod.close()
		return nil, nil
	}

	return pod, nil
}

// locate finds a netdev in the namespace of a place. The caller closes pod. pod is nil if the
// namespace does not exist, and l is nil if the netdev does not exist.
func (e *Engine) locate(
	place Place, who Identity, names ...string,
) (pod *conn, l *link, err error) {
	if pod, err = e.dialPlace(place); pod == nil || err != nil {
		return nil, nil, err
	}
	if l, err = find(pod, who, Identity.same, place.Index, names...); err != nil {
		_ = pod.close()
		return nil, nil, err
	}
	return pod, l, nil
}

// Holds reports whether the namespace of a place still exists and contains the netdev.
func (e *Engine) Holds(place Place, who Identity) (bool, error) {
	pod, l, err := e.locate(place, who)
	defer pod.close()
	return l != nil, err
}

// Alive reports whether the namespace of a place still exists under its path.
func (e *Engine) Alive(place Place) (bool, error) {
	pod, err := e.dialPlace(place)
	defer pod.close()
	return pod != nil, err
}
