package netdev

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// fallbackName makes the kernel find a free name: the host's own name for the netdev is taken.
const fallbackName = "xpu%d"

// Restore brings a netdev back to the host as it was before, wherever it is and whatever state it is in, and reads
// back that it is so. device.Name is where the caller last saw the netdev on the host, "" where it did not. A netdev
// that is as it was is not touched. Of a Function without a netdev it restores what the PF enforces. An error says what
// is left; the next call continues. See [ErrGone] and [ErrAway].
func (e *Engine) Restore(ctx context.Context, device Device, before Snapshot, place Place) (Restored, error) {
	device = device.as(before)
	if before.userspace() {
		return Restored{}, e.restoreUserspace(ctx, device, before)
	}
	pod, err := e.dialPlace(place)
	if err != nil {
		return Restored{}, err
	}
	index := before.Identity.Index
	if pod != nil {
		defer pod.close()
		moved, err := e.moveToHost(pod, device, before, place)
		if err != nil {
			return Restored{}, err
		}
		if moved != 0 {
			index = moved
		}
	}
	l, err := find(e.host, before.Identity, Identity.sameOnHost, index, device.Name, before.Name)
	switch {
	case err != nil:
		return Restored{}, err
	case l == nil && pod != nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrAway)
	case l == nil:
		return Restored{}, fmt.Errorf("%s: %w", before.Name, ErrGone)
	}
	return e.reconcile(ctx, device, before, l)
}

// moveToHost moves a netdev back with all that one message can restore, and returns its index, 0 where it is not in
// the pod. Only a netdev that then still is in the pod is an error: what else failed, reconcile does again.
func (e *Engine) moveToHost(pod *conn, device Device, before Snapshot, place Place) (int, error) {
	l, err := find(pod, before.Identity, Identity.same, place.Index)
	if err != nil || l == nil {
		return 0, err
	}
	index := l.Attrs().Index
	now := snapshotOf(l)
	if err := e.dropForeignAltNames(pod, index, now, before.AltNames); err != nil {
		return 0, fmt.Errorf("netdev %s in the pod: %w", now.Name, err)
	}
	if err := e.dropStacked(pod, index); err != nil {
		return 0, fmt.Errorf("netdev %s in the pod: %w", now.Name, err)
	}
	e.freeMAC(device.PF, before)
	flags := before.flags()
	if before.Conf != nil {
		flags &^= unix.IFF_UP // until the host's sysctls are there again, by which IPv6 starts
	}
	to := change{netns: int(e.hostNS), name: before.Name, alias: &before.Alias, txQLen: &before.TxQLen, flags: &flags}
	if now.MTU != before.MTU {
		to.mtu = before.MTU
	}
	if now.MAC != before.MAC {
		to.mac = before.MAC
	}
	e.trace("move to host")
	failed := pod.change(index, to)
	if failed == nil {
		return index, nil
	}
	if l, err = pod.at(index); err != nil || l == nil {
		return index, err
	}
	return index, e.moveBare(pod, index, now, failed)
}

