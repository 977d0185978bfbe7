// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"path"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/access"
	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

var (
	portsDesc = prometheus.NewDesc("opi_bridge_ports", "Bridge ports, by state.",
		[]string{"state"}, nil)
	networksDesc = prometheus.NewDesc("opi_bridge_networks", "Logical bridges, by state.",
		[]string{"state"}, nil)
	vrfsDesc = prometheus.NewDesc("opi_bridge_vrfs", "VRFs, by state.", []string{"state"}, nil)
	svisDesc = prometheus.NewDesc("opi_bridge_svis", "SVIs, by state.", []string{"state"}, nil)

	droppedDesc = prometheus.NewDesc("opi_bridge_dropped_frames_total",
		"Frames with somebody else's source address that the source filter dropped, by the "+
			"bridge port that sent them, "+
			"or by the logical bridge whose VXLAN port they came from; only those that sent any.",
		[]string{"port", "network"}, nil)
)

func newCallDurations() *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "opi_bridge_rpc_duration_seconds",
		Help: "Time the agent took for a call, by RPC and gRPC status code.",
		// The buckets go from 0.1 ms to 1.6 s.
		Buckets:                        prometheus.ExponentialBuckets(0.0001, 4, 8),
		NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
		NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
	}, []string{"method", "code"})
}

// Describe implements [prometheus.Collector].
func (a *Agent) Describe(ch chan<- *prometheus.Desc) {
	a.calls.Describe(ch)
	ch <- portsDesc
	ch <- networksDesc
	ch <- vrfsDesc
	ch <- svisDesc
	ch <- droppedDesc
}

// Collect implements [prometheus.Collector].
func (a *Agent) Collect(ch chan<- prometheus.Metric) {
	a.calls.Collect(ch)
	a.mu.RLock()
	counts := map[*prometheus.Desc]map[state]int{
		networksDesc: a.networks.count(), portsDesc: a.ports.count(), vrfsDesc: a.vrfs.count(),
		svisDesc: a.svis.count(),
	}
	a.mu.RUnlock()
	dropped, err := a.filter.Dropped()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(droppedDesc, err)
	}

	for from, frames := range dropped {
		labels := []string{from.ID, ""}
		if from.Kind == plane.KindNetwork {
			labels = []string{"", from.ID}
		}
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue,
			float64(frames), labels...)
	}

	for s, word := range map[state]string{
		stateUp: "up", stateDown: "down", stateDeleting: "deleting",
	} {
		for desc, count := range counts {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(count[s]), word)
		}
	}
}

// observe measures and logs calls.
func (a *Agent) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	begin := time.Now()
	reply, err := handle(ctx, req)
	took, rpc, code := time.Since(begin), path.Base(info.FullMethod), status.Code(err)
	a.calls.WithLabelValues(rpc, code.String()).Observe(took.Seconds())
	call := a.log.WithValues("rpc", rpc, "object", objectOf(req),
		"client", access.FromContext(ctx).Subject, "code", code.String(),
		"took", took.Round(time.Microsecond).String())
	if p, ok := peer.FromContext(ctx); ok {
		call = call.WithValues("address", p.Addr.String())
	}

	switch {
	case err != nil && code != codes.NotFound:
		call.Info("call refused", "reason", status.Convert(err).Message())
	case err == nil && changes(rpc):
		call.Info("change")
	default:
		call.V(1).Info("call")
	}

	return reply, err
}

// changes reports whether an RPC changes something.
func changes(rpc string) bool {
	return strings.HasPrefix(rpc, "Create") || strings.HasPrefix(rpc, "Update") ||
		strings.HasPrefix(rpc, "Delete")
}
