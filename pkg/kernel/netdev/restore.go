// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/links"
)

// fallbackName is a pattern for which the kernel finds a free name. It is for a netdev whose own
// name is taken.
const fallbackName = "xpu%d"

var fallback = regexp.MustCompile("^xpu[0-9]+$")

// Restore moves a netdev back to the host, restores all properties to the values in before, and
// verifies them. The netdev may be anywhere and in any state. A netdev that is on the host with the
// old properties is not touched. device.Name is the name that the caller last saw on the host, or
// "".
//
// For a Function without a netdev, Restore restores what the PF and the eswitch enforce. If they
// report that the Function no longer exists, nothing is left to restore.
//
// Restore has three outcomes:
//
//   - All properties are restored.
//   - Some property is not restored, but the next owner is isolated all the same. [Restored] has a
//     note about the property.
//   - Restore returns an error that says what is left. The next call continues. If the error wraps
//     [ErrLeaks], the next call will fail in the same way. See also [ErrGone] and [ErrAway].
func (e *Engine) Restore(
	ctx context.Context, device Device, before Snapshot, place Place,
) (Restored, error) {
	device = device.as(before)
	p := e.patient(ctx)
	if err := ctx.Err(); err != nil {
		return Restored{}, fmt.Errorf("%s: %w", before.title(), err)
	}

	away := e.rdmaToHost(ctx, p, place, before.RDMA)
	if away != nil {
		before.RDMA = nil // the rest comes back all the same
	}

	restored, err := e.restore(ctx, p, device, before, place)
	if away != nil {
		return Restored{}, errors.Join(away, err)
	}
	return restored, err
}

// restore does the work of Restore once the RDMA devices are back.
func (e *Engine) restore(
	ctx context.Context, p patience, device Device, before Snapshot, place Place,
) (Restored, error) {
	if before.userspace() {
		return e.reconcile(ctx, p, device, before, 0, nil)
	}

	pod, l, err := e.locate(place, before.Identity)
	if err != nil {
		return Restored{}, err
	}
	defer pod.close()

	leftInPod := e.dropOwnRules(pod, place.Remains)
	index := before.Identity.Index
	if l != nil {
		index = l.Identity.Index
		if err := e.moveToHost(ctx, p, pod, l.Snapshot, device, before); err != nil {
			return Restored{}, err
		}
	}
	leftInPod = append(leftInPod, e.dropMasters(pod, place.Remains)...)

	l, err = find(e.host, before.Identity, Identity.sameOnHost, index, device.Name, before.Name)
	switch {
	case err != nil:
		return Restored{}, err
	case l == nil && device.Rebinding.unfinished() && before.Identity.IsHardware():
		// The netdev is in no namespace, because its driver was unbound or is about to be unbound.
		if err := e.bind(before.Identity, device.Rebinding.Driver); err != nil {
			return Restored{}, fmt.Errorf("%s: bind its driver again: %w", before.Name, err)
		}
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrGone)
	case l == nil && pod != nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrAway)
	case l == nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrGone)
	}

	if before.WritesTable {
		e.resetTable(l.Identity.Index)
	}
	settings := e.startReading(l, e.groupsOf(before.Settings))
	defer settings()

	if err := e.detachForeign(ctx, l, place, device.Rebinding); err != nil {
		return Restored{}, fmt.Errorf("netdev %s on the host: %w", l.Name, err)
	}
	if err := e.awaitNames(ctx, p, before, l.Snapshot); err != nil {
		return Restored{}, err
	}

	restored, err := e.reconcile(ctx, p, device, before, l.Identity.Index, settings)
	restored.Notes = append(restored.Notes, leftInPod...)

	return restored, err
}

