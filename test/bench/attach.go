// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/netaddr"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// timedJournal measures the time of the journal's writes.
type timedJournal struct {
	*journal.Journal
	spent  time.Duration
	writes int
}

func (j *timedJournal) Put(a journal.Attachment) error {
	defer j.count(time.Now())
	return j.Journal.Put(a)
}

func (j *timedJournal) Delete(id function.ID) error {
	defer j.count(time.Now())
	return j.Journal.Delete(id)
}

func (j *timedJournal) count(begin time.Time) {
	j.spent += time.Since(begin)
	j.writes++
}

// attachment is a node's attach engine, assembled like in package agent, with a VF and a pod's
// namespace.
type attachment struct {
	host      *host
	vf        simulate.Function
	inventory *inventory.Inventory
	journal   *timedJournal
	engine    *netdev.Engine
	lifecycle *lifecycle.Manager
	// handle of the node's namespace, which is the process's own, like an agent's
	own        *netlink.Handle
	ownNS      *os.File
	sysRoot    string // where sysfs shows the netdevs of this namespace
	pod        *netns.Namespace
	syncedFile *os.File
}

// times are the times of one round.
type times struct {
	move, moveBack time.Duration // without the engine
	attach, detach time.Duration // without the journal
	attachJournal  time.Duration
	attachWrites   int
	attachFsync    time.Duration // fsync of as many writes, without the engine
}

// measureAttach compares attach and detach with a bare move of the same netdev into a namespace and
// back.
func measureAttach(ctx context.Context, b *bench) (out []Measurement, err error) {
	a, err := b.newAttachment(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, a.close()) }()

	into := Measurement{What: "attach a Function, without the journal", Unit: Seconds,
		Reference: "bare move into the pod", Goal: atMostTimes(1.15)}
	back := Measurement{What: "detach a Function, without the journal", Unit: Seconds,
		Reference: "bare move back", Goal: atMostTimes(1.15)}
	writes := Measurement{What: "journal of an attach", Unit: Seconds}
	for round := range b.runs(60) + b.warmUp() {
		t, err := a.round(ctx, round)
		if err != nil {
			return nil, err
		}
		if round < b.warmUp() {
			continue // warm-up
		}

		into.Samples = append(into.Samples, t.attach.Seconds())
		into.ReferenceSamples = append(into.ReferenceSamples, t.move.Seconds())
		back.Samples = append(back.Samples, t.detach.Seconds())
		back.ReferenceSamples = append(back.ReferenceSamples, t.moveBack.Seconds())
		writes.Samples = append(writes.Samples, t.attachJournal.Seconds())
		writes.Reference = fmt.Sprintf("%d x 4 kB written and synced", t.attachWrites)
		writes.ReferenceSamples = append(writes.ReferenceSamples, t.attachFsync.Seconds())
	}

	return []Measurement{into, back, writes}, nil
}

func (b *bench) newAttachment(ctx context.Context) (_ *attachment, err error) {
	a := &attachment{}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.close())
		}
	}()

	if a.host, err = b.newHost(ctx, pfs); err != nil {
		return nil, err
	}

	a.vf = a.host.functions[len(a.host.functions)-1]
	if a.own, err = netlink.NewHandle(); err != nil {
		return nil, err
	}
	if a.ownNS, err = os.Open("/proc/self/ns/net"); err != nil {
		return nil, err
	}

	a.sysRoot = a.host.path("sysfs")
	err = errors.Join(os.Mkdir(a.sysRoot, 0o755), unix.Mount("sysfs", a.sysRoot, "sysfs", 0, ""))
	if err != nil {
		return nil, fmt.Errorf("mount sysfs: %w", err)
	}
	if a.pod, err = netns.Make(a.host.path("pod.netns")); err != nil {
		return nil, err
	}

	for _, f := range a.host.functions {
		if err := a.addNetdev(f); err != nil {
			return nil, err
		}
	}

	a.inventory = inventory.New(inventory.Options{
		SysRoot: a.host.simulated.SysRoot(), Log: logr.Discard(),
	})
	records, err := journal.Open(filepath.Join(a.host.path("state"), "journal.db"))
	if err != nil {
		return nil, err
	}

	a.journal = &timedJournal{Journal: records}
	if a.syncedFile, err = os.Create(filepath.Join(a.host.path("state"), "reference")); err != nil {
		return nil, err
	}
	if a.engine, err = netdev.New(netdev.Options{SysRoot: a.sysRoot}); err != nil {
		return nil, err
	}

	const bootID = "bench"
	a.lifecycle = lifecycle.New(a.journal, a.engine, a.inventory, lifecycle.Options{BootID: bootID},
		logr.Discard())
	return a, nil
}

// addNetdev creates the netdev of a Function: one end of a veth pair, whose other end also stays in
// the node's namespace.
func (a *attachment) addNetdev(f simulate.Function) error {
	return a.own.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: f.Netdev}, PeerName: f.Representor,
	})
}

