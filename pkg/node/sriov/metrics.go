// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// Metrics are the metrics of [VFs].
type Metrics struct {
	changes *prometheus.CounterVec
	seconds prometheus.Histogram
}

// NewMetrics returns metrics that are registered at registry.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	factory := promauto.With(registry)
	m := &Metrics{
		changes: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_supply_vf_changes_total",
			Help: "Changes of how many VFs a PF has (numVFs), by result: done or failed. " +
				"What is refused before the PF is touched is not counted.",
		}, []string{"result"}),
		seconds: factory.NewHistogram(prometheus.HistogramOpts{
			Name: "xpu_supply_vf_change_seconds",
			Help: "How long the kernel took to change how many VFs a " +
				"PF has.",
			Buckets:                        prometheus.ExponentialBuckets(0.1, 2, 10),
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}),
	}

	for _, result := range []string{"done", "failed"} {
		m.changes.WithLabelValues(result)
	}

	return m
}

// shortagesDesc describes the metric that [VFs.Collect] counts at each scrape.
var shortagesDesc = prometheus.NewDesc("xpu_supply_shortages",
	"PFs of this node that do not have the VFs, or cannot have the SFs, that a DevicePool asks "+
		"for, by pool and reason.",
	[]string{"pool", "reason"}, nil)
