// SPDX-License-Identifier: Apache-2.0

// Package setup makes reserved Functions usable for their owners, and undoes that when the
// Functions are released. It makes SFs that exist only for their owner, and binds the driver that
// the owner wants. Each step is recorded in the journal before it is done, and may be repeated.
package setup

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
)

// Wanted returns the setup that the owner of a Function wants, or nil for none. spec is the spec of
// the Function's DevicePool. driver is the driver that the pod asks for; "" means the pool's
// driver. mac is the MAC address for a new SF; "" means any.
func Wanted(
	spec v1alpha1.DevicePoolSpec, f function.ID, driver v1alpha1.FunctionDriver, mac function.MAC,
) *journal.Setup {
	wish := journal.Setup{Driver: string(cmp.Or(driver, spec.Driver))}
	if number, isSF := f.SFNum(); isSF && spec.SFs.Has(number) {
		wish.SF, wish.MAC = true, mac
	}
	if wish.Driver == "" && !wish.SF {
		return nil
	}
	return &wish
}

// Runner carries out the setup of attachments. It implements [lifecycle.Setup].
type Runner struct {
	SFs     *sriov.SFMaker
	Drivers *PCIDrivers
}

// Plan returns the setup with all that is needed to undo it, or an error if it cannot be done.
func (r *Runner) Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error) {
	_, isSF := want.Function.SFNum()
	switch {
	case isSF && want.Setup.Driver != "": // its address is its PF's
		return nil, errors.New("an SF is no PCI device: no other driver can be bound to it")
	case want.Setup.Driver != "":
		return r.Drivers.Plan(ctx, want)
	case want.Setup.SF:
		return want.Setup, nil
	}

	return nil, nil
}

// SetUp carries out the attachment's Setup.
func (r *Runner) SetUp(ctx context.Context, a journal.Attachment) error {
	if a.Setup.SF {
		return r.SFs.Make(ctx, a.Function, a.Setup.MAC)
	}
	return r.Drivers.Bind(ctx, a.Function, a.Setup.Driver)
}

// TearDown undoes SetUp, even if SetUp was not finished.
func (r *Runner) TearDown(ctx context.Context, a journal.Attachment) error {
	if a.Setup.SF {
		return r.SFs.Delete(ctx, a.Function)
	}
	return r.Drivers.Restore(ctx, a)
}

// OwnDrivers shows each Function with its own driver and the properties that come with it, instead
// of the driver that is bound for an owner. So a pool that selects Functions by driver keeps its
// allocated Functions. It shows a PF that has an owner with the altnames from before, because the
// owner can give it others, and selectors trust them. Get returns a Function as it is at present.
type OwnDrivers struct {
	pool.Functions
	Journal interface{ All() []journal.Attachment }
}

// Snapshot returns all Functions, in the order of the inventory. The caller owns the result.
func (b OwnDrivers) Snapshot() []function.Function {
	// The journal has a record from before the driver is changed until the inventory has seen the
	// driver restored. So the record is in the journal either before the Functions are read, or
	// after.
	before := b.Journal.All()
	functions := b.Functions.Snapshot()
	setups := map[function.ID]*journal.Setup{}
	netdevs := map[function.ID]*netdev.Snapshot{}
	for _, a := range slices.Concat(before, b.Journal.All()) {
		if a.Setup != nil && a.Setup.Driver != "" {
			setups[a.Function] = a.Setup
		}
		if own := ownNetdev(a); own != nil {
			netdevs[a.Function] = own
		}
	}

	for i := range functions {
		if o := setups[functions[i].ID]; o != nil {
			showOwn(&functions[i], o)
		}
		// VFs and SFs have the altnames of their PF.
		if own := netdevs[function.ID{Address: functions[i].PF}]; own != nil {
			functions[i].PFAltNames = own.AltNames
		}
	}

	return functions
}

// showOwn replaces what comes with the driver that is bound for an owner.
func showOwn(f *function.Function, o *journal.Setup) {
	if o.Own != f.Driver {
		f.Passthrough = ""
	}
	f.Driver, f.RDMA, f.RDMADevices = o.Own, o.RDMA, o.RDMADevices
	f.NoNetdev = o.Netdev == nil
}

// ownNetdev returns the netdev as it was before the owner got the Function, or nil if the record
// does not say.
func ownNetdev(a journal.Attachment) *netdev.Snapshot {
	switch {
	case a.Setup != nil && a.Setup.Netdev != nil:
		return a.Setup.Netdev
	case a.Before != nil && a.Before.Name != "": // a driver for programs makes no netdev
		return a.Before
	}
	return nil
}