// moveToHost moves a netdev to the host. The same message restores as many properties as possible.
// moveToHost returns an error only if the netdev is still in the pod.
func (e *Engine) moveToHost(
	ctx context.Context, p patience, pod *conn, now Snapshot, device Device, before Snapshot,
) error {
	index := now.Identity.Index
	err := e.dropForeignAltNames(pod, index, now, before.AltNames)
	if err == nil {
		err = e.dropStacked(ctx, pod, index, ownNamespace)
	}
	if err != nil {
		return fmt.Errorf("netdev %s in the pod: %w", now.Name, err)
	}

	if device.PF != nil && (before.sets().MAC || before.sets().GUID) {
		// Some drivers refuse to restore the MAC of the netdev while the PF enforces the pod's MAC
		// for the VF. An error is ignored here, because reconcile reports it.
		if r, err := e.known(ctx, p, device.PF); err == nil && r.vf != nil {
			_, _ = e.undoVFMAC(ctx, p, device.PF, r, before)
			for _, c := range vfChanges(*r.vf, r.vf.with(before.guids(*r.vf), "")) {
				_ = e.changeVF(ctx, p, device.PF, r.index, c)
			}
		}
	}

	flags, mask := before.flags()
	if before.Conf != nil {
		// reconcile sets the netdev up after the host's sysctls, because IPv6 starts with them.
		flags &^= unix.IFF_UP
	}

	now.Carried, now.Conf, before.Settings = nil, nil, nil // reconcile restores these
	toHost := number(unix.IFLA_NET_NS_FD, int(e.host.ns))
	message := []*nl.RtAttr{toHost}
	for _, d := range compare(before, now) {
		if d.attribute != nil {
			message = append(message, d.attribute)
		}
	}

	e.trace("move to host")
	failed := e.set(pod, index, flags, mask, message...)
	if failed == nil {
		return nil
	}
	if l, err := pod.at(index); err != nil || l == nil {
		return err
	}
	// A name or altname may be taken on the host. The netdev moves without altnames, and with a
	// name that the kernel chooses.
	if err := e.dropForeignAltNames(pod, index, now, nil); err != nil {
		return errors.Join(failed, fmt.Errorf("netdev %s in the pod: %w", now.Name, err))
	}

	e.trace("move to host under another name")
	name := text(unix.IFLA_IFNAME, fallbackName)
	err = p.retry(ctx, busy, func() error { return e.set(pod, index, 0, 0, toHost, name) })
	if err != nil {
		return fmt.Errorf("netdev %s: move to the host: %w", now.Name, errors.Join(failed, err))
	}

	return nil
}

// dropForeignAltNames removes the altnames that are not in keep.
func (e *Engine) dropForeignAltNames(c *conn, index int, now Snapshot, keep []string) error {
	foreign := slices.DeleteFunc(slices.Clone(now.AltNames), func(alt string) bool {
		return slices.Contains(keep, alt)
	})
	return e.dropAltNames(c, index, foreign)
}

// reconcile undoes the differences of a Function whose netdev, if any, is on the host. It takes two
// rounds, because some properties can be restored only after others. settings returns the settings
// of the netdev, and is nil without a netdev.
func (e *Engine) reconcile(
	ctx context.Context, p patience, device Device, before Snapshot, index int,
	settings func() Settings,
) (Restored, error) {
	const rounds = 2
	var refused refusals
	last := differences{settings: settings}
	for round := 0; ; round++ {
		d, err := e.differences(ctx, p, device, before, index, last)
		if err == nil && round == rounds && len(d.accepted(refused)) > 0 {
			d, err = e.settle(ctx, p, device, before, index, d, refused)
		}
		if err != nil {
			return Restored{}, err
		}
		if len(d.left) == 0 {
			return Restored{Name: d.now.Name, Notes: d.notes}, nil
		}

		if err := ctx.Err(); err != nil {
			words := strings.Join(d.words(), "; ")
			err = fmt.Errorf("%s is not as it was: %s: %w", d.now.title(), words, err)
			return Restored{}, errors.Join(err, refused.all())
		}

		if round == rounds {
			r := remains{before: d.before, now: d.now, neutral: neutralMAC(device.PF, before)}
			notes, err := r.conclude(d.left, refused)
			if err != nil {
				return Restored{}, err
			}
			return Restored{Name: d.now.Name, Notes: append(d.notes, notes...)}, nil
		}

		refused, last = e.undo(ctx, p, index, device, d.before, d.now), d
	}
}

// differences holds what is left to restore of a Function.
type differences struct {
	before Snapshot // without names that other netdevs have now, which notes mentions
	now    Snapshot
	left   []property
	notes  []string
	// settings returns the settings for the next comparison, if their reading has begun already.
	settings func() Settings
}

func (d differences) words() (words []string) {
	for _, p := range d.left {
		words = append(words, p.String())
	}
	return words
}

// accepted returns the properties that differ although no change was refused. It leaves out
// settings, because they are harmless and a release does not wait for them.
func (d differences) accepted(refused refusals) (list []property) {
	for _, p := range d.left {
		if refused[p.name] == nil && p.group == "" {
			list = append(list, p)
		}
	}
	return list
}

