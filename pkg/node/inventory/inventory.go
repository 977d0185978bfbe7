// SPDX-License-Identifier: Apache-2.0

// Package inventory lists the network functions and accelerators of a node. A Function is listed
// for as long as its PCI device exists, whatever network namespace its netdev is in. The package
// reads sysfs when the kernel reports a change, and at no other time.
package inventory

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/listen"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/notify"
)

const (
	// quiet is how long the kernel must have sent no event before a scan. The pause lets the kernel
	// complete the change: RTM_DELLINK, for example, is sent before the netdev disappears from
	// sysfs.
	quiet = 50 * time.Millisecond
	// patience is the longest time from an event to the scan, however many events follow.
	patience = 500 * time.Millisecond
	// retry is the pause after a scan that could not read the PCI bus or the host's netdevs.
	retry = time.Second
	// slowestRetry is the longest pause between reads of hardware that fails to answer.
	slowestRetry = 10 * time.Minute
)

// Options of an [Inventory]. Only SysRoot is required.
type Options struct {
	// SysRoot is where the host's sysfs is mounted, "/sys".
	SysRoot string
	// NetNS is the path of the host's network namespace; "" for the process's own.
	NetNS string
	// HostNetdevs returns what the host uses its netdevs for; nil asks the kernel.
	HostNetdevs func() (hostuse.Netdevs, error)
	// DDPProfile returns the name of the DDP package that a PF with driver ice runs, or "" if it
	// has none; nil asks devlink.
	DDPProfile func(pf pci.Address) (string, error)
	// WaitForCards makes scans wait for the answers of cards, which may take seconds, or for ever if
	// a card hangs. It is for programs that scan once. Without it, a scan waits for the first answer
	// about a PF's DDP package for 2 s at most, and for nothing else.
	WaitForCards bool
	// Changed, if set, is called after the first scan, and after each scan with a different result.
	// It is called on the goroutine of [Inventory.Run] and must not block.
	Changed func()
	// Registry is for the metrics; nil for none.
	Registry prometheus.Registerer
	Log      logr.Logger
}

// Inventory has the Functions of a node. Its methods may be called from several goroutines at once,
// except for Run, which may be called only once.
type Inventory struct {
	options Options
	scanner *scanner // used by Run only
	absence absence
	metrics metrics
	synced  chan struct{}

	mutex     sync.RWMutex
	functions []function.Function // replaced by scans, never changed
	byID      map[function.ID]function.Function
}

// New returns an inventory, which is empty until [Inventory.Run] has scanned the node.
func New(options Options) *Inventory {
	return &Inventory{
		options: options,
		scanner: newScanner(options),
		absence: absence{sysfs: sysfs.Root(options.SysRoot)},
		metrics: newMetrics(options.Registry),
		synced:  make(chan struct{}),
	}
}

// Snapshot returns all Functions, sorted by address. The SFs of a PF follow it, sorted by sfnum.
// The caller owns the result.
func (i *Inventory) Snapshot() []function.Function {
	i.mutex.RLock()
	defer i.mutex.RUnlock()
	return slices.Clone(i.functions)
}

// Get returns a Function as the last scan saw it.
func (i *Inventory) Get(id function.ID) (function.Function, bool) {
	i.mutex.RLock()
	defer i.mutex.RUnlock()
	f, ok := i.byID[id]
	return f, ok
}

// Auxiliary finds the SF whose auxiliary device currently has the name, such as "mlx5_core.sf.4".
func (i *Inventory) Auxiliary(name string) (id function.ID, exists bool) {
	for _, f := range i.Snapshot() {
		if f.Kind == function.SF && f.AuxDevice == name && name != "" {
			return f.ID, true
		}
	}
	return function.ID{}, false
}

// ErrNoNetdev is returned for a Function that has no netdev in any network namespace, because it
// has no driver, or because its driver makes no netdev.
var ErrNoNetdev = errors.New("has no netdev in any network namespace")

// Netdev reads from sysfs which name the Function's netdev has on the host at the moment. The name
// is "" while the netdev is in another namespace. The error is an [ErrNoNetdev] if there is no
// netdev at all, and an [fs.ErrNotExist] if the kernel shows other devices and not the Function.
func (i *Inventory) Netdev(id function.ID) (string, error) {
	device, err := i.find(id)
	var dir sysfs.Dir
	var names []string
	if err == nil {
		dir, names, err = netdevsOf(device, i.virtioVDPA(id))
	}

	if err == nil && dir == "" {
		err = ErrNoNetdev
	}
	if err != nil {
		return "", fmt.Errorf("Function %s: %w", id, err)
	}

	return ownNetdev(dir, names), nil
}

