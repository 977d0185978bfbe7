package provisioning

import "github.com/prometheus/client_golang/prometheus"

// metrics are those of direct mode.
type metrics struct {
	connected *prometheus.GaugeVec
	errors    *prometheus.CounterVec
}

func newMetrics(registry prometheus.Registerer) *metrics {
	m := &metrics{
		connected: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "xpu_direct_connected", Help: "1 while there is a connection to the OPI agent of an xPU, else 0, by xPU.",
		}, []string{"xpu"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_direct_opi_errors_total", Help: "Failed operations on OPI agents, by xPU and operation.",
		}, []string{"xpu", "operation"}),
	}
	registry.MustRegister(m.connected, m.errors)
	return m
}

func (m *metrics) report(xpu string, connected bool) {
	value := 0.0
	if connected {
		value = 1
	}
	m.connected.WithLabelValues(xpu).Set(value)
}