// differences compares the Function with the snapshot. A netdev must be on the host. last is the
// result of the previous comparison, whose properties were restored in between. Settings are read
// while the PF and the eswitch are asked.
func (e *Engine) differences(
	ctx context.Context, p patience, device Device, before Snapshot, index int, last differences,
) (d differences, err error) {
	settings := last.settings
	if !before.userspace() {
		l, err := e.host.at(index)
		if err != nil {
			return d, err
		}
		if l == nil {
			return d, fmt.Errorf("%s: %w", before.Name, ErrGone)
		}

		d.now = l.Snapshot
		if settings == nil {
			settings = e.readAgain(l, before.Settings, last.now.Settings, last.left)
			defer settings()
		}
	}

	if d.now, err = e.enforced(ctx, p, d.now, device); err != nil {
		return d, err
	}
	if d.now.RDMA, err = e.rdmaOnHost(before.RDMA); err != nil {
		return d, err
	}
	if d.before, d.notes, err = e.acceptTaken(before, d.now); err != nil {
		return d, err
	}

	if settings != nil {
		d.now.Settings = settings()
	}

	isOfHost := remains{before: before, now: d.now}.vfMACOfHost()
	for _, p := range compare(d.before, d.now) {
		if p.name == "vf mac" && isOfHost {
			d.notes = append(d.notes, fmt.Sprintf("%s: the attachment did not set it", p))
			continue
		}
		d.left = append(d.left, p)
	}

	return d, nil
}

// settle waits until all accepted changes are in effect, because some drivers accept a change and
// carry it out a moment later. If the time is too short to know, settle counts the remaining
// changes as refused.
func (e *Engine) settle(
	ctx context.Context, p patience, device Device, before Snapshot, index int,
	d differences, refused refusals,
) (_ differences, err error) {
	late := p.atMost(e.settleTime)
	dropped := func(err error) bool { return errors.Is(err, errDropped) }
	err = late.retry(ctx, dropped, func() error {
		d, err = e.differences(ctx, p, device, before, index, d)
		if err == nil && len(d.accepted(refused)) > 0 {
			return errDropped
		}
		return err
	})

	if !errors.Is(err, errDropped) {
		return d, err
	}

	if late.whole < e.settleTime { // a shorter wait proves nothing about the driver
		for _, left := range d.accepted(refused) {
			refused.add(errNotYet, left.name)
		}
	}

	return d, nil
}

// errNotYet says that a driver accepted a value, and that the time was too short for the value to
// be in effect.
var errNotYet = errors.New("the driver accepted it, and does not have it yet")

// awaitNames waits a moment while other netdevs of the host have a name of this netdev. A new
// netdev has the first free name until udev or the agent renames it, and the name of a netdev is
// free while the netdev is in a pod.
func (e *Engine) awaitNames(ctx context.Context, p patience, before, now Snapshot) error {
	held := func(err error) bool { return errors.Is(err, errNameHeld) }
	err := p.atMost(e.settleTime).retry(ctx, held, func() error {
		_, notes, err := e.acceptTaken(before, now)
		if err != nil || len(notes) == 0 {
			return err
		}
		e.trace("wait: " + strings.Join(notes, ", "))
		return errNameHeld
	})

	if held(err) && ctx.Err() == nil {
		return nil // reconcile accepts that the name is taken
	}

	return err
}

// errNameHeld says that another netdev of the host has a name of this netdev.
var errNameHeld = errors.New("another netdev has its name")

// acceptTaken returns the snapshot without the names that other netdevs of the host have now, and a
// note about each of these names.
func (e *Engine) acceptTaken(before, now Snapshot) (accepted Snapshot, notes []string, err error) {
	taken := func(kind, name string) bool {
		if err != nil || name == now.Name || slices.Contains(now.AltNames, name) {
			return false
		}

		var other *link
		if other, err = e.host.with(name); other == nil {
			return false
		}

		notes = append(notes, fmt.Sprintf("%s %s is taken by another netdev", kind, name))
		return true
	}

	accepted = before
	accepted.AltNames = slices.DeleteFunc(slices.Clone(before.AltNames), func(alt string) bool {
		return taken("altname", alt)
	})
	if taken("name", before.Name) {
		if accepted.Name = now.Name; !fallback.MatchString(now.Name) {
			accepted.Name = fallbackName
		}
	}

	return accepted, notes, err
}

