package dra

import (
	"context"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
)

// debounce is how long the publisher waits for more changes after the first: VFs appear one by one, and a link that
// goes down takes its VFs along.
const debounce = 50 * time.Millisecond

// Slices writes ResourceSlices. [kubeletplugin.Helper] does.
type Slices interface {
	PublishResources(ctx context.Context, resources resourceslice.DriverResources) error
}

// Pools knows the node's pools.
type Pools interface {
	// Pools returns the pools as they are now; known is false as long as they have not been read once.
	Pools() (pools []pool.Pool, known bool)
}

// Publisher keeps the node's ResourceSlices equal to its pools. Nothing is written unless something changed, so a
// restart of the agent writes nothing.
type Publisher struct {
	Node    string
	Pools   Pools
	Health  *health.Checker
	Slices  Slices
	Metrics *Metrics
	Log     logr.Logger
}

// Run publishes at once and after every change until ctx ends. What the API server does not take now is published later:
// CNI and device plugin go on meanwhile.
func (p *Publisher) Run(ctx context.Context, changes <-chan struct{}) error {
	var published *resourceslice.DriverResources
	retryPauses := func() *wait.Backoff { return loop.Backoff(500*time.Millisecond, 30*time.Second) }
	pauses := retryPauses()
	for {
		var pause time.Duration
		next, err := p.publish(ctx, published)
		if err != nil && ctx.Err() == nil {
			pause = pauses.Step()
			p.Log.Error(err, "ResourceSlices are published later", "after", pause.String())
		} else {
			published, pauses = next, retryPauses()
		}
		if !loop.Wait(ctx, changes, pause) || !loop.Sleep(ctx, debounce) {
			return nil
		}
	}
}

// publish publishes the pools as they are now, if they differ from what was published, and returns what is published
// then.
func (p *Publisher) publish(
	ctx context.Context, published *resourceslice.DriverResources,
) (*resourceslice.DriverResources, error) {
	pools, known := p.Pools.Pools()
	if !known {
		return published, nil
	}
	next := resources(p.Node, pools, p.Health.Problems)
	if published != nil && equality.Semantic.DeepEqual(*published, next) {
		return published, nil
	}
	if err := p.Slices.PublishResources(ctx, next); err != nil {
		return published, err
	}
	devices, slices, tainted := 0, 0, 0
	for _, pool := range next.Pools {
		slices += len(pool.Slices)
		for _, slice := range pool.Slices {
			devices += len(slice.Devices)
			for _, device := range slice.Devices {
				if len(device.Taints) > 0 {
					tainted++
				}
			}
		}
	}
	p.Metrics.devices.Set(float64(devices))
	p.Metrics.tainted.Set(float64(tainted))
	p.Log.Info("Publishing devices", "devices", devices, "tainted", tainted, "pools", len(next.Pools), "slices", slices)
	return &next, nil
}
