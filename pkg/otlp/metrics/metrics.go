// SPDX-License-Identifier: Apache-2.0

// Package metrics sends the metrics that a program has for Prometheus to an OpenTelemetry
// collector.
package metrics

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	bridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/opiproject/xpu-device-plugin/pkg/otlp"
)

// EndpointUsage describes the endpoint of [Dial], as the usage of a flag.
const EndpointUsage = "`URL` of an OpenTelemetry collector that takes metrics by OTLP over gRPC, " +
	"such as http://collector:4317, or https:// for TLS; OTEL_EXPORTER_OTLP_* and " +
	"OTEL_METRIC_EXPORT_INTERVAL in the environment say more; empty: none are sent"

// Sender sends metrics once a minute, or once in OTEL_METRIC_EXPORT_INTERVAL milliseconds.
type Sender struct {
	log      logr.Logger
	provider *metric.MeterProvider
}

// Dial returns a Sender that sends what the gatherer has to a collector at "http://host:port" or
// "https://host:port". Environment variables such as OTEL_EXPORTER_OTLP_HEADERS and
// OTEL_EXPORTER_OTLP_CERTIFICATE add settings (specification of the OpenTelemetry protocol
// exporter). Dial does not wait for a connection. Metrics that the collector does not accept are
// dropped, and the error is logged. The next ones are sent all the same, and have the whole
// counters.
func Dial(
	ctx context.Context, endpoint, program string, from prometheus.Gatherer, log logr.Logger,
) (*Sender, error) {
	if err := otlp.CheckEndpoint(endpoint); err != nil {
		return nil, err
	}
	described, err := otlp.Describe(program)
	if err != nil {
		return nil, err
	}

	exporter, err := otlpmetricgrpc.New(ctx, otlpmetricgrpc.WithEndpointURL(endpoint))
	if err != nil {
		return nil, fmt.Errorf("collector %s: %w", endpoint, err)
	}

	reader := metric.NewPeriodicReader(loggingExporter{exporter, log},
		metric.WithProducer(loggingProducer{
			bridge.NewMetricProducer(bridge.WithGatherer(from)), log,
		}))
	provider := metric.NewMeterProvider(metric.WithReader(reader), metric.WithResource(described))

	return &Sender{log, provider}, nil
}

// Run sends metrics until ctx ends, and then once more, if the collector accepts them soon.
func (s *Sender) Run(ctx context.Context) error {
	<-ctx.Done()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := s.provider.Shutdown(ctx); err != nil {
		s.log.Error(err, "The last metrics are lost")
	}
	return nil
}

// loggingExporter logs the errors of an exporter, which OpenTelemetry would print.
type loggingExporter struct {
	metric.Exporter
	log logr.Logger
}

func (l loggingExporter) Export(ctx context.Context, m *metricdata.ResourceMetrics) error {
	if err := l.Exporter.Export(ctx, m); err != nil && !errors.Is(err, context.Canceled) {
		l.log.Error(err, "Metrics were not sent")
	}
	return nil
}

// loggingProducer logs the errors of a producer, which OpenTelemetry would print. What could be
// read is sent.
type loggingProducer struct {
	metric.Producer
	log logr.Logger
}

func (l loggingProducer) Produce(ctx context.Context) ([]metricdata.ScopeMetrics, error) {
	scopes, err := l.Producer.Produce(ctx)
	if err != nil {
		l.log.Error(err, "Some metrics could not be read")
	}
	return scopes, nil
}
