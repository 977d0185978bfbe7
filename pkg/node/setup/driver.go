// SPDX-License-Identifier: Apache-2.0

package setup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/sync/singleflight"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle"
)

// Engine takes snapshots of netdevs and restores netdevs to a snapshot.
type Engine interface {
	Snapshot(ctx context.Context, device netdev.Device) (netdev.Snapshot, error)
	Restore(
		ctx context.Context, device netdev.Device, before netdev.Snapshot, place netdev.Place,
	) (netdev.Restored, error)
}

// PCIDrivers binds kernel drivers to PCI Functions by sysfs. Its methods may be called concurrently
// for different Functions. For one Function, the caller must prevent concurrent calls.
type PCIDrivers struct {
	SysRoot string // the host's sysfs, writable: "/sys"
	DevRoot string // the host's device nodes: "/dev"
	// the host's procfs, for the names of programs that still use a Function: "/proc"
	ProcRoot string
	BootID   string // content of /proc/sys/kernel/random/boot_id
	// Functions returns the Functions of the node as the kernel shows them.
	Functions interface {
		Get(function.ID) (function.Function, bool)
		lifecycle.NetdevFinder
	}
	// Fault returns the error that a health reporter shows for a Function, or "". A nil Fault means
	// that no error is ever shown.
	Fault func(function.Function) string
	// Changes returns a channel that receives a value after every change of the Functions, until
	// ctx ends.
	Changes func(ctx context.Context) <-chan struct{}
	Engine  Engine
	// optional; called before every change with a description of the change
	Trace func(step string)
	Log   logr.Logger

	orders singleflight.Group // orders that the kernel is carrying out
}

const (
	// bounds the wait for a driver, its netdev and the inventory, which usually take less than 1 s
	settleTime = 10 * time.Second
	// bounds the wait for the end of a program that was asked to end but still uses a Function
	endTime = 2 * time.Second
)

// Plan adds to the setup what Bind will change: the Function's driver and netdev. It returns an
// error if the setup cannot work.
func (p *PCIDrivers) Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error) {
	f, known := p.Functions.Get(want.Function)
	if !known {
		return nil, errors.New("is gone from this node")
	}

	d := p.device(f.ID)
	own, err := driverOf(d)
	if err != nil {
		return nil, err
	}

	planned := *want.Setup
	planned.Own, planned.BootID = own, p.BootID
	planned.RDMA, planned.RDMADevices = f.RDMA, f.RDMADevices
	serves, err := p.serves(d, own, planned.Driver)
	if err != nil {
		return nil, err
	}
	if serves {
		planned.Driver = own
	}
	if own == planned.Driver {
		return &planned, nil // the driver is bound already and stays
	}

	if err = p.usable(d, f, planned.Driver); err == nil {
		planned.Netdev, err = p.snapshot(ctx, d, want)
	}
	if err != nil {
		return nil, fmt.Errorf("cannot be bound to %s: %w", planned.Driver, err)
	}

	return &planned, nil
}

// serves reports whether the driver that is bound to a device can stay for who wants another one,
// as a variant of vfio-pci can for vfio-pci.
func (p *PCIDrivers) serves(d sysfs.Dir, bound, wanted string) (bool, error) {
	if bound == "" {
		return false, nil
	}
	by, err := d.Passthrough(bound, sysfs.Root(p.SysRoot))
	return function.Function{Driver: bound, Passthrough: by}.HasDriver(wanted), err
}

// usable returns an error if a driver cannot be bound, or must not be.
func (p *PCIDrivers) usable(d sysfs.Dir, f function.Function, driver string) error {
	vfs, err := d.VFs() // the inventory may be behind
	switch n := max(len(vfs), f.NumVFs); {
	case err != nil:
		return err
	case n > 0:
		return fmt.Errorf("it is a PF with %d VFs, which would be lost", n)
	case f.DefaultRoute:
		return errors.New("the node's default route goes over its netdev")
	}

	if fault := p.fault(f); fault != "" {
		return fmt.Errorf("its card is in error: %s", fault)
	}
	if err := p.hasDriver(driver); err != nil {
		return err
	}

	override, err := overrideOf(d)
	if err != nil {
		return err
	}
	if override != "" && override != driver {
		return fmt.Errorf("driver_override is %q, which somebody else set", override)
	}

	return p.isolated(d)
}

// fault returns the error that a health reporter shows for the Function or for its PF, because the
// driver of a card in error may never answer.
func (p *PCIDrivers) fault(f function.Function) string {
	if p.Fault == nil {
		return ""
	}
	return cmp.Or(p.Fault(f), p.Fault(function.OfPF(f.PF)))
}

