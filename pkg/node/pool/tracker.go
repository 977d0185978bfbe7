package pool

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"sync"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Functions knows the node's Functions.
type Functions interface {
	// Snapshot returns all Functions, sorted; the caller owns the result.
	Snapshot() []function.Function
	// Get returns one Function.
	Get(function.ID) (function.Function, bool)
}

// PFs knows what PFs can do.
type PFs interface {
	// NoSFs says what keeps a PF from having SFs; nil if nothing does.
	NoSFs(pf pci.Address) *v1alpha1.Shortage
}

// Declarations knows what the administrator declared.
type Declarations interface {
	// DevicePools returns all DevicePools.
	DevicePools(ctx context.Context) ([]v1alpha1.DevicePool, error)
	// NodeLabels returns the labels of this node.
	NodeLabels(ctx context.Context) (map[string]string, error)
}

// Tracker keeps the pools of this node current.
type Tracker struct {
	functions    Functions
	declarations Declarations
	pfs          PFs
	log          logr.Logger

	mutex  sync.RWMutex
	pools  []Pool
	owners map[function.ID]int // index of the pool that has the Function
	seen   map[function.ID]bool
	known  bool
}

// NewTracker makes a tracker; [Tracker.Run] makes it work. Where pfs is nil, every PF with a driver counts as able to
// have SFs.
func NewTracker(functions Functions, declarations Declarations, pfs PFs, log logr.Logger) *Tracker {
	return &Tracker{functions: functions, declarations: declarations, pfs: pfs, log: log}
}

// Pools returns the pools as they are now; known is false until they have been read once. The caller must not change
// the result.
func (t *Tracker) Pools() (pools []Pool, known bool) {
	t.mutex.RLock()
	defer t.mutex.RUnlock()
	return t.pools, t.known
}

// DevicePool returns the spec of one DevicePool that is meant for this node.
func (t *Tracker) DevicePool(name string) (v1alpha1.DevicePoolSpec, bool) {
	pools, _ := t.Pools()
	for _, p := range pools {
		if p.Name == name {
			return p.Spec, true
		}
	}
	return v1alpha1.DevicePoolSpec{}, false
}

// PoolOf returns the pool that has a Function; ok is false if none has. The caller must not change the result.
func (t *Tracker) PoolOf(id function.ID) (p Pool, ok bool) {
	t.mutex.RLock()
	defer t.mutex.RUnlock()
	i, ok := t.owners[id]
	if !ok {
		return Pool{}, false
	}
	return t.pools[i], true
}

// Considered says whether the Function was there when the pools were read last. One that came since is in no pool yet,
// which says nothing about it.
func (t *Tracker) Considered(id function.ID) bool {
	t.mutex.RLock()
	defer t.mutex.RUnlock()
	_, inPool := t.owners[id] // an SF that is to be made is not there
	return inPool || t.seen[id]
}

// Get returns a Function as it is now: one that exists, or an SF that is to be made for whoever its pool hands it out
// to.
func (t *Tracker) Get(id function.ID) (function.Function, bool) {
	if f, exists := t.functions.Get(id); exists {
		return f, true
	}
	if p, ok := t.PoolOf(id); !ok || !p.Makes(id) {
		return function.Function{}, false
	}
	sfnum, _ := id.SFNum()
	pf, exists := t.functions.Get(function.ID{Address: id.Address})
	if !exists {
		return function.Function{}, false
	}
	return function.PotentialSF(pf, sfnum), true
}

// Run reads the pools at once and again for every value from changes, until ctx ends. It calls changed after each
// time that they came out different. What cannot be read, such as a Node that is not there yet, leaves the pools as
// they are until the next change.
func (t *Tracker) Run(ctx context.Context, changes <-chan struct{}, changed func()) error {
	for {
		different, err := t.read(ctx)
		if err != nil {
			t.log.Error(err, "Pools are not current until the next change")
		}
		if different {
			changed()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
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
	seen := make(map[function.ID]bool, len(functions))
	for _, f := range functions {
		seen[f.ID] = true
	}
	pools := t.assign(functions, devicePools, labels)

	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.seen = seen
	// Not by the equality of apimachinery, which panics at the unexported fields of errors.
	if t.known && reflect.DeepEqual(t.pools, pools) {
		return false, nil
	}
	t.report(pools)
	t.pools, t.owners, t.known = pools, owners(pools), true
	return true, nil
}

// report logs what is wrong with pools that came out different, and of PFs without SFs those that are new.
func (t *Tracker) report(pools []Pool) {
	before := map[string][]v1alpha1.Shortage{}
	for _, p := range t.pools {
		before[p.Name] = p.Shortages
	}
	for _, p := range pools {
		for _, shortage := range p.Shortages {
			if !slices.Contains(before[p.Name], shortage) {
				t.log.Info("PF cannot have the SFs that the DevicePool asks for", "devicePool", p.Name, "pf", shortage.PF,
					"reason", shortage.Reason, "message", shortage.Message)
			}
		}
		if p.Err != nil {
			t.log.Error(p.Err, "DevicePool is empty on this node", "devicePool", p.Name)
		}
	}
}

func (t *Tracker) assign(functions []function.Function, devicePools []v1alpha1.DevicePool, labels map[string]string) []Pool {
	if t.pfs == nil {
		return Assign(functions, devicePools, labels)
	}
	return assign(functions, devicePools, labels, t.pfs.NoSFs)
}

// owners says which pool has each Function.
func owners(pools []Pool) map[function.ID]int {
	owners := map[function.ID]int{}
	for i, p := range pools {
		for _, f := range p.Functions {
			owners[f.ID] = i
		}
	}
	return owners
}
