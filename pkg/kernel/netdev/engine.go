package netdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
)

// Options of an [Engine]. The zero value is good for a process in the host's network namespace.
type Options struct {
	// HostNetNS is the path of the host's network namespace; "" is that of the calling process.
	HostNetNS string
	// ProcRoot is where procfs is; "" is "/proc". Namespaces that runtimes name by a process are looked for there. Its sys/net is written where a netdev had other sysctls of IPv6 than the
	// host's default ones. Where it cannot be written those are not given back.
	ProcRoot string
	// Rates, where set, are the rate objects of Functions behind an eswitch.
	Rates Rates
	// Trace, where set, is called before every change with what is about to be changed, on the goroutine that called
	// the Engine.
	Trace func(step string)
}

// Engine changes netdevs. It may be used by several goroutines at once, for different netdevs: the caller makes sure
// that nobody else works on the same one.
type Engine struct {
	hostNS netns.NsHandle
	host   *conn
	conf6  int // directory of the host's IPv6 sysctls, -1 for none
	// procRoot is where procfs is.
	procRoot string
	rates    Rates
	trace    func(step string)
}

// New opens the host's network namespace. Close the Engine after use.
func New(options Options) (*Engine, error) {
	// Not /proc/self: that is the main thread, which some other code of the process may have sent elsewhere.
	path := cmp.Or(options.HostNetNS, "/proc/thread-self/ns/net")
	ns, err := namespace.Open(path)
	if err != nil {
		return nil, fmt.Errorf("the host's %w", err)
	}
	host, err := dial(ns)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("the host's network namespace %s: %w", path, err)
	}
	trace := options.Trace
	if trace == nil {
		trace = func(string) {}
	}
	rates := options.Rates
	if rates == nil {
		rates = noRates{}
	}
	procRoot := cmp.Or(options.ProcRoot, "/proc")
	conf6, err := openConf6(ns, procRoot)
	if err != nil {
		host.close()
		ns.Close()
		return nil, fmt.Errorf("sysctls of the host's network namespace %s: %w", path, err)
	}
	return &Engine{hostNS: ns, host: host, conf6: conf6, procRoot: procRoot, rates: rates, trace: trace}, nil
}

// Close gives the host's namespace up.
func (e *Engine) Close() error {
	e.host.close()
	if e.conf6 >= 0 {
		unix.Close(e.conf6)
	}
	return e.hostNS.Close()
}

// Plan looks at a netdev on the host and at the namespace it shall go to, and changes nothing. Its error says what
// would keep [Engine.Attach] from succeeding, as far as that can be seen.
func (e *Engine) Plan(ctx context.Context, device Device, netNS string, want function.Interface) (Snapshot, Place, error) {
	if err := want.Validate(); err != nil {
		return Snapshot{}, Place{}, err
	}
	before, err := e.snapshot(ctx, device, want)
	if err != nil {
		return Snapshot{}, Place{}, err
	}
	if err := enforceable(want.VF, device, before); err != nil {
		return Snapshot{}, Place{}, err
	}
	if want.Userspace && want.MAC != "" && before.VF == nil {
		return Snapshot{}, Place{}, fmt.Errorf("%s: has no PF that the MAC could be set with", before.title())
	}
	pod, err := e.dialPath(netNS)
	if err != nil {
		return Snapshot{}, Place{}, err
	}
	defer pod.close()
	if pod.cookie == e.host.cookie {
		return Snapshot{}, Place{}, fmt.Errorf("network namespace %s: is the host's own", netNS)
	}
	if want.Userspace {
		return before, Place{NetNS: netNS, Cookie: pod.cookie}, nil
	}
	if err := nameFree(pod, want.Name); err != nil {
		return Snapshot{}, Place{}, err
	}
	index, err := freeIndex(pod, before.Identity.Index)
	if err != nil {
		return Snapshot{}, Place{}, fmt.Errorf("network namespace %s: %w", netNS, err)
	}
	return before, Place{NetNS: netNS, Cookie: pod.cookie, Index: index}, nil
}

// Snapshot looks at a netdev on the host that is about to lose its driver, and changes nothing. [Engine.Restore] with
// the snapshot and no place makes the netdev that the driver makes anew what this one was.
func (e *Engine) Snapshot(ctx context.Context, device Device) (Snapshot, error) {
	return e.snapshot(ctx, device, function.Interface{})
}

