package source

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type metrics struct {
	good   prometheus.Gauge
	errors prometheus.Counter
}

func newMetrics(registry prometheus.Registerer) metrics {
	factory := promauto.With(registry)
	return metrics{
		good: factory.NewGauge(prometheus.GaugeOpts{
			Name: "xpu_config_last_load_successful",
			Help: "Whether the file of --config-file counts as it is now (1), or only as it was before (0).",
		}),
		errors: factory.NewCounter(prometheus.CounterOpts{
			Name: "xpu_config_errors_total",
			Help: "Changes of the file of --config-file that were not taken over because something was wrong with them.",
		}),
	}
}

func (m metrics) loaded() { m.good.Set(1) }

func (m metrics) refused() {
	m.good.Set(0)
	m.errors.Inc()
}