// moveBare moves a netdev of which some name is taken on the host: with no name but one that the kernel finds.
func (e *Engine) moveBare(pod *conn, index int, now Snapshot, failed error) error {
	if err := e.dropForeignAltNames(pod, index, now, nil); err != nil {
		return errors.Join(failed, fmt.Errorf("netdev %s in the pod: %w", now.Name, err))
	}
	e.trace("move to host under another name")
	if err := pod.change(index, change{netns: int(e.hostNS), name: fallbackName}); err != nil {
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

// freeMAC takes the pod's administrative MAC from the VF, without which some drivers refuse the netdev its own one. A
// failure shows again in reconcile.
func (e *Engine) freeMAC(pf *PF, before Snapshot) {
	if pf == nil {
		return
	}
	if now, err := e.host.vf(pf); err == nil {
		_ = e.undoVF(pf, macChange(*now, *before.VF))
	}
}

// reconcile undoes on the host what differs. A second round catches what was in the way of something else in the
// first, and what a driver only takes while the netdev is in another state.
func (e *Engine) reconcile(ctx context.Context, device Device, before Snapshot, l netlink.Link) (Restored, error) {
	const rounds = 2
	index := l.Attrs().Index
	var failed error
	for round := 0; ; round++ {
		l, err := e.host.at(index)
		if err == nil && l == nil {
			err = fmt.Errorf("%s: %w", before.Name, ErrGone)
		}
		if err != nil {
			return Restored{}, err
		}
		seen, err := e.whole(l)
		if err != nil {
			return Restored{}, err
		}
		now, err := e.complete(ctx, seen, device)
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
			return Restored{}, errors.Join(fmt.Errorf("netdev %s is not as it was: %s", now.Name, strings.Join(left, "; ")), failed)
		}
		failed = e.undo(ctx, index, device, accepted, now)
	}
}

// acceptTaken is what the netdev can be at best: without the names that another netdev of the host has by now.
func (e *Engine) acceptTaken(before, now Snapshot) (accepted Snapshot, notes []string, err error) {
	taken := func(name string) (bool, error) {
		other, err := e.host.with(name)
		return other != nil && other.Attrs().Index != now.Identity.Index, err
	}
	accepted = before
	accepted.AltNames = nil
	for _, alt := range before.AltNames {
		lost, err := taken(alt)
		if err != nil {
			return Snapshot{}, nil, err
		}
		if lost {
			notes = append(notes, fmt.Sprintf("altname %s is taken by another netdev", alt))
			continue
		}
		accepted.AltNames = append(accepted.AltNames, alt)
	}
	lost, err := taken(before.Name)
	if err != nil || !lost {
		return accepted, notes, err
	}
	if accepted.Name = now.Name; !isFallback(now.Name) {
		accepted.Name = fallbackName
	}
	return accepted, append(notes, fmt.Sprintf("name %s is taken by another netdev", before.Name)), nil
}

func isFallback(name string) bool {
	prefix, _, _ := strings.Cut(fallbackName, "%")
	number, ok := strings.CutPrefix(name, prefix)
	return ok && number != "" && strings.Trim(number, "0123456789") == ""
}

// undo sets every property that differs, each with its own message, so that one that is refused does not keep the
// others.
func (e *Engine) undo(ctx context.Context, index int, device Device, before, now Snapshot) error {
	var errs []error
	if now.VF != nil && before.VF != nil { // some drivers refuse the netdev a MAC that is not the one the PF set
		errs = append(errs, e.undoVF(device.PF, macChange(*now.VF, *before.VF)))
		now.VF = new(now.VF.with(nil, before.VF.MAC))
	}
	errs = append(errs, e.dropForeignAltNames(e.host, index, now, before.AltNames))
	apply := func(differs bool, what string, to change) {
		if !differs {
			return
		}
		e.trace(what)
		if err := e.host.change(index, to); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	apply(now.Name != before.Name, "rename to "+before.Name, change{name: before.Name})
	if now.MAC != before.MAC {
		errs = append(errs, e.undoMAC(index, before, now.Up))
	}
	apply(now.MTU != before.MTU, fmt.Sprintf("MTU %d", before.MTU), change{mtu: before.MTU})
	apply(now.Alias != before.Alias, "alias", change{alias: &before.Alias})
	apply(now.TxQLen != before.TxQLen, "txqlen", change{txQLen: &before.TxQLen})
	errs = append(errs, e.undoCarried(index, before.Carried, now.Carried, now.Up))
	// Not before the MTU: below 1280 bytes there is no IPv6.
	name := before.Name
	if name == fallbackName {
		name = now.Name
	}
	errs = append(errs, e.undoConf(index, name, before.Conf, now.Conf))
	flags := before.flags()
	modeChanged := before.Carried != nil && now.Carried != nil && before.Carried.LinkMode != now.Carried.LinkMode
	apply(now.flags() != flags || now.MAC != before.MAC || modeChanged, "flags", change{flags: &flags})
	for _, alt := range before.AltNames {
		if slices.Contains(now.AltNames, alt) {
			continue
		}
		e.trace("altname " + alt)
		if err := e.host.LinkAddAltName(reference(index), alt); err != nil {
			errs = append(errs, fmt.Errorf("altname %s: %w", alt, err))
		}
	}
	return errors.Join(append(errs, e.unenforce(ctx, device, now, before))...)
}

// undoMAC gives the netdev its MAC back, and leaves it down: many drivers want it down for a new one.
func (e *Engine) undoMAC(index int, before Snapshot, up bool) error {
	if up {
		e.trace("down")
		down := uint32(0)
		if err := e.host.change(index, change{flags: &down}); err != nil {
			return fmt.Errorf("down: %w", err)
		}
	}
	e.trace("MAC " + string(before.MAC))
	err := e.host.change(index, change{mac: before.MAC})
	if err != nil && before.VF != nil {
		err = e.adoptMAC(e.host, index, before.MAC)
	}
	if err != nil {
		return fmt.Errorf("MAC %s: %w", before.MAC, err)
	}
	return nil
}

// unenforce makes the PF and the eswitch enforce what they did before.
func (e *Engine) unenforce(ctx context.Context, device Device, now, before Snapshot) error {
	var failed error
	if now.VF != nil && before.VF != nil {
		failed = e.undoVF(device.PF, allChanges(*now.VF, *before.VF))
	}
	return errors.Join(failed, e.changeRate(ctx, device, now.Rate, before.Rate))
}

// undoVF tells the PF each thing, so that one that is refused does not keep the others.
func (e *Engine) undoVF(pf *PF, changes []vfChange) error {
	var errs []error
	for _, c := range changes {
		errs = append(errs, e.changeVF(pf, c))
	}
	return errors.Join(errs...)
}
