// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync/atomic"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Functions has the node's Functions.
type Functions interface {
	// Snapshot returns all Functions, sorted. The caller owns the result.
	Snapshot() []function.Function
	// Get returns a Function. The result is false if it does not exist.
	Get(function.ID) (function.Function, bool)
}

// Declarations has what the administrator declared: all DevicePools, and the labels of this node.
type Declarations interface {
	// DevicePools returns all DevicePools, whether they select this node or not.
	DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error)
	// NodeLabels returns the labels of this node, with which nodeSelectors are compared.
	NodeLabels(ctx context.Context) (map[string]string, error)
}

// Tracker keeps the pools of this node up to date. Its methods may be called from several
// goroutines at once, except for Run, which may be called only once.
type Tracker struct {
	functions    Functions
	declarations Declarations
	noSFs        NoSFs
	log          logr.Logger

	last atomic.Pointer[reading]
}

// reading is the result of reading the pools. It is immutable.
type reading struct {
	known bool // false until the pools have been read once
	pools []Pool
	// byFunction has every Function that exists or that a pool has. The value is nil for a Function
	// without a pool.
	byFunction map[function.ID]*Pool
}

// NewTracker returns a tracker, which has no pools until [Tracker.Run] has read them. If noSFs is
// nil, every PF with a driver can have SFs.
func NewTracker(
	functions Functions, declarations Declarations, noSFs NoSFs, log logr.Logger,
) *Tracker {
	t := &Tracker{functions: functions, declarations: declarations, noSFs: noSFs, log: log}
	t.last.Store(&reading{})
	return t
}

// Pools returns the current pools. known is false until they have been read once. The caller must
// not change the result.
func (t *Tracker) Pools() (pools []Pool, known bool) {
	last := t.last.Load()
	return last.pools, last.known
}

// DevicePool returns the spec of a DevicePool that selects this node.
func (t *Tracker) DevicePool(name string) (v1alpha1.DevicePoolSpec, bool) {
	for _, p := range t.last.Load().pools {
		if p.Name == name {
			return p.Spec, true
		}
	}
	return v1alpha1.DevicePoolSpec{}, false
}

// PoolOf returns the pool that has a Function. ok is false if no pool has it. The caller must not
// change the result.
func (t *Tracker) PoolOf(id function.ID) (p Pool, ok bool) {
	if has := t.last.Load().byFunction[id]; has != nil {
		return *has, true
	}
	return Pool{}, false
}

// Considered reports whether the Function existed when the pools were last read. A later Function
// is in no pool yet, but may belong to one.
func (t *Tracker) Considered(id function.ID) (considered bool) {
	_, considered = t.last.Load().byFunction[id]
	return considered
}

// Get returns the current state of a Function that exists, or of an SF that is created when it is
// allocated.
func (t *Tracker) Get(id function.ID) (function.Function, bool) {
	if f, exists := t.functions.Get(id); exists {
		return f, true
	}

	p, ok := t.PoolOf(id)
	pf, exists := t.functions.Get(function.ID{Address: id.Address})
	if !ok || !p.Makes(id) || !exists {
		return function.Function{}, false
	}

	sfnum, _ := id.SFNum()
	return function.PotentialSF(pf, sfnum), true
}

// Run reads the pools at once and for every value from changes, until ctx ends. It calls changed
// when the pools have changed. If something cannot be read, such as a Node that does not exist yet,
// the pools stay until the next change.
func (t *Tracker) Run(ctx context.Context, changes <-chan struct{}, changed func()) error {
	for {
		different, err := t.read(ctx)
		if err != nil {
			t.log.Error(err, "Pools are not current until the next change")
		}

		if different {
			changed()
		}
		if !loop.Wait(ctx, changes, 0) {
			return nil
		}
	}
}

func (t *Tracker) read(ctx context.Context) (different bool, err error) {
	devicePools, err := t.declarations.DevicePools(ctx)
	if err != nil {
		return false, fmt.Errorf("list DevicePools: %w", err)
	}

	labels, err := t.declarations.NodeLabels(ctx)
	if err != nil {
		return false, fmt.Errorf("read labels of the node: %w", err)
	}

	functions := t.functions.Snapshot()
	pools := Assign(functions, devicePools, labels, t.noSFs)
	byFunction := make(map[function.ID]*Pool, len(functions))
	for _, f := range functions {
		byFunction[f.ID] = nil
	}

	for i := range pools {
		for _, f := range pools[i].Functions {
			byFunction[f.ID] = &pools[i]
		}
	}

	before, known := t.Pools()
	t.last.Store(&reading{known: true, pools: pools, byFunction: byFunction})
	// The equality of apimachinery would panic because of the unexported fields of errors.
	if known && reflect.DeepEqual(before, pools) {
		return false, nil
	}

	t.report(before, pools)
	return true, nil
}

// report logs problems of pools that changed: errors, and new Shortages.
func (t *Tracker) report(before, pools []Pool) {
	reported := map[string][]v1alpha1.Shortage{}
	for _, p := range before {
		reported[p.Name] = p.Shortages
	}

	for _, p := range pools {
		for _, shortage := range p.Shortages {
			if !slices.Contains(reported[p.Name], shortage) {
				t.log.Info("PF cannot have the SFs that the DevicePool asks for", "devicePool",
					p.Name, "pf", shortage.PF,
					"reason", shortage.Reason, "message", shortage.Message)
			}
		}
		if p.Err != nil {
			t.log.Error(p.Err, "DevicePool is empty on this node", "devicePool", p.Name)
		}
	}
}
