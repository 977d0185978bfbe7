package pool

import (
	"context"
	"fmt"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
)

// Functions knows the node's Functions.
type Functions interface {
	// Snapshot returns all Functions, sorted; the caller owns the result.
	Snapshot() []inventory.Function
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
	log          logr.Logger

	mutex sync.RWMutex
	pools []Pool
	known bool
}

// NewTracker makes a tracker; [Tracker.Run] makes it work.
func NewTracker(functions Functions, declarations Declarations, log logr.Logger) *Tracker {
	return &Tracker{functions: functions, declarations: declarations, log: log}
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
	pools := Assign(t.functions.Snapshot(), devicePools, labels)

	t.mutex.Lock()
	defer t.mutex.Unlock()
	if t.known && equality.Semantic.DeepEqual(t.pools, pools) {
		return false, nil
	}
	t.pools, t.known = pools, true
	for _, p := range pools {
		if p.Err != nil {
			t.log.Error(p.Err, "DevicePool is empty on this node", "devicePool", p.Name)
		}
	}
	return true, nil
}
