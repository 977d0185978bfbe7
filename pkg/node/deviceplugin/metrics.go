// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// Metrics are the metrics of the device plugin.
type Metrics struct {
	allocateSeconds                            *prometheus.HistogramVec
	allocations, allocateErrors, registrations *prometheus.CounterVec
	devices                                    *prometheus.GaugeVec
}

// NewMetrics registers the device plugin's metrics.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	factory := promauto.With(registry)
	return &Metrics{
		allocateSeconds: factory.NewHistogramVec(prometheus.HistogramOpts{
			Name: "xpu_deviceplugin_allocate_seconds",
			Help: "How long the kubelet waited for an Allocate, including " +
				"the wait for the xPU with provisionAt: Allocate.",
			Buckets:                        prometheus.ExponentialBuckets(0.00025, 2, 18),
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}, []string{"resource"}),
		allocations: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_deviceplugin_allocations_total",
			Help: "Functions that the kubelet was told how to give to containers.",
		}, []string{"resource"}),
		allocateErrors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_deviceplugin_allocate_errors_total",
			Help: "Allocates that failed, and with them their pods.",
		}, []string{"resource"}),
		devices: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_deviceplugin_devices",
			Help: "Functions that the kubelet is offered, by health: Healthy or Unhealthy.",
		}, []string{"resource", "health"}),
		registrations: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_deviceplugin_registrations_total",
			Help: "Registrations with the kubelet, by result: ok or error.",
		}, []string{"resource", "result"}),
	}
}

// begin makes the counters of a resource, which would not exist before the first event otherwise.
func (m *Metrics) begin(resource string) {
	m.allocateSeconds.WithLabelValues(resource)
	m.allocations.WithLabelValues(resource)
	m.allocateErrors.WithLabelValues(resource)
	m.registrations.WithLabelValues(resource, "ok")
	m.registrations.WithLabelValues(resource, "error")
}