// snapshot returns the netdev that the kernel removes with the driver, or nil if the driver has
// made no netdev.
func (p *PCIDrivers) snapshot(
	ctx context.Context, d sysfs.Dir, want journal.Attachment,
) (*netdev.Snapshot, error) {
	dir, names, err := d.Netdevs()
	if err != nil {
		return nil, fmt.Errorf("whether it has a netdev is not known: %w", err)
	}

	before, err := lifecycle.Device(p.Functions, want)
	none := errors.Is(err, netdev.ErrNoNetdev)
	switch {
	case none && dir == "":
		return nil, nil
	case none && len(names) == 0:
		return nil,
			errors.New("its netdev is in another network namespace, where somebody may use it")
	case err != nil:
		return nil, err
	}

	links, err := dir.Dir(before.Name).Sorted()
	if err != nil {
		return nil, fmt.Errorf("whether its netdev %s is in use is not known: %w", before.Name, err)
	}

	var users []string // for example bonds, bridges and VLANs on top of the netdev
	for _, name := range links {
		if upper, is := strings.CutPrefix(name, "upper_"); is {
			users = append(users, upper)
		}
	}

	if len(users) > 0 {
		return nil, fmt.Errorf("its netdev %s is in use on the host, by %s", before.Name,
			strings.Join(users, ", "))
	}

	snapshot, err := p.Engine.Snapshot(ctx, before)
	return &snapshot, err
}

// Bind returns once the driver is bound and the inventory shows it. Bind does not repeat steps that
// an earlier Bind has done.
func (p *PCIDrivers) Bind(ctx context.Context, f function.ID, driver string) error {
	if err := p.bind(ctx, p.device(f), driver); err != nil {
		return fmt.Errorf("bind driver %s: %w", driver, err)
	}
	return p.await(ctx, f, "driver "+driver+" and an IOMMU group",
		func(got function.Function) bool {
			return got.Driver == driver && got.IOMMUGroup != ""
		})
}

func (p *PCIDrivers) bind(ctx context.Context, d sysfs.Dir, driver string) error {
	current, err := driverOf(d)
	if err != nil || current == driver {
		return err
	}
	if err := p.hasDriver(driver); err != nil {
		return err // also after a reboot, if the node had the driver before
	}
	// The override keeps other drivers from taking the device when a program has it probed.
	if err := p.setOverride(ctx, d, driver); err != nil {
		return err
	}

	if current != "" {
		if err := p.order(ctx, d, current, "unbind"); err != nil {
			return err
		}
	}

	return p.order(ctx, d, driver, "bind")
}

// Restore returns once the Function has its own driver again and its netdev has its former
// properties. It does nothing for a missing Function. A Function that another program bound to a
// third driver keeps that driver.
func (p *PCIDrivers) Restore(ctx context.Context, a journal.Attachment) error {
	d, o := p.device(a.Function), a.Setup
	if o.Own == o.Driver {
		return nil
	}
	if gone, err := sysfs.Root(p.SysRoot).Gone(d); gone || err != nil {
		return err
	}

	current, err := p.unbind(ctx, d, o.Driver)
	if err == nil && current == "" && o.Own != "" {
		current, err = o.Own, p.bindOwn(ctx, d, o.Own)
	}
	if err != nil {
		return fmt.Errorf("bind driver %q again: %w", o.Own, err)
	}

	if current != o.Own {
		p.Log.Info("The Function has another driver than before, which it keeps", "function",
			a.Function.String(),
			"driver", current, "before", o.Own)
		return nil
	}

	err = p.await(ctx, a.Function, fmt.Sprintf("driver %q", o.Own),
		func(got function.Function) bool { return got.Driver == o.Own })
	if err != nil {
		return err
	}

	return p.restoreNetdev(ctx, a)
}

// unbind takes the device from a driver, and returns the driver that the device has afterwards.
func (p *PCIDrivers) unbind(
	ctx context.Context, d sysfs.Dir, driver string,
) (current string, err error) {
	override, err := overrideOf(d)
	if err != nil {
		return "", err
	}

	if override == driver {
		if err := p.setOverride(ctx, d, ""); err != nil {
			return "", err
		}
	}

	current, err = driverOf(d)
	if err != nil || current != driver {
		return current, err
	}
	if err := p.awaitUnused(ctx, d); err != nil {
		return "", err
	}

	return "", p.order(ctx, d, driver, "unbind")
}