// undo restores each property that differs by a message of its own. It continues after a refusal.
func (e *Engine) undo(
	ctx context.Context, p patience, index int, device Device, before, now Snapshot,
) refusals {
	refused := refusals{}
	e.undoEnforced(ctx, p, device, before, &now, refused, true)

	if !before.userspace() {
		e.undoNetdev(ctx, p, index, before, now, refused)
	}

	e.undoEnforced(ctx, p, device, before, &now, refused, false)
	err := e.changeRate(device, now.Rate, before.Rate)
	refused.add(err, "eswitch min_tx_rate", "eswitch max_tx_rate")
	for name, err := range e.undoRDMA(before, now) {
		refused.add(err, name)
	}

	return refused
}

// undoEnforced restores what the PF enforces. With first, it restores only the MAC, because some
// drivers refuse to set a MAC on the netdev that is not the one of the PF, and the GUIDs, because the
// address of an InfiniBand netdev has the port's. Without first, it restores all other properties.
// The netdev is restored in between.
func (e *Engine) undoEnforced(
	ctx context.Context, p patience, device Device, before Snapshot, now *Snapshot,
	refused refusals, first bool,
) {
	if now.VF == nil || before.VF == nil {
		return
	}

	to := before.giveBack(*now.VF)
	if first {
		to = now.VF.with(before.guids(*now.VF), to.MAC)
	} else {
		to.MAC, to.NodeGUID, to.PortGUID = now.VF.MAC, now.VF.NodeGUID, now.VF.PortGUID
	}

	changes := vfChanges(*now.VF, to)
	if len(changes) == 0 {
		return
	}

	r, err := e.known(ctx, p, device.PF)
	if err != nil || r.vf == nil {
		refused.add(err, vfProperties(changes)...)
		return
	}

	if first {
		mac, err := e.undoVFMAC(ctx, p, device.PF, r, before)
		now.VF = new(now.VF.with(nil, mac))
		refused.add(err, "vf mac")
		changes = slices.DeleteFunc(changes, func(c vfChange) bool { return c.field == vfMAC })
	}

	for _, c := range changes {
		refused.add(e.changeVF(ctx, p, device.PF, r.index, c), vfProperties([]vfChange{c})...)
	}
}

// vfProperties returns the names of the properties that the changes affect.
func vfProperties(changes []vfChange) (names []string) {
	for _, c := range changes {
		names = append(names, map[vfField][]string{
			vfMAC: {"vf mac"}, vfTag: {"vf vlan"}, vfRates: {"vf min_tx_rate", "vf max_tx_rate"},
			vfSpoofCheck: {"vf spoofchk"}, vfTrust: {"vf trust"}, vfLinkState: {"vf link-state"},
			vfNodeGUID: {"vf node_guid"}, vfPortGUID: {"vf port_guid"},
		}[c.field]...)
	}
	return names
}

// undoVFMAC restores the MAC that the PF enforces. If the driver always refuses zeros, the PF gets
// the neutral MAC instead. undoVFMAC returns the MAC that the PF enforces now, and the refusal.
func (e *Engine) undoVFMAC(
	ctx context.Context, p patience, pf *PF, r pfReport, before Snapshot,
) (function.MAC, error) {
	was := before.VF.MAC
	order := vfChanges(*r.vf, r.vf.with(nil, was)) // none or one: only the MAC differs
	if len(order) == 0 {
		return r.vf.MAC, nil
	}

	err := e.changeVF(ctx, p, pf, r.index, order[0])
	if err == nil {
		return was, nil
	}

	neutral := neutralMAC(pf, before)
	if passes(err) || !isZero(was) || r.vf.MAC == neutral || neutral == "" {
		return r.vf.MAC, err
	}

	for _, c := range vfChanges(*r.vf, r.vf.with(nil, neutral)) {
		if other := e.changeVF(ctx, p, pf, r.index, c); other != nil {
			return r.vf.MAC, errors.Join(err, other)
		}
	}

	return neutral, err
}

