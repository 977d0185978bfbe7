package pool

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// maxListed is how many overlapping Functions a status names.
const maxListed = 16

// retry is when a status is written again that the API server did not take.
const retry = 5 * time.Second

// StatusWriter writes this node's entry of a DevicePool's status.
type StatusWriter interface {
	// WriteNodeStatus replaces the node's entry in DevicePool.status.nodes; nil takes it away.
	WriteNodeStatus(ctx context.Context, devicePool string, entry *v1alpha1.DevicePoolNodeStatus) error
}

// Reporter tells the administrator, in each DevicePool's status, what the pool has on this node.
type Reporter struct {
	Node         string
	Tracker      *Tracker
	Declarations Declarations
	Writer       StatusWriter
	Log          logr.Logger
}

// Run writes what differs from the DevicePools' status, at once and for every value from changes, until ctx ends. What
// fails is tried again.
func (r *Reporter) Run(ctx context.Context, changes <-chan struct{}) error {
	for {
		var again <-chan time.Time
		if err := r.write(ctx); err != nil && ctx.Err() == nil {
			r.Log.Error(err, "Status of DevicePools is incomplete", "retry", retry.String())
			again = time.After(retry)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changes:
		case <-again:
		}
	}
}

func (r *Reporter) write(ctx context.Context) error {
	pools, known := r.Tracker.Pools()
	if !known {
		return nil
	}
	devicePools, err := r.Declarations.DevicePools(ctx)
	if err != nil {
		return fmt.Errorf("list DevicePools: %w", err)
	}
	wanted := map[string]*v1alpha1.DevicePoolNodeStatus{}
	for _, p := range pools {
		wanted[p.Name] = r.entry(p)
	}
	var errs []error
	for _, devicePool := range devicePools {
		entry := wanted[devicePool.Name]
		if equality.Semantic.DeepEqual(entry, r.current(devicePool)) {
			continue
		}
		if err := r.Writer.WriteNodeStatus(ctx, devicePool.Name, entry); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("write status of DevicePool %s: %w", devicePool.Name, err))
		}
	}
	return errors.Join(errs...)
}

// entry is nil where the pool has nothing to do with the node.
func (r *Reporter) entry(p Pool) *v1alpha1.DevicePoolNodeStatus {
	if len(p.Functions) == 0 && len(p.Overlaps) == 0 && p.Err == nil {
		return nil
	}
	entry := &v1alpha1.DevicePoolNodeStatus{Name: r.Node, Functions: int32(len(p.Functions))}
	if p.Err != nil {
		entry.Problem = p.Err.Error()
	}
	for _, overlap := range p.Overlaps[:min(len(p.Overlaps), maxListed)] {
		entry.Overlapping = append(entry.Overlapping, overlap.String())
	}
	return entry
}

func (r *Reporter) current(devicePool v1alpha1.DevicePool) *v1alpha1.DevicePoolNodeStatus {
	i := slices.IndexFunc(devicePool.Status.Nodes, func(n v1alpha1.DevicePoolNodeStatus) bool { return n.Name == r.Node })
	if i < 0 {
		return nil
	}
	return &devicePool.Status.Nodes[i]
}
