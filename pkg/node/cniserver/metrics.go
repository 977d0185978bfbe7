// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"slices"
	"strconv"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

// Metrics are the metrics of a [Server].
type Metrics struct {
	seconds                   *prometheus.HistogramVec
	errors                    *prometheus.CounterVec
	refused, spooled, badFile prometheus.Counter
	spool                     prometheus.Gauge
}

// NewMetrics registers the server's metrics.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	factory := promauto.With(registry)
	return &Metrics{
		seconds: factory.NewHistogramVec(prometheus.HistogramOpts{
			Name: "xpu_cni_request_seconds",
			Help: "How long the CNI plugin waited for the agent and the " +
				"xPU, by command and error code (0 is success).",
			Buckets:                        prometheus.ExponentialBuckets(0.001, 2, 18),
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}, []string{"command", "code"}),
		errors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_cni_request_errors_total", Help: "Requests of the CNI plugin that failed, " +
				"by command; the runtime tries again.",
		}, []string{"command"}),
		refused: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_cni_connections_refused_total",
			Help: "Connections to the agent's CNI socket by users that may not use it.",
		}),
		spooled: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_cni_spooled_requests_total",
			Help: "Requests that the CNI plugin left in the spool and that were done since.",
		}),
		badFile: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_cni_spool_bad_files_total", Help: "Files in the spool that are no " +
				"request, and were moved to its directory bad.",
		}),
		spool: factory.NewGauge(prometheus.GaugeOpts{
			Name: "xpu_cni_spool_files", Help: "Requests in the spool that are not done yet.",
		}),
	}
}

// commands has the commands that a request may have.
var commands = []wire.Command{
	wire.Add, wire.Del, wire.Check, wire.GC, wire.Status, wire.Address, wire.Result,
}

// request measures one request.
func (m *Metrics) request(command wire.Command, begin time.Time, err *types.Error) {
	if !slices.Contains(commands, command) {
		command = "unknown"
	}

	code := uint(0)
	if err != nil {
		code = err.Code
		m.errors.WithLabelValues(string(command)).Inc()
	}

	m.seconds.WithLabelValues(string(command),
		strconv.FormatUint(uint64(code), 10)).Observe(time.Since(begin).Seconds())
}
