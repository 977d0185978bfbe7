package setup

import (
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Bare shows Functions as they are when nobody has them: with their own driver and what it makes of them, not with the
// one that is bound for an owner. A pool that selects Functions by their driver keeps them so while they are allocated.
type Bare struct {
	Functions interface {
		Snapshot() []function.Function
		Get(function.ID) (function.Function, bool)
	}
	Journal interface{ All() []journal.Attachment }
}

// Get returns a Function as it is now, with whatever is bound.
func (b Bare) Get(id function.ID) (function.Function, bool) { return b.Functions.Get(id) }

// Snapshot returns all Functions, in the order of the inventory. The caller owns the result.
func (b Bare) Snapshot() []function.Function {
	// A record is there before the driver is changed, and until the inventory has seen that it was changed back: of two
	// looks, one before and one after the Functions were seen, one has it.
	outfits := map[function.ID]*journal.Outfit{}
	b.add(outfits)
	functions := b.Functions.Snapshot()
	b.add(outfits)
	for i := range functions {
		if o := outfits[functions[i].ID]; o != nil {
			functions[i].Driver, functions[i].RDMA = o.Own, o.RDMA
		}
	}
	return functions
}

func (b Bare) add(outfits map[function.ID]*journal.Outfit) {
	for _, a := range b.Journal.All() {
		if a.Outfit != nil && a.Outfit.Driver != "" {
			outfits[a.Function] = a.Outfit
		}
	}
}