// snapshot takes a netdev on the host down in words, or the little that there is of a Function without one.
func (e *Engine) snapshot(ctx context.Context, device Device, want function.Interface) (Snapshot, error) {
	if !want.VF.Rated() {
		device.Port = nil // asking an eswitch takes its time
	}
	if want.Userspace {
		return e.complete(ctx, Snapshot{}, device)
	}
	l, err := e.host.named(device.Name)
	if err != nil {
		return Snapshot{}, err
	}
	if master := l.Attrs().MasterIndex; master != 0 {
		return Snapshot{}, fmt.Errorf("netdev %s: is in use on the host, as a port of the netdev with index %d", device.Name, master)
	}
	s, err := e.whole(l)
	if err != nil {
		return Snapshot{}, err
	}
	if s.Carried.XDP != nil {
		return Snapshot{}, fmt.Errorf("netdev %s: is in use on the host, by XDP program %d", device.Name, s.Carried.XDP.Program)
	}
	return e.complete(ctx, s, device)
}

// whole is the snapshot of a netdev on the host with what takes another question.
func (e *Engine) whole(l netlink.Link) (Snapshot, error) {
	s := snapshotOf(l)
	d, err := e.host.details(l.Attrs().Index)
	if err != nil {
		return Snapshot{}, fmt.Errorf("netdev %s: %w", l.Attrs().Name, err)
	}
	if e.conf6 < 0 {
		d.conf.IPv6 = nil // which could not be given back
	}
	s.Carried, s.Conf = carriedOf(l.Attrs(), d), &d.conf
	return s, nil
}

// complete adds what the PF and the eswitch tell, as far as the device names them. One that does not tell is none of an
// error.
func (e *Engine) complete(ctx context.Context, s Snapshot, device Device) (_ Snapshot, err error) {
	if device.PF != nil {
		if s.VF, err = e.host.vf(device.PF); err != nil && !errors.Is(err, errNoVF) {
			return Snapshot{}, err
		}
	}
	if device.Port == nil {
		return s, nil
	}
	rate, limits, err := e.rates.Rate(ctx, *device.Port)
	if err != nil {
		return Snapshot{}, fmt.Errorf("rate of %s: %w", device.Port, err)
	}
	if !limits {
		return s, nil
	}
	s.Rate = &rate
	if s.VF != nil {
		s.VF.MinTxRate, s.VF.MaxTxRate = 0, 0 // some PFs show the rate object's here too, and none can set it
	}
	return s, nil
}

func nameFree(pod *conn, name string) error {
	other, err := pod.with(name)
	if err != nil {
		return fmt.Errorf("interface name %q: %w", name, err)
	}
	if other == nil {
		return nil
	}
	if other.Attrs().Name != name {
		return fmt.Errorf("interface name %q: %w, as an altname of %s", name, ErrNameTaken, other.Attrs().Name)
	}
	return fmt.Errorf("interface name %q: %w", name, ErrNameTaken)
}

// freeIndex is the preferred index, or else one above all that are in use.
func freeIndex(pod *conn, preferred int) (int, error) {
	if l, err := pod.at(preferred); err != nil || l == nil {
		return preferred, err
	}
	links, err := pod.all()
	if err != nil {
		return 0, err
	}
	highest := 0
	for _, l := range links {
		highest = max(highest, l.Attrs().Index)
	}
	return highest + 1, nil
}

// Attach takes a netdev to its place in a pod and makes it what the pod wants. device, before and place are those of
// the [Engine.Plan] just made. Where it fails it has undone what it did; where even that fails, or the process ends in
// the middle, [Engine.Restore] continues.
func (e *Engine) Attach(ctx context.Context, device Device, before Snapshot, place Place, want function.Interface) (Observed, error) {
	observed, err := e.attach(ctx, device, before, place, want)
	if err == nil {
		return observed, nil
	}
	if _, undo := e.Restore(context.WithoutCancel(ctx), device, before, place); undo != nil {
		return Observed{}, errors.Join(err, fmt.Errorf("undo: %w", undo))
	}
	return Observed{}, err
}

