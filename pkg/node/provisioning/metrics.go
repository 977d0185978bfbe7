package provisioning

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are those of direct mode.
type metrics struct {
	connected *prometheus.GaugeVec
	errors    *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer) *metrics {
	factory := promauto.With(registry)
	return &metrics{
		connected: factory.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_direct_connected", Help: "1 while there is a connection to the OPI agent of an xPU, else 0, by xPU.",
		}, []string{"xpu"}),
		errors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_direct_opi_errors_total", Help: "Failed operations on OPI agents, by xPU and operation.",
		}, []string{"xpu", "operation"}),
	}
}

func (m *metrics) report(xpu string, connected bool) {
	value := 0.0
	if connected {
		value = 1
	}
	m.connected.WithLabelValues(xpu).Set(value)
}
