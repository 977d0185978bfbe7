// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"fmt"
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

	// The labels of traffic, which are of ports, and of VXLAN ports if port is empty.
	trafficLabels = []string{"port", "network", "tenant"}

	transmittedFramesDesc = prometheus.NewDesc("opi_bridge_transmit_frames_total",
		"Frames that came from the Function of a bridge port, or from other xPUs.",
		trafficLabels, nil)
	transmittedBytesDesc = prometheus.NewDesc("opi_bridge_transmit_bytes_total",
		"Bytes that came from the Function of a bridge port, or from other xPUs.",
		trafficLabels, nil)
	receivedFramesDesc = prometheus.NewDesc("opi_bridge_receive_frames_total",
		"Frames that were sent to the Function of a bridge port, or to other xPUs.",
		trafficLabels, nil)
	receivedBytesDesc = prometheus.NewDesc("opi_bridge_receive_bytes_total",
		"Bytes that were sent to the Function of a bridge port, or to other xPUs.",
		trafficLabels, nil)
	filteredDesc = prometheus.NewDesc("opi_bridge_dropped_frames_total",
		"Frames with somebody else's source address that the source filter dropped, from the "+
			"Function of a bridge port, or from other xPUs.", trafficLabels, nil)
	lostDesc = prometheus.NewDesc("opi_bridge_device_dropped_frames_total",
		"Frames that the netdev of a bridge port, or the VXLAN port of a logical bridge, dropped "+
			"in either direction.", trafficLabels, nil)
)

// severalNetworks is the label network of a TRUNK port. No network has this id.
const severalNetworks = "_several"

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
	for desc := range trafficOf(plane.Traffic{}) {
		ch <- desc
	}
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
	a.collectTraffic(ch)
	for s, word := range map[state]string{
		stateUp: "up", stateDown: "down", stateDeleting: "deleting",
	} {
		for desc, count := range counts {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(count[s]), word)
		}
	}
}

// collectTraffic sends the counters of ports and VXLAN ports.
func (a *Agent) collectTraffic(ch chan<- prometheus.Metric) {
	all, err := a.counters.All()
	if err != nil {
		for desc := range trafficOf(plane.Traffic{}) {
			ch <- prometheus.NewInvalidMetric(desc, err)
		}
		return
	}

	for of, traffic := range all {
		labels := a.labelsOf(of)
		for desc, n := range trafficOf(traffic) {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, float64(n),
				labels...)
		}
	}
}

func trafficOf(t plane.Traffic) map[*prometheus.Desc]uint64 {
	return map[*prometheus.Desc]uint64{
		transmittedFramesDesc: t.TransmittedFrames, transmittedBytesDesc: t.TransmittedBytes,
		receivedFramesDesc: t.ReceivedFrames, receivedBytesDesc: t.ReceivedBytes,
		filteredDesc: t.Filtered, lostDesc: t.Dropped,
	}
}

// labelsOf returns the values of trafficLabels.
func (a *Agent) labelsOf(of plane.Object) []string {
	if of.Kind == plane.KindNetwork {
		return []string{"", of.ID, ""}
	}

	a.mu.RLock()
	var networks []string
	if o := a.ports.objects[of.ID]; o != nil {
		networks = networksOf(o.spec)
	}
	a.mu.RUnlock()

	if len(networks) == 0 { // the port was deleted meanwhile
		return []string{of.ID, "", ""}
	}

	network, tenant := severalNetworks, ""
	if len(networks) == 1 {
		network = networks[0]
	}
	if a.cfg.Tenant != nil {
		tenant = a.cfg.Tenant(of.ID, networks)
	}

	return []string{of.ID, network, tenant}
}

// observe measures and logs calls.
func (a *Agent) observe(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	begin := time.Now()
	reply, err := handle(ctx, req)
	took, rpc, code := time.Since(begin), path.Base(info.FullMethod), status.Code(err)
	a.calls.WithLabelValues(rpc, code.String()).Observe(took.Seconds())
	call := a.log.WithValues("rpc", rpc, "object", fmt.Sprintf("%.100s", objectOf(req)),
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
