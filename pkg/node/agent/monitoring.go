// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net"
	"net/http"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/profiles"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring/secure"
)

func (a *agent) serveMonitoring(ctx context.Context) error {
	return serveMonitoring(ctx, a.env.config, a.env.registry, a.ready, a.env.log)
}

func (a *agent) serveProfiles(ctx context.Context) error {
	return serveProfiles(ctx, a.env.config.ProfilesAddress, a.env.log)
}

// serveMonitoring serves /healthz, /readyz and /metrics until ctx ends.
func serveMonitoring(
	ctx context.Context, config Config, registry *prometheus.Registry, ready func() error,
	log logr.Logger,
) error {
	listener, err := net.Listen("tcp", config.ListenAddress)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}

	log.Info("Serving health and metrics", "address", listener.Addr().String(), "secure",
		config.MetricsSecure)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("ok\n"))
	})
	mux.Handle("GET /readyz", monitoring.ReadyHandler(ready))
	if !config.MetricsSecure {
		mux.Handle("GET /metrics", monitoring.Handler(registry))
		return monitoring.Serve(ctx, listener, mux, log)
	}
	defer listener.Close()

	metrics, err := secure.Handler(config.Kubernetes, monitoring.Handler(registry),
		log.WithName("metrics"))
	if err != nil {
		return fmt.Errorf("--metrics-secure: %w", err)
	}

	mux.Handle("GET /metrics", metrics)
	certificate, err := secure.OpenCertificate(config.MetricsCertDir)
	if err != nil {
		return fmt.Errorf("--metrics-cert-dir: %w", err)
	}

	serving, ctx := errgroup.WithContext(ctx)
	serving.Go(func() error { return certificate.Follow(ctx) })
	serving.Go(func() error {
		return monitoring.Serve(ctx, certificate.Listener(listener), mux, log)
	})

	return serving.Wait()
}

// serveProfiles serves /debug/pprof at the address until ctx ends. It does nothing if the address
// is empty.
func serveProfiles(ctx context.Context, address string, log logr.Logger) error {
	if address == "" {
		return nil
	}
	listener, err := profiles.Listen(address)
	if err != nil {
		return fmt.Errorf("--pprof-listen: %w", err)
	}
	return profiles.Serve(ctx, listener, log)
}
