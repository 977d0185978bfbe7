package netdev

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// fallbackName makes the kernel find a free name, which matches fallback. It is for a netdev whose own name is taken.
const fallbackName = "xpu%d"

var fallback = regexp.MustCompile("^xpu[0-9]+$")

// Restore brings a netdev back to the host as it was before, wherever it is and whatever state it is in, and verifies it.
// device.Name is the name that the caller last saw on the host, or "". A netdev that is as it was is not touched. Of a
// Function without a netdev Restore restores what the PF and the eswitch enforce; where they do not tell, the Function is
// gone. An error says what is left, and the next call continues. See [ErrGone] and [ErrAway].
func (e *Engine) Restore(_ context.Context, device Device, before Snapshot, place Place) (Restored, error) {
	device = device.as(before)
	if before.userspace() {
		return e.reconcile(device, before, 0)
	}
	pod, l, err := e.locate(place, before.Identity)
	if err != nil {
		return Restored{}, err
	}
	defer pod.close()
	index := before.Identity.Index
	if l != nil {
		index = l.Identity.Index
		if err := e.moveToHost(pod, l.Snapshot, device, before); err != nil {
			return Restored{}, err
		}
	}
	l, err = find(e.host, before.Identity, Identity.sameOnHost, index, device.Name, before.Name)
	switch {
	case err != nil:
		return Restored{}, err
	case l == nil && pod != nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrAway)
	case l == nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrGone)
	}
	return e.reconcile(device, before, l.Identity.Index)
}

// moveToHost moves a netdev and restores what it can by one message. It fails only if the netdev is still in the pod then.
func (e *Engine) moveToHost(pod *conn, now Snapshot, device Device, before Snapshot) error {
	index := now.Identity.Index
	err := e.dropForeignAltNames(pod, index, now, before.AltNames)
	if err == nil {
		err = e.dropStacked(pod, index)
	}
	if err != nil {
		return fmt.Errorf("netdev %s in the pod: %w", now.Name, err)
	}
	if device.PF != nil { // some drivers refuse the netdev its own MAC while the PF gives the VF the pod's
		if vf, err := e.host.vf(device.PF); err == nil && vf != nil {
			_ = e.undoVF(device.PF, *vf, vf.with(nil, before.VF.MAC)) // reconcile repeats it, and reports the error
		}
	}
	flags, mask := before.flags()
	if before.Conf != nil {
		flags &^= unix.IFF_UP // until the host's sysctls are there again, by which IPv6 starts
	}
	now.Carried, now.Conf = nil, nil // which reconcile restores
	toHost := number(unix.IFLA_NET_NS_FD, int(e.host.ns))
	message := []*nl.RtAttr{toHost}
	for _, d := range compare(before, now) {
		if d.attribute != nil {
			message = append(message, d.attribute)
		}
	}
	e.trace("move to host")
	failed := pod.set(index, flags, mask, message...)
	if failed == nil {
		return nil
	}
	if l, err := pod.at(index); err != nil || l == nil {
		return err
	}
	// One of its names may be taken on the host: it moves without altnames, and with a name that the kernel finds.
	if err := e.dropForeignAltNames(pod, index, now, nil); err != nil {
		return errors.Join(failed, fmt.Errorf("netdev %s in the pod: %w", now.Name, err))
	}
	e.trace("move to host under another name")
	if err := pod.set(index, 0, 0, toHost, text(unix.IFLA_IFNAME, fallbackName)); err != nil {
		return fmt.Errorf("netdev %s: move to the host: %w", now.Name, errors.Join(failed, err))
	}
	return nil
}

// dropForeignAltNames removes the altnames that are not among keep.
func (e *Engine) dropForeignAltNames(c *conn, index int, now Snapshot, keep []string) error {
	for _, alt := range now.AltNames {
		if slices.Contains(keep, alt) {
			continue
		}
		if err := e.dropAltName(c, index, alt); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return nil
}

// reconcile undoes the differences on the host. It takes a second round for properties that can only be restored after others.
func (e *Engine) reconcile(device Device, before Snapshot, index int) (Restored, error) {
	const rounds = 2
	var failed error
	for round := 0; ; round++ {
		var now Snapshot
		if !before.userspace() {
			l, err := e.host.at(index)
			if err != nil {
				return Restored{}, err
			}
			if l == nil {
				return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrGone)
			}
			now = l.Snapshot
		}
		now, err := e.complete(now, device)
		if err != nil {
			return Restored{}, err
		}
		accepted, notes, err := e.acceptTaken(before, now)
		if err != nil {
			return Restored{}, err
		}
		left := Diff(accepted, now)
		if len(left) == 0 {
			return Restored{Name: now.Name, Notes: notes}, nil
		}
		if round == rounds {
			return Restored{}, errors.Join(fmt.Errorf("%s is not as it was: %s", now.title(), strings.Join(left, "; ")), failed)
		}
		failed = e.undo(index, device, accepted, now)
	}
}