// bindOwn binds the Function's own driver, unless another program binds a driver meanwhile.
func (p *PCIDrivers) bindOwn(ctx context.Context, d sysfs.Dir, own string) error {
	if !sysfs.Root(p.SysRoot).PCIDriver(own).Exists() {
		return errors.New("the node does not have that driver any more: load its module again")
	}
	err := p.order(ctx, d, own, "bind")
	if current, _ := driverOf(d); current == own {
		return nil
	}
	return err
}

// restoreNetdev waits for the netdev that the driver makes, and restores the properties in the
// snapshot.
func (p *PCIDrivers) restoreNetdev(ctx context.Context, a journal.Attachment) error {
	before := a.Setup.Netdev
	if before == nil || a.Setup.BootID != p.BootID {
		return nil
	}

	if err := p.await(ctx, a.Function, "a netdev", func(function.Function) bool {
		name, err := p.Functions.Netdev(a.Function)
		return name != "" || errors.Is(err, fs.ErrNotExist)
	}); err != nil {
		return err
	}

	p.trace("restore netdev " + before.Name)
	var restored netdev.Restored
	// The netdev may not be found at once, because udev and others rename it.
	err := lifecycle.Retry(ctx, lifecycle.Patience(),
		func(ctx context.Context) (done bool, err error) {
			device, _ := lifecycle.Device(p.Functions, a)
			restored, err = p.Engine.Restore(ctx, device, *before, netdev.Place{})
			return err == nil, err
		})

	if err != nil {
		return err
	}

	for _, note := range restored.Notes {
		p.Log.Info("Something of the netdev stays different; its next owner is isolated all the "+
			"same", "function", a.Function.String(), "netdev", restored.Name, "reason", note)
	}

	return nil
}

// await waits until the inventory shows the Function in a state. what describes the state in
// errors.
func (p *PCIDrivers) await(
	ctx context.Context, id function.ID, what string, is func(function.Function) bool,
) error {
	ctx, cancel := context.WithTimeoutCause(ctx, settleTime,
		fmt.Errorf("is not there after %s", settleTime))
	defer cancel()

	err := loop.Until(ctx, p.Changes, func() bool {
		f, known := p.Functions.Get(id)
		return known && is(f)
	})
	if err != nil {
		return fmt.Errorf("wait for %s: %w", what, err)
	}

	return nil
}

// order has the driver carry out an order, "bind" or "unbind", for the device.
func (p *PCIDrivers) order(ctx context.Context, d sysfs.Dir, driver, order string) error {
	return p.write(ctx, d, order+" "+driver, sysfs.Root(p.SysRoot).PCIDriver(driver), order,
		filepath.Base(string(d)))
}

// setOverride allows only this driver to be bound to the device, or any driver if it is "".
func (p *PCIDrivers) setOverride(ctx context.Context, d sysfs.Dir, driver string) error {
	value := cmp.Or(driver, "\n") // an empty write would not reach the kernel
	return p.write(ctx, d, "driver_override "+driver, d, "driver_override", value)
}

// write gives the kernel an order for the device by a file of sysfs, and waits until the kernel has
// carried it out. An unbind from vfio-pci takes as long as a program has the device open, and
// blocks all other work on the driver. write gives up after some time, or when ctx ends. It does
// not give the same order again until the kernel has carried it out.
func (p *PCIDrivers) write(
	ctx context.Context, d sysfs.Dir, step string, dir sysfs.Dir, file, value string,
) error {
	if err := ctx.Err(); err != nil {
		return err
	}

	ctx, cancel := context.WithTimeoutCause(ctx, settleTime,
		fmt.Errorf("is not done after %s", settleTime))
	defer cancel()

	nodes, _ := vfioNodesOf(d) // now, because an unbind removes the device's own node first
	p.trace(step)
	path := string(dir.Dir(file))
	select {
	case done := <-p.orders.DoChan(path+" "+value, func() (any, error) {
		return nil, dir.Write(file, value)
	}):
		return done.Err
	case <-ctx.Done():
		return p.stillUsed(nodes,
			fmt.Errorf("write %q to %s: %w", strings.TrimSpace(value), path, context.Cause(ctx)))
	}
}

func (p *PCIDrivers) trace(step string) {
	if p.Trace != nil {
		p.Trace(step)
	}
}

func (p *PCIDrivers) device(id function.ID) sysfs.Dir {
	return sysfs.Root(p.SysRoot).PCI(id.Address)
}