func (e *Engine) attach(ctx context.Context, device Device, before Snapshot, place Place, want function.Interface) (Observed, error) {
	pod, err := e.dialPath(place.NetNS)
	if err != nil {
		return Observed{}, err
	}
	defer pod.close()
	if pod.cookie != place.Cookie {
		return Observed{}, fmt.Errorf("network namespace %s: is another one than before", place.NetNS)
	}
	device = device.as(before)
	if err := e.enforce(ctx, device, before, before.enforcing(want)); err != nil {
		return Observed{}, err
	}
	if err := ctx.Err(); err != nil {
		return Observed{}, err
	}
	if want.Userspace {
		return e.observeVF(ctx, device, want)
	}
	l, err := e.moveToPod(pod, before, place, want)
	if err != nil {
		return Observed{}, err
	}
	if err := e.configure(pod, place.NetNS, l, want); err != nil {
		return Observed{}, err
	}
	observed, err := observe(pod, l.Attrs().Index)
	if err == nil && want.MAC != "" && observed.MAC != want.MAC {
		err = fmt.Errorf("interface %s: mac %s: the driver took it, and tells %s", want.Name, want.MAC, observed.MAC)
	}
	return observed, err
}

// enforce makes the PF and the eswitch enforce what to says, stopping at the first thing that one of them refuses.
func (e *Engine) enforce(ctx context.Context, device Device, from, to Snapshot) error {
	if from.VF != nil && to.VF != nil {
		for _, c := range allChanges(*from.VF, *to.VF) {
			if err := e.changeVFPatiently(ctx, device.PF, c); err != nil {
				return err
			}
		}
	}
	return e.changeRate(ctx, device, from.Rate, to.Rate)
}

// moveToPod moves, renames and sets MTU and MAC in one message, so that the pod never sees the netdev half made and
// the kernel waits only once for its readers.
func (e *Engine) moveToPod(pod *conn, before Snapshot, place Place, want function.Interface) (netlink.Link, error) {
	if err := e.dropTakenAltNames(pod, before, want.Name); err != nil {
		return nil, err
	}
	to := change{index: place.Index, name: want.Name}
	if want.MTU != before.MTU {
		to.mtu = want.MTU
	}
	if want.MAC != before.MAC {
		to.mac = want.MAC
	}
	ns, err := namespace.Open(e.visible(place.NetNS))
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	to.netns = int(ns)
	e.trace("move to pod")
	err = e.host.change(before.Identity.Index, to)
	if errors.Is(err, unix.EBUSY) { // the index was given away since Plan
		to.index = 0
		err = e.host.change(before.Identity.Index, to)
	}
	if err != nil && to.mac != "" && before.VF != nil {
		err = e.moveOn(pod, before, place, to, err)
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s: move to the pod as %s%s: %w", before.Name, want.Name, to.wishes(), err)
	}
	l, err := find(pod, before.Identity, Identity.same, place.Index, want.Name)
	if err == nil && l == nil {
		err = errors.New("is not there after the move")
	}
	if err != nil {
		return nil, fmt.Errorf("netdev %s in the pod: %w", want.Name, err)
	}
	return l, nil
}

// moveOn continues with a netdev that is in the pod by now and was refused its MAC, after which the kernel left the
// rest of the message undone.
func (e *Engine) moveOn(pod *conn, before Snapshot, place Place, to change, refused error) error {
	l, err := find(pod, before.Identity, Identity.same, place.Index, before.Name)
	if err != nil || l == nil {
		return refused
	}
	index := l.Attrs().Index
	if macOf(l.Attrs().HardwareAddr) != to.mac {
		if err := e.adoptMAC(pod, index, to.mac); err != nil {
			return errors.Join(refused, err)
		}
	}
	return pod.change(index, change{name: to.name, mtu: to.mtu})
}

// adoptMAC makes a netdev that is down take the MAC that its PF set for the VF, which igbvf refuses before: quirk "MAC
// after a reset".
func (e *Engine) adoptMAC(c *conn, index int, mac function.MAC) error {
	for _, to := range []struct {
		step  string
		flags uint32
	}{{"up to reset the VF", unix.IFF_UP}, {"down to reset the VF", 0}} {
		e.trace(to.step)
		if err := c.change(index, change{flags: &to.flags}); err != nil {
			return fmt.Errorf("%s: %w", to.step, err)
		}
	}
	l, err := c.at(index)
	if err != nil || l != nil && macOf(l.Attrs().HardwareAddr) == mac {
		return err
	}
	e.trace("MAC " + string(mac))
	return c.change(index, change{mac: mac})
}

func (c change) wishes() string {
	text := ""
	if c.mtu != 0 {
		text += fmt.Sprintf(" with MTU %d", c.mtu)
	}
	if c.mac != "" {
		text += fmt.Sprintf(" with MAC %s", c.mac)
	}
	return text
}

