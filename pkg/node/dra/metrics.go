// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// Metrics are the metrics of the driver.
type Metrics struct {
	devices, tainted   prometheus.Gauge
	prepare, unprepare operation
	backgroundErrors   prometheus.Counter
	statusWrites       *prometheus.CounterVec
}

// operation measures calls of one kind.
type operation struct {
	seconds prometheus.Observer
	errors  prometheus.Counter
}

// NewMetrics registers the driver's metrics.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	factory := promauto.With(registry)
	seconds := factory.NewHistogramVec(prometheus.HistogramOpts{
		Name: "xpu_dra_operation_seconds",
		Help: "How long the kubelet waited for an operation on one claim, " +
			"including the wait for the xPU.",
		Buckets:                        prometheus.ExponentialBuckets(0.001, 2, 15),
		NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
		NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
	}, []string{"operation"})

	failures := factory.NewCounterVec(prometheus.CounterOpts{
		Name: "xpu_dra_operation_errors_total",
		Help: "Operations on one claim that failed; the kubelet tries again.",
	}, []string{"operation"})

	return &Metrics{
		devices: factory.NewGauge(prometheus.GaugeOpts{
			Name: "xpu_dra_devices", Help: "Devices in this node's ResourceSlices.",
		}),
		tainted: factory.NewGauge(prometheus.GaugeOpts{
			Name: "xpu_dra_devices_tainted",
			Help: "Devices in this node's ResourceSlices that are tainted.",
		}),
		prepare: operation{
			seconds.WithLabelValues("prepare"), failures.WithLabelValues("prepare"),
		},
		unprepare: operation{
			seconds.WithLabelValues("unprepare"), failures.WithLabelValues("unprepare"),
		},
		backgroundErrors: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_dra_background_errors_total",
			Help: "Errors while publishing ResourceSlices or registering with the kubelet.",
		}),
		statusWrites: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_dra_claim_status_writes_total",
			Help: "Writes of ResourceClaim.status.devices, by result.",
		}, []string{"result"}),
	}
}

func (o operation) observe(begin time.Time, err error) {
	o.seconds.Observe(time.Since(begin).Seconds())
	if err != nil {
		o.errors.Inc()
	}
}