// Driver reads from sysfs which kernel driver the Function has at the moment, "" for none. The
// error is an [fs.ErrNotExist] if the kernel shows other devices and not the Function.
func (i *Inventory) Driver(id function.ID) (string, error) {
	device, err := i.find(id)
	driver := ""
	if err == nil {
		driver, err = device.Link("driver")
	}

	if err == nil && driver == "" { // the device may have disappeared in between
		err = i.errIfGone(device)
	}
	if err != nil {
		return "", fmt.Errorf("Function %s: driver: %w", id, err)
	}

	return driver, nil
}

// Inode returns the inode number of the Function's device. A later device at the same address has
// another number; see [sysfs.Dir.Inode]. The error is an [fs.ErrNotExist] if the kernel
// shows other devices and not the Function.
func (i *Inventory) Inode(id function.ID) (uint64, error) {
	device, err := i.find(id)
	if err != nil {
		return 0, fmt.Errorf("Function %s: %w", id, err)
	}

	inode, err := device.Inode()
	if err != nil {
		return 0, fmt.Errorf("Function %s: inode: %w", id, err)
	}
	return inode, nil
}

// virtioVDPA returns the name of the Function's vDPA device on virtio_vdpa, or "" if there is none.
// Before the first scan it reads sysfs.
func (i *Inventory) virtioVDPA(id function.ID) string {
	if f, known := i.Get(id); known {
		return virtioVDPA(f.VDPA)
	}

	device, err := i.find(id)
	if err != nil {
		return ""
	}

	s := newScanner(i.options)
	s.readVDPAs()

	return virtioVDPA(s.vdpas[filepath.Base(string(device))])
}

// Synced waits until the Functions are known. It returns false if ctx ended first.
func (i *Inventory) Synced(ctx context.Context) bool {
	return loop.Wait(ctx, i.synced, 0)
}

// Run scans the Functions at once, and again whenever the kernel reports a change, until ctx ends.
// It then returns nil.
func (i *Inventory) Run(ctx context.Context) error {
	var changes notify.Signal
	events := changes.Subscribe(ctx)

	if devices := i.scanner.sysfs.Dir(sysfs.PCIDevices); !devices.Exists() {
		i.options.Log.Info("This node has no PCI bus, hence no Functions", "path", string(devices))
	}

	var listeners sync.WaitGroup
	defer listeners.Wait()

	for _, source := range sources {
		listeners.Go(func() { source.Follow(ctx, i.options.NetNS, changes.Notify, i.options.Log) })
	}

	i.scanner.cards.follow(ctx, changes.Notify)
	i.scanner.ddp.follow(ctx, changes.Notify)
	pauses := loop.Backoff(retry, slowestRetry)
	var failure error
	for {
		var pause time.Duration
		err := i.scan()
		if i.scanner.unread() {
			pause = pauses.Step()
		} else {
			pauses = loop.Backoff(retry, slowestRetry)
		}

		if err != nil || i.scanner.problems[problem{"", reasonHostUse}] != nil {
			// Reading the host's netdevs fails if they change during the read, and no event may
			// follow.
			pause = retry
		}

		if err != nil && (failure == nil || failure.Error() != err.Error()) {
			i.options.Log.Error(err, "Cannot read the Functions, keeping what is known", "retry",
				retry.String())
		}

		failure = err
		if !loop.Wait(ctx, events, pause) {
			return nil
		}

		loop.Debounce(ctx, events, quiet, patience)
	}
}

// scan reads all Functions, reports a change, and logs problems that the previous scan did not
// have.
func (i *Inventory) scan() error {
	previous := i.scanner.problems
	begin := time.Now()
	functions, err := i.scanner.scan()
	if err == nil {
		i.absence.look()
	} else {
		i.absence.forget()
	}
	i.metrics.duration.Observe(time.Since(begin).Seconds())

	for p, err := range i.scanner.problems {
		if old := previous[p]; old == nil || old.Error() != err.Error() {
			i.metrics.skipped.WithLabelValues(string(p.why)).Inc()
			i.options.Log.Info("Entry of sysfs skipped or incomplete", "entry", p.entry, "reason",
				p.why, "error", err.Error())
		}
	}

	if err != nil {
		return err
	}

	first := i.byID == nil // only this goroutine writes the field
	if !first && reflect.DeepEqual(i.functions, functions) {
		return nil
	}

	byID := make(map[function.ID]function.Function, len(functions))
	for _, f := range functions {
		byID[f.ID] = f
	}

	i.mutex.Lock()
	i.functions, i.byID = functions, byID
	i.mutex.Unlock()
	i.metrics.setFunctions(functions)

	if first {
		close(i.synced)
	}

	if i.options.Changed != nil {
		i.options.Changed()
	}

	return nil
}