func (a *attachment) close() error {
	var errs []error
	if a.engine != nil {
		errs = append(errs, a.engine.Close())
	}

	if a.syncedFile != nil {
		errs = append(errs, a.syncedFile.Close())
	}

	if a.journal != nil {
		errs = append(errs, a.journal.Close())
	}

	if a.pod != nil {
		errs = append(errs, a.pod.Close())
	}

	if a.sysRoot != "" {
		errs = append(errs, unmount(a.sysRoot))
	}

	if a.ownNS != nil {
		errs = append(errs, a.ownNS.Close())
	}

	if a.own != nil {
		for _, f := range a.host.functions {
			if l, err := a.own.LinkByName(f.Netdev); err == nil {
				errs = append(errs, a.own.LinkDel(l))
			}
		}
		a.own.Close()
	}

	if a.host != nil {
		errs = append(errs, a.host.close())
	}

	return errors.Join(errs...)
}

// round moves the netdev, and then attaches and detaches it.
func (a *attachment) round(ctx context.Context, number int) (t times, err error) {
	settle()
	if t.move, err = moveBare(a.vf.Netdev, a.own, a.pod.Fd()); err != nil {
		return t, err
	}

	if err := a.addAddress(); err != nil {
		return t, err
	}

	settle()
	if t.moveBack, err = moveBare(a.vf.Netdev, a.pod.Handle(), int(a.ownNS.Fd())); err != nil {
		return t, err
	}

	id := function.ID{Address: a.vf.Address}
	claim := types.UID(fmt.Sprintf("claim-%d", number))
	err = a.lifecycle.Reserve(ctx, journal.Attachment{
		Function: id, PF: a.vf.PF, VFIndex: a.vf.Index,
		Claim: journal.Claim{Namespace: "default", Name: "claim", UID: claim},
		Pod:   journal.Pod{Namespace: "default", Name: "pod", UID: "pod"},
		Interface: function.Interface{
			Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01",
			Addresses: []netip.Prefix{podAddress()},
		},
	})

	if err != nil {
		return t, err
	}

	sandbox := lifecycle.Sandbox{
		ID: string(claim), NetNS: a.pod.Path(),
		Pod: journal.Pod{Namespace: "default", Name: "pod", UID: "pod"},
	}

	t.attach, t.attachJournal, t.attachWrites, err = a.time(func() error {
		_, err := a.lifecycle.Attach(ctx, id, sandbox)
		return err
	})
	if err != nil {
		return t, err
	}

	t.detach, _, _, err = a.time(func() error { return a.lifecycle.Detach(ctx, id, sandbox.ID) })
	if err != nil {
		return t, err
	}
	if err := a.lifecycle.Unprepare(ctx, claim); err != nil {
		return t, err
	}

	t.attachFsync, err = writeAndSync(a.syncedFile, t.attachWrites)
	return t, err
}

func podAddress() netip.Prefix { return netip.MustParsePrefix("10.10.0.1/24") }

// addAddress sets the netdev in the pod up and gives it the address that an attachment gives it. The
// kernel frees the address during the move back, and waits for this.
func (a *attachment) addAddress() error {
	pod := a.pod.Handle()
	l, err := pod.LinkByName(a.vf.Netdev)
	if err != nil {
		return fmt.Errorf("netdev %s in the pod: %w", a.vf.Netdev, err)
	}

	address := &netlink.Addr{IPNet: netaddr.ToIPNet(podAddress())}
	return errors.Join(pod.LinkSetUp(l), pod.AddrAdd(l, address))
}

// time measures f without the time of its journal writes.
func (a *attachment) time(f func() error) (without, journal time.Duration, writes int, err error) {
	settle()
	spent, written := a.journal.spent, a.journal.writes
	begin := time.Now()
	err = f()
	took := time.Since(begin)
	journal = a.journal.spent - spent
	return took - journal, journal, a.journal.writes - written, err
}

// moveBare moves a netdev to the namespace of a file descriptor with exactly one message to the
// kernel.
func moveBare(netdev string, from *netlink.Handle, to int) (time.Duration, error) {
	l, err := from.LinkByName(netdev)
	if err != nil {
		return 0, fmt.Errorf("netdev %s: %w", netdev, err)
	}
	return timed(func() error { return from.LinkSetNsFd(l, to) })
}

// settle waits until the kernel has finished work that the last measurement left, because a move
// would wait for it too. It returns at a random moment within the timer's tick, because a move
// waits for ticks.
func settle() {
	const grace, tick = 20 * time.Millisecond, 10 * time.Millisecond
	time.Sleep(grace + rand.N(tick))
}

// writeAndSync appends 4 kB n times, and syncs each time.
func writeAndSync(file *os.File, n int) (time.Duration, error) {
	page := make([]byte, 4096)
	begin := time.Now()

	for range n {
		if _, err := file.Write(page); err != nil {
			return 0, err
		}
		if err := file.Sync(); err != nil {
			return 0, err
		}
	}

	return time.Since(begin), nil
}
