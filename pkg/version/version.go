// Package version says which version of xpu-device-plugin a binary is.
package version

import (
	"cmp"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// release is set by the linker: -ldflags "-X github.com/opiproject/xpu-device-plugin/pkg/version.release=v1.2.3".
var release string

// String is the release, "v1.2.3", or what the Go toolchain knows about the source: a pseudo-version, or "(devel)".
func String() string {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return cmp.Or(release, "unknown")
	}
	return cmp.Or(release, info.Main.Version, "(devel)")
}

// NewCollector is the metric xpu_build_info: constantly 1, the version in its labels.
func NewCollector(program string) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "xpu_build_info",
		Help:        "Which version of which program this is.",
		ConstLabels: prometheus.Labels{"program": program, "version": String(), "goversion": runtime.Version()},
	}, func() float64 { return 1 })
}
