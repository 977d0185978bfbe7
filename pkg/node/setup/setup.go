// SPDX-License-Identifier: Apache-2.0

// Package setup makes reserved Functions usable for their owners, and undoes that when they are
// released: it has SFs made that exist for their owner only, and binds the driver that the owner
// wants. What is done is in the journal before it is done; every step may be repeated.
package setup

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/sriov"
)

// Wanted is what the owner of a Function wants done to it; nil for nothing. spec is that of the
// Function's DevicePool, driver the one that the pod itself asks for, "" for the pool's, and mac
// the one that an SF is made with, "" for any.
func Wanted(
	spec v1alpha1.DevicePoolSpec, f function.ID, driver v1alpha1.FunctionDriver, mac function.MAC,
) *journal.Setup {
	wish := journal.Setup{Driver: string(cmp.Or(driver, spec.Driver))}
	if number, isSF := f.SFNum(); isSF && spec.SFs.Has(number) {
		wish.SF, wish.MAC = true, mac
	}
	if wish == (journal.Setup{}) {
		return nil
	}
	return &wish
}

// Runner does what attachments say about setup. It implements [lifecycle.Setup].
type Runner struct {
	SFs     *sriov.SFMaker
	Drivers *PCIDrivers
}

// Plan refuses what cannot be done, and says what will be undone.
func (r *Runner) Plan(ctx context.Context, want journal.Attachment) (*journal.Setup, error) {
	_, isSF := want.Function.SFNum()
	switch {
	case isSF && want.Setup.Driver != "": // its address is that of its PF
		return nil, errors.New("an SF is no PCI device: no other driver can be bound to it")
	case want.Setup.Driver != "":
		return r.Drivers.Plan(ctx, want)
	case want.Setup.SF:
		return want.Setup, nil
	}

	return nil, nil
}

// SetUp does what the attachment's Setup says.
func (r *Runner) SetUp(ctx context.Context, a journal.Attachment) error {
	if a.Setup.SF {
		return r.SFs.Make(ctx, a.Function, a.Setup.MAC)
	}
	return r.Drivers.Bind(ctx, a.Function, a.Setup.Driver)
}

// TearDown undoes what SetUp did, as far as that was done.
func (r *Runner) TearDown(ctx context.Context, a journal.Attachment) error {
	if a.Setup.SF {
		return r.SFs.Delete(ctx, a.Function)
	}
	return r.Drivers.Restore(ctx, a)
}

// OwnDrivers shows Functions with their own driver and what it makes of them, not with the one that
// is bound for an owner. So pools that select Functions by driver keep those that are allocated.
// Get returns a Function as it is now.
type OwnDrivers struct {
	pool.Functions
	Journal interface{ All() []journal.Attachment }
}

// Snapshot returns all Functions, in the order of the inventory. The caller owns the result.
func (b OwnDrivers) Snapshot() []function.Function {
	// A record is there before the driver is changed, and until the inventory has seen that it was
	// changed back. So either the records from before the Functions are seen have it, or those from
	// after.
	before := b.Journal.All()
	functions := b.Functions.Snapshot()
	setups := map[function.ID]*journal.Setup{}
	for _, a := range slices.Concat(before, b.Journal.All()) {
		if a.Setup != nil && a.Setup.Driver != "" {
			setups[a.Function] = a.Setup
		}
	}

	for i := range functions {
		if o := setups[functions[i].ID]; o != nil {
			functions[i].Driver, functions[i].RDMA = o.Own, o.RDMA
			functions[i].Passthrough, functions[i].NoNetdev = "", o.Netdev == nil
		}
	}

	return functions
}
