package hooks

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the queue's.
type metrics struct {
	runs        *prometheus.CounterVec
	seconds     *prometheus.HistogramVec
	deadLetters *prometheus.CounterVec
}

// newMetrics registers the queue's metrics. length is asked whenever somebody reads them.
func newMetrics(registry prometheus.Registerer, length func() float64) *metrics {
	m := &metrics{
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_hook_runs_total",
			Help: "Runs of post-delete hooks, by hook and result: done, retry (will be run again) or failed (given up).",
		}, []string{"hook", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "xpu_hook_run_seconds",
			Help:    "How long runs of post-delete hooks took, by hook.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9),
		}, []string{"hook"}),
		deadLetters: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_hook_dead_letters_total",
			Help: "Post-delete hooks that were given up, by hook.",
		}, []string{"hook"}),
	}
	waiting := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "xpu_hook_queue_length",
		Help: "Functions that are back from their pods and not free yet: " +
			"their post-delete hooks run or wait to be run again.",
	}, length)
	registry.MustRegister(m.runs, m.seconds, m.deadLetters, waiting)
	return m
}

// ran counts one run of a hook.
func (m *metrics) ran(hook, result string, took time.Duration) {
	m.runs.WithLabelValues(hook, result).Inc()
	m.seconds.WithLabelValues(hook).Observe(took.Seconds())
}
