// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

type metrics struct {
	functions *prometheus.GaugeVec
	skipped   *prometheus.CounterVec
	duration  prometheus.Histogram
}

func newMetrics(registry prometheus.Registerer) metrics {
	factory := promauto.With(registry)
	m := metrics{
		functions: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_inventory_functions", Help: "Network functions of this node, by kind.",
		}, []string{"kind"}),
		skipped: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_inventory_skipped_entries_total",
			Help: "Entries of sysfs that were skipped or read incompletely, by what was wrong; " +
				"each once while it stays so.",
		}, []string{"reason"}),
		duration: factory.NewHistogram(prometheus.HistogramOpts{
			Name:                           "xpu_inventory_scan_duration_seconds",
			Help:                           "How long it took to read all Functions from sysfs.",
			Buckets:                        prometheus.ExponentialBuckets(0.001, 2, 10),
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}),
	}

	for _, r := range reasons {
		m.skipped.WithLabelValues(string(r))
	}

	m.setFunctions(nil)
	return m
}

func (m metrics) setFunctions(functions []function.Function) {
	count := map[function.Kind]int{function.PF: 0, function.VF: 0, function.SF: 0}
	for _, f := range functions {
		if f.Class == function.Network {
			count[f.Kind]++
		}
	}

	for kind, n := range count {
		m.functions.WithLabelValues(string(kind)).Set(float64(n))
	}
}
