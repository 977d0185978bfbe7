// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// metrics are the broker's own metrics. Those of controller-runtime are registered separately.
type metrics struct {
	connected *prometheus.GaugeVec
	renewal   *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	factory := promauto.With(registerer)
	return &metrics{
		connected: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_broker_tenant_connected",
			Help: "Whether the cluster of an XPUTenant answers: 1, or 0. Only the leader has it.",
		}, []string{"tenant"}),
		renewal: factory.NewHistogramVec(prometheus.HistogramOpts{
			Name: "xpu_broker_lease_renewal_seconds",
			Help: "How long the clusters of XPUTenants took to renew the " +
				"broker's Lease.",
			Buckets: []float64{
				.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10,
			},
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}, []string{"tenant"}),
	}
}

// forget deletes the metrics of a tenant that no longer exists.
func (m *metrics) forget(tenant string) {
	m.connected.DeleteLabelValues(tenant)
	m.renewal.DeleteLabelValues(tenant)
}
