package dra

import (
	"context"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/health"
)

// The kubelet takes a device's health for unknown when it has not been told for the timeout.
const (
	healthTimeout = 30 * time.Second
	healthRefresh = 10 * time.Second
)

// HealthReporter tells the kubelet about the health of devices (KEP-4680).
type HealthReporter struct {
	Node   string
	Pools  Pools
	Health *health.Checker
	// Changes is called for every stream of reports; the channel it returns wakes that stream when health may have
	// changed, until the context ends.
	Changes func(ctx context.Context) <-chan struct{}
}

// WatchHealthStatus sends a full report at once, on every change, and often enough to stay known, until ctx ends.
func (r *HealthReporter) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	changes := r.Changes(ctx)
	for {
		select {
		case <-ctx.Done():
			return nil
		case reports <- r.report():
		}
		if !loop.Wait(ctx, changes, healthRefresh) {
			return nil
		}
	}
}

func (r *HealthReporter) report() kubeletplugin.DeviceHealthReport {
	now := time.Now()
	var out kubeletplugin.DeviceHealthReport
	pools, _ := r.Pools.Pools()
	for _, p := range pools {
		for _, f := range p.Functions {
			device := kubeletplugin.DeviceHealth{
				PoolName:           claim.PoolID{Node: r.Node, PF: f.PF, DevicePool: p.Name}.String(),
				DeviceName:         f.ID.DeviceName(),
				Health:             kubeletplugin.HealthStatusHealthy,
				LastUpdated:        now,
				HealthCheckTimeout: healthTimeout,
			}
			var messages []string
			for _, problem := range r.Health.Problems(f) {
				device.Health = kubeletplugin.HealthStatusUnhealthy
				messages = append(messages, problem.Message)
			}
			device.Message = strings.Join(messages, "; ")
			out.Devices = append(out.Devices, device)
		}
	}
	return out
}
