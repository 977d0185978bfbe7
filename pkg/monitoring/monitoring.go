// SPDX-License-Identifier: Apache-2.0

// Package monitoring has the metrics that every program has, and serves metrics and health by HTTP.
package monitoring

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// Histograms are both native and classic. In native ones, each bucket is 10 % wider than the one
// before, up to a maximum number of buckets.
const (
	NativeBucketFactor = 1.1
	NativeMaxBuckets   = 160
)

// NewBuildInfo returns the metric xpu_build_info, which is always 1 and has the version in its
// labels.
func NewBuildInfo(program string) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "xpu_build_info",
		Help: "Which version of which program this is.",
		ConstLabels: prometheus.Labels{
			"program": program, "version": version.String(), "goversion": runtime.Version(),
		},
	}, func() float64 { return 1 })
}

// NewRegistry returns a registry with the metrics of the Go runtime and the process, and
// [NewBuildInfo].
func NewRegistry(program string) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewBuildInfo(program),
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

// maxScrapes bounds the parallel scrapes, because anyone who reaches the port may send requests.
// Further requests get status 503.
const maxScrapes = 16

// Handler returns a handler that serves the metrics of the registry.
func Handler(registry *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(registry, promhttp.HandlerOpts{MaxRequestsInFlight: maxScrapes})
}

// ReadyHandler returns a handler that answers whether a program is ready: status 200, or 503 with
// the error that ready returns.
func ReadyHandler(ready func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	})
}

// Serve serves requests until ctx ends, and closes the listener. It logs protocol errors of
// clients.
func Serve(
	ctx context.Context, listener net.Listener, handler http.Handler, log logr.Logger,
) error {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second,
		ErrorLog: slog.NewLogLogger(logr.ToSlogHandler(log), slog.LevelInfo),
	}

	defer context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = server.Shutdown(grace)
	})()

	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve %s: %w", listener.Addr(), err)
	}

	return nil
}