// dropTakenAltNames removes the altnames that would keep the netdev from moving or from being renamed. Names and
// altnames share one table in a namespace, so a netdev cannot get its own altname as name.
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
	e.trace("remove altname " + name)
	if err := c.LinkDelAltName(reference(index), name); err != nil {
		return fmt.Errorf("remove altname %s: %w", name, err)
	}
	return nil
}

// reference is a link for the calls of netlink.Handle that need no more than its index.
func reference(index int) netlink.Link {
	return &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: index}}
}

// configure adds the addresses, then brings the netdev up, then adds the routes, which need both.
func (e *Engine) configure(pod *conn, netNS string, l netlink.Link, want function.Interface) error {
	for _, address := range want.Addresses {
		e.trace("address " + address.String())
		if err := addAddress(pod, l, address); err != nil {
			return fmt.Errorf("interface %s: address %s: %w", want.Name, address, err)
		}
	}
	if want.AllMulticast {
		e.trace("allmulticast")
		if err := pod.LinkSetAllmulticastOn(l); err != nil {
			return fmt.Errorf("interface %s: allmulticast: %w", want.Name, err)
		}
	}
	e.announceItself(pod, netNS, l.Attrs().Index, want.Name, want.Addresses)
	e.trace("up")
	if err := pod.LinkSetUp(l); err != nil {
		return fmt.Errorf("interface %s: up: %w", want.Name, err)
	}
	for _, route := range want.Routes {
		e.trace("route " + route.To.String())
		if err := addRoute(pod, l, route); err != nil {
			return fmt.Errorf("interface %s: route to %s: %w", want.Name, route.To, err)
		}
	}
	return nil
}

func observe(pod *conn, index int) (Observed, error) {
	l, err := pod.at(index)
	if err == nil && l == nil {
		err = errors.New("is not there any more")
	}
	if err != nil {
		return Observed{}, fmt.Errorf("netdev in the pod: %w", err)
	}
	a := l.Attrs()
	addresses, err := globalAddresses(pod, l)
	if err != nil {
		return Observed{}, fmt.Errorf("interface %s: addresses: %w", a.Name, err)
	}
	return Observed{Name: a.Name, MAC: macOf(a.HardwareAddr), MTU: a.MTU, Addresses: addresses, Index: index}, nil
}

// find looks for a netdev under an index and a name it may have, and, where its identity is certain, among all. It
// returns nil where it is not in the namespace or cannot be told from another one.
func find(c *conn, who Identity, same func(Identity, Identity) bool, index int, names ...string) (netlink.Link, error) {
	match := func(l netlink.Link) bool { return l != nil && same(who, snapshotOf(l).Identity) }
	if l, err := c.at(index); err != nil || match(l) {
		return l, err
	}
	for _, name := range names {
		if name == "" {
			continue
		}
		if l, err := c.with(name); err != nil || match(l) {
			return l, err
		}
	}
	if !who.certain() {
		return nil, nil
	}
	links, err := c.all()
	if err != nil {
		return nil, err
	}
	matches := slices.DeleteFunc(links, func(l netlink.Link) bool { return !match(l) })
	if len(matches) != 1 {
		return nil, nil
	}
	return matches[0], nil
}

// visible is where this process finds a path of the host. Some runtimes, cri-dockerd for one, name a namespace by a process
// that is in it, such as /proc/4711/ns/net; in a container that number is no process, or another one.
func (e *Engine) visible(path string) string {
	if process, ok := strings.CutPrefix(path, "/proc/"); ok {
		return filepath.Join(e.procRoot, process)
	}
	return path
}

// dialPath opens the namespace that a path of the host names.
func (e *Engine) dialPath(path string) (*conn, error) { return dialPath(e.visible(path)) }

// dialPlace opens the namespace of a place, nil where it is gone: the path is no more, or means another namespace, or
// is a mount point that has nothing mounted.
func (e *Engine) dialPlace(place Place) (*conn, error) {
	if place.NetNS == "" {
		return nil, nil
	}
	pod, err := e.dialPath(place.NetNS)
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

// Holds says whether a netdev is in the place; it is not where the namespace is gone.
func (e *Engine) Holds(place Place, who Identity) (bool, error) {
	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return false, err
	}
	defer pod.close()
	l, err := find(pod, who, Identity.same, place.Index)
	return l != nil, err
}

// Alive says whether the namespace of a place still exists under its path.
func (e *Engine) Alive(place Place) (bool, error) {
	pod, err := e.dialPlace(place)
	if pod == nil || err != nil {
		return false, err
	}
	pod.close()
	return true, nil
}