// undoNetdev restores the properties of the netdev itself.
func (e *Engine) undoNetdev(
	ctx context.Context, p patience, index int, before, now Snapshot, refused refusals,
) {
	flags := func(what string, flags, mask uint32) error {
		return e.step(what, func() error {
			return p.retry(ctx, busy, func() error { return e.set(e.host, index, flags, mask) })
		})
	}

	refused.add(e.dropForeignAltNames(e.host, index, now, before.AltNames), "altnames")
	left := compare(before, now)
	// Many drivers accept a new MAC only while the netdev is down. A link mode takes effect when
	// the netdev comes up.
	reset := slices.ContainsFunc(left, func(d property) bool {
		return d.name == "mac" ||
			d.name == "link mode"
	})

	if reset && now.Up {
		refused.add(flags("down", 0, unix.IFF_UP), "mac", "link mode")
	}

	for name, err := range e.undoSettings(before, now, left) {
		refused.add(err, name)
	}

	for _, d := range left {
		if ctx.Err() != nil {
			return
		}
		refused.add(e.undoProperty(ctx, p, index, before, now, d), d.name)
	}

	to, mask := before.flags()
	if seen, _ := now.flags(); reset || seen&mask != to {
		if err := flags("flags", to, mask); err != nil {
			refused.add(err, flagNames(left)...)
		}
	}

	for _, alt := range before.AltNames {
		if !slices.Contains(now.AltNames, alt) {
			refused.add(e.step("altname "+alt, func() error {
				return e.host.library(func(h *netlink.Handle) error {
					return h.LinkAddAltName(reference(index), alt)
				})
			}), "altnames")
		}
	}
}

// flagNames returns the names of the flags among the properties, and "up", because the kernel may
// have refused any of them.
func flagNames(left []property) (names []string) {
	for _, p := range left {
		if p.flag != 0 {
			names = append(names, p.name)
		}
	}
	return append(names, "up")
}

// undoProperty restores a property that has its own message or sysctl.
func (e *Engine) undoProperty(
	ctx context.Context, p patience, index int, before, now Snapshot, d property,
) error {
	what := fmt.Sprintf("%s %v", d.name, d.value)
	switch {
	case d.conf6 != "":
		name := before.Name
		if name == fallbackName {
			name = now.Name
		}
		return e.step(what, func() error { return e.writeConf6(e.host, name, d.conf6, d.value) })
	case d.attribute != nil:
		// Before Linux 6.2 the kernel returns EBUSY for a new name as long as the netdev is up.
		passes := func(err error) bool { return d.name != "name" && busy(err) }
		err := e.step(what, func() error {
			return p.retry(ctx, passes, func() error {
				return e.set(e.host, index, 0, 0, d.attribute)
			})
		})

		switch {
		case err != nil && !busy(err) && d.name == "mac" && before.VF != nil:
			follows := now.VF != nil && now.VF.MAC == before.MAC
			return e.adoptMAC(ctx, p, e.host, index, before.MAC.At(now.MAC), follows)
		case err != nil && d.name == "mtu":
			return e.largestMTU(index, before.MTU, now.MTU, err)
		}

		return err
	case d.name == "XDP program":
		return e.step("detach XDP program "+now.Carried.XDP, func() error {
			return e.detachXDP(index)
		})
	}

	return nil
}

// largestMTU sets the largest MTU that the driver supports, if it is now less than the MTU before.
// For example, the VLAN of a VF may take four bytes from it (i40e, ice). largestMTU returns the
// refusal of the MTU before.
func (e *Engine) largestMTU(index, before, now int, refused error) error {
	message, err := e.host.ask(index)
	if err != nil {
		return errors.Join(refused, err)
	}

	attrs, err := links.Attributes(message)
	if err != nil {
		return errors.Join(refused, err)
	}

	largest := int(attrs.Uint32(unix.IFLA_MAX_MTU))
	if largest == 0 || largest >= before || largest == now {
		return refused
	}

	err = e.step(fmt.Sprintf("mtu %d", largest), func() error {
		return e.set(e.host, index, 0, 0, number(unix.IFLA_MTU, largest))
	})
	return errors.Join(refused, err)
}

// detachXDP removes the pod's programs in every mode. The kernel requires a mode for each request,
// and accepts a mode without a program.
func (e *Engine) detachXDP(index int) error {
	const noProgram = math.MaxUint32 // -1 as a file descriptor
	var errs []error
	for _, mode := range []uint32{
		nl.XDP_FLAGS_DRV_MODE, nl.XDP_FLAGS_SKB_MODE, unix.XDP_FLAGS_HW_MODE,
	} {
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(noProgram))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
		err := e.host.set(index, 0, 0, attr)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("is held by a BPF link of the pod, which ends with the pod's "+
				"program: %w", err)
		}

		errs = append(errs, err)
	}

	return errors.Join(errs...)
}