// acceptTaken returns before without the names that another netdev of the host has by now, and a note about each of these.
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
	accepted.AltNames = slices.DeleteFunc(slices.Clone(before.AltNames), func(alt string) bool { return taken("altname", alt) })
	if taken("name", before.Name) {
		if accepted.Name = now.Name; !fallback.MatchString(now.Name) {
			accepted.Name = fallbackName
		}
	}
	return accepted, notes, err
}

// undo restores each property that differs by a message of its own, and goes on after one that is refused.
func (e *Engine) undo(index int, device Device, before, now Snapshot) error {
	var errs []error
	if now.VF != nil && before.VF != nil { // some drivers refuse the netdev a MAC that is not the one the PF set
		withMAC := now.VF.with(nil, before.VF.MAC)
		errs = append(errs, e.undoVF(device.PF, *now.VF, withMAC))
		now.VF = &withMAC
	}
	errs = append(errs, e.dropForeignAltNames(e.host, index, now, before.AltNames))
	left := compare(before, now)
	// Many drivers want the netdev to be down for a new MAC, and a link mode has its effect when the netdev comes up.
	reset := slices.ContainsFunc(left, func(d property) bool { return d.name == "mac" || d.name == "link mode" })
	if reset && now.Up {
		errs = append(errs, e.step("down", func() error { return e.host.set(index, 0, unix.IFF_UP) }))
	}
	for _, d := range left {
		errs = append(errs, e.undoProperty(index, before, now, d))
	}
	flags, mask := before.flags()
	if seen, _ := now.flags(); reset || seen&mask != flags {
		errs = append(errs, e.step("flags", func() error { return e.host.set(index, flags, mask) }))
	}
	for _, alt := range before.AltNames {
		if !slices.Contains(now.AltNames, alt) {
			errs = append(errs, e.step("altname "+alt, func() error { return e.host.LinkAddAltName(reference(index), alt) }))
		}
	}
	if now.VF != nil && before.VF != nil {
		errs = append(errs, e.undoVF(device.PF, *now.VF, *before.VF))
	}
	return errors.Join(append(errs, e.changeRate(device, now.Rate, before.Rate))...)
}

// undoProperty restores a property that has a message, or a sysctl, of its own.
func (e *Engine) undoProperty(index int, before, now Snapshot, d property) error {
	what := fmt.Sprintf("%s %v", d.name, d.value)
	switch {
	case d.conf6 != "":
		name := before.Name
		if name == fallbackName {
			name = now.Name
		}
		return e.step(what, func() error { return e.writeConf6(e.host, name, d.conf6, d.value) })
	case d.attribute != nil:
		return e.step(what, func() error {
			err := e.host.set(index, 0, 0, d.attribute)
			if err != nil && d.name == "mac" && before.VF != nil {
				err = e.adoptMAC(e.host, index, before.MAC)
			}
			return err
		})
	case d.name == "XDP program":
		return e.step("detach XDP program "+now.Carried.XDP, func() error { return e.detachXDP(index) })
	}
	return nil
}

// undoVF goes on after a change that is refused.
func (e *Engine) undoVF(pf *PF, from, to VFState) error {
	var errs []error
	for _, c := range vfChanges(from, to) {
		errs = append(errs, e.changeVF(pf, c))
	}
	return errors.Join(errs...)
}

// detachXDP removes the pod's programs in every mode: the kernel wants the mode to be named, and accepts one without a program.
func (e *Engine) detachXDP(index int) error {
	const noProgram = math.MaxUint32 // -1 as a file descriptor
	var errs []error
	for _, mode := range []uint32{nl.XDP_FLAGS_DRV_MODE, nl.XDP_FLAGS_SKB_MODE, unix.XDP_FLAGS_HW_MODE} {
		attr := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
		attr.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(noProgram))
		attr.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
		err := e.host.set(index, 0, 0, attr)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("is held by a BPF link of the pod, which ends with the pod's program: %w", err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// stacked are the kinds of virtual netdevs that go on to use the netdev below them when that moves to another namespace.
var stacked = []string{"vlan", "macvlan", "macvtap", "ipvlan", "ipvtap", "macsec"}

// dropStacked deletes the virtual netdevs that the pod made on top of the netdev.
func (e *Engine) dropStacked(pod *conn, index int) error {
	links, err := request.Consistent(pod.LinkList)
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().ParentIndex != index || l.Attrs().NetNsID >= 0 || !slices.Contains(stacked, l.Type()) {
			continue
		}
		e.trace("delete " + l.Attrs().Name + " on top of it")
		if err := pod.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("delete %s %s, which the pod made on top of it: %w", l.Type(), l.Attrs().Name, err)
		}
	}
	return nil
}
