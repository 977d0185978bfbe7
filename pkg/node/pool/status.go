package pool

import (
	"cmp"
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

// maxListed is how many overlapping Functions a status names, and how many PFs that lack something.
const maxListed = 16

// retry is the pause before a status is written again that the API server refused.
const retry = 5 * time.Second

// API is what a [Reporter] uses of the API server.
type API interface {
	Declarations
	// WriteNodeStatus replaces this node's entry in DevicePool.status.nodes; nil takes it away.
	WriteNodeStatus(ctx context.Context, devicePool string, entry *v1alpha1.DevicePoolNodeStatus) error
}

// Supply is what this node has of the VFs that a DevicePool asks for by numVFs.
type Supply struct {
	Generation int64               // of the DevicePool that the rest is about, which may be older than the DevicePool's
	PFs        int                 // how many PFs of the node the DevicePool names
	Shortages  []v1alpha1.Shortage // the PFs that do not have the VFs that it asks for, sorted by PF
}

// Reporter tells the administrator, in each DevicePool's status, what the pool has on this node.
type Reporter struct {
	Node    string
	Tracker *Tracker
	API     API
	// Supply says what a DevicePool with numVFs has of its VFs. known is false until that has been looked at.
	Supply func(devicePool string) (s Supply, known bool)
	Log    logr.Logger
}

// Run writes the statuses that are not current until ctx ends: at once, and after every value from changes (of pools and
// their supply) and declared (of DevicePools and the Node). It retries what fails.
func (r *Reporter) Run(ctx context.Context, changes, declared <-chan struct{}) error {
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
		case <-declared:
		case <-again:
		}
	}
}

func (r *Reporter) write(ctx context.Context) error {
	pools, known := r.Tracker.Pools()
	if !known {
		return nil
	}
	// The controller removes the entries of a node without a Node object.
	if _, err := r.API.NodeLabels(ctx); apierrors.IsNotFound(err) {
		return nil
	}
	devicePools, err := r.API.DevicePools(ctx)
	if err != nil {
		return fmt.Errorf("list DevicePools: %w", err)
	}
	var errs []error
	for _, devicePool := range devicePools {
		var entry, current *v1alpha1.DevicePoolNodeStatus
		if i := slices.IndexFunc(pools, func(p Pool) bool { return p.Name == devicePool.Name }); i >= 0 {
			p, supply, known := pools[i], Supply{Generation: pools[i].Generation}, true
			if p.Spec.NumVFs != nil {
				supply, known = r.Supply(p.Name)
			}
			// A Supply of a newer generation is about a DevicePool that will be read again, or was deleted and created anew.
			if !known || supply.Generation > p.Generation {
				continue // the entry of the last run may still be true
			}
			entry = r.entry(p, supply)
		}
		nodes := devicePool.Status.Nodes
		if i := slices.IndexFunc(nodes, func(n v1alpha1.DevicePoolNodeStatus) bool { return n.Name == r.Node }); i >= 0 {
			current = &nodes[i]
		}
		if equality.Semantic.DeepEqual(entry, current) {
			continue
		}
		if err := r.API.WriteNodeStatus(ctx, devicePool.Name, entry); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("write status of DevicePool %s: %w", devicePool.Name, err))
		}
	}
	return errors.Join(errs...)
}

// entry is nil where the pool has nothing to do with the node.
func (r *Reporter) entry(p Pool, supply Supply) *v1alpha1.DevicePoolNodeStatus {
	shortages := merge(supply.Shortages, p.Shortages)
	if len(p.Functions) == 0 && len(p.Overlaps) == 0 && p.Err == nil && supply.PFs == 0 && len(shortages) == 0 {
		return nil
	}
	entry := &v1alpha1.DevicePoolNodeStatus{
		Name: r.Node, ObservedGeneration: supply.Generation, Functions: int32(len(p.Functions)),
		Overlapping: p.Overlaps[:min(len(p.Overlaps), maxListed)],
		Shortages:   shortages[:min(len(shortages), maxListed)],
	}
	if p.Err != nil {
		entry.Problem = p.Err.Error()
	}
	return entry
}

// merge puts the Shortages of VFs and of SFs together: one for each PF, sorted by PF, with the message about VFs first.
func merge(vfs, sfs []v1alpha1.Shortage) []v1alpha1.Shortage {
	merged := slices.Clone(vfs)
	for _, s := range sfs {
		i := slices.IndexFunc(merged, func(have v1alpha1.Shortage) bool { return have.PF == s.PF })
		if i < 0 {
			merged = append(merged, s)
			continue
		}
		merged[i].Message += "; " + s.Message
	}
	slices.SortFunc(merged, func(a, b v1alpha1.Shortage) int { return cmp.Compare(a.PF, b.PF) })
	return merged
}