// find returns the directory of a Function's device. The error is an [fs.ErrNotExist] only if the
// kernel shows other devices, all of which can be read, and not this one.
func (i *Inventory) find(id function.ID) (sysfs.Dir, error) {
	root := sysfs.Root(i.options.SysRoot)
	if _, isSF := id.SFNum(); !isSF {
		return root.PCI(id.Address), i.errIfGone(root.PCI(id.Address))
	}

	sfs, err := subfunctions(root)
	if err != nil {
		return "", err
	}

	var unknown error
	for _, sf := range sfs {
		switch {
		case sf.err == nil && sf.id == id:
			return sf.dir, nil
		case !errors.Is(sf.err, fs.ErrNotExist): // that one was just being removed
			unknown = cmp.Or(unknown, sf.err)
		}
	}
	if unknown != nil {
		return "", fmt.Errorf("an SF that may be this one: %w", unknown)
	}

	// No device has the number, thus the SF's former name is not known. Any name that no device has
	// shows whether the bus can be read at all.
	return "", i.errIfGone(root.Auxiliary("none"))
}

// errIfGone returns an [fs.ErrNotExist] if the kernel has no such device, and another error if that
// is not known.
func (i *Inventory) errIfGone(device sysfs.Dir) error {
	gone, err := sysfs.Root(i.options.SysRoot).Gone(device)
	if gone {
		return fs.ErrNotExist
	}
	return err
}

// sources has the kernel's events that a change of Functions causes.
var sources = [...]listen.Source{
	listen.Links,
	// Group 1 has the kernel's own uevents, group 2 those of udev (lib/kobject_uevent.c).
	{Name: "uevent", Protocol: unix.NETLINK_KOBJECT_UEVENT, Groups: listen.Groups(1),
		Matters: ueventMatters},
	{
		Name: "routes", Protocol: unix.NETLINK_ROUTE,
		Groups:  listen.Groups(unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE),
		Matters: routeMatters,
	},
	{
		Name: "addresses", Protocol: unix.NETLINK_ROUTE,
		Groups:  listen.Groups(unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR),
		Matters: addressMatters,
	},
}

// ueventMatters reports whether a uevent, "add@/devices/..\0ACTION=add\0..\0SUBSYSTEM=pci\0..", is
// about a kind of device that a scan reads.
func ueventMatters(message []byte) bool {
	for variable := range bytes.SplitSeq(message, []byte{0}) {
		if subsystem, ok := bytes.CutPrefix(variable, []byte("SUBSYSTEM=")); ok {
			return slices.Contains([]string{
				"pci", "net", "virtio", "auxiliary", "infiniband", "vdpa", "node",
			}, string(subsystem))
		}
	}
	return false
}

// routeMatters reports whether a message of rtnetlink is about a route that counts as a use of its
// netdev. The message is a struct nlmsghdr, then a struct rtmsg (include/uapi/linux/rtnetlink.h).
// The kernel's own routes do not count, because they come and go with every netdev of a pod.
func routeMatters(message []byte) bool {
	if len(message) < unix.SizeofNlMsghdr+unix.SizeofRtMsg {
		return false
	}
	kind, route := binary.NativeEndian.Uint16(message[4:]), message[unix.SizeofNlMsghdr:]
	table, protocol, destinationType := route[4], route[5], route[7]
	return (kind == unix.RTM_NEWROUTE || kind == unix.RTM_DELROUTE) &&
		table != unix.RT_TABLE_LOCAL && protocol != unix.RTPROT_KERNEL &&
		destinationType == unix.RTN_UNICAST
}

// addressMatters reports whether a message of rtnetlink is about an address that counts as a use of
// its netdev. The message is a struct nlmsghdr, then a struct ifaddrmsg
// (include/uapi/linux/if_addr.h). IPv6 link-local addresses do not count, because every netdev gets
// one.
func addressMatters(message []byte) bool {
	if len(message) < unix.SizeofNlMsghdr+unix.SizeofIfAddrmsg {
		return false
	}
	kind, address := binary.NativeEndian.Uint16(message[4:]), message[unix.SizeofNlMsghdr:]
	family, scope := address[0], address[3]
	return (kind == unix.RTM_NEWADDR || kind == unix.RTM_DELADDR) &&
		!(family == unix.AF_INET6 && scope == unix.RT_SCOPE_LINK)
}
