package setup

import (
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// OwnDrivers shows Functions as they are when nobody has them: with their own driver and what it makes of them, not with the
// one that is bound for an owner. A pool that selects Functions by their driver keeps them so while they are allocated.
type OwnDrivers struct {
	Functions interface {
		Snapshot() []function.Function
		Get(function.ID) (function.Function, bool)
	}
	Journal interface{ All() []journal.Attachment }
}

// Get returns a Function as it is now, with whatever is bound.
func (b OwnDrivers) Get(id function.ID) (function.Function, bool) { return b.Functions.Get(id) }

// Snapshot returns all Functions, in the order of the inventory. The caller owns the result.
func (b OwnDrivers) Snapshot() []function.Function {
	// A record is there before the driver is changed, and until the inventory has seen that it was changed back: of two
	// looks, one before and one after the Functions were seen, one has it.
	setups := map[function.ID]*journal.Setup{}
	b.add(setups)
	functions := b.Functions.Snapshot()
	b.add(setups)
	for i := range functions {
		if o := setups[functions[i].ID]; o != nil {
			functions[i].Driver, functions[i].RDMA = o.Own, o.RDMA
		}
	}
	return functions
}

func (b OwnDrivers) add(setups map[function.ID]*journal.Setup) {
	for _, a := range b.Journal.All() {
		if a.Setup != nil && a.Setup.Driver != "" {
			setups[a.Function] = a.Setup
		}
	}
}
