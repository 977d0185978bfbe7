// Package buildinfo is the metric that says which version of which program runs.
package buildinfo

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// NewCollector is the metric xpu_build_info: constantly 1, the version in its labels.
func NewCollector(program string) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "xpu_build_info",
		Help:        "Which version of which program this is.",
		ConstLabels: prometheus.Labels{"program": program, "version": version.String(), "goversion": runtime.Version()},
	}, func() float64 { return 1 })
}
