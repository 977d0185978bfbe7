// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"context"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	"google.golang.org/grpc"

	"github.com/opiproject/xpu-device-plugin/pkg/otlp/metrics"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// collector is an OpenTelemetry collector that keeps what it gets.
type collector struct {
	collectorpb.UnimplementedMetricsServiceServer
	mu       sync.Mutex
	requests []*collectorpb.ExportMetricsServiceRequest
}

func (c *collector) Export(
	_ context.Context, req *collectorpb.ExportMetricsServiceRequest,
) (*collectorpb.ExportMetricsServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests = append(c.requests, req)
	return &collectorpb.ExportMetricsServiceResponse{}, nil
}

// last returns the last value of a counter, and the name of the service that sent it.
func (c *collector) last(name string) (value float64, service string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, request := range c.requests {
		for _, r := range request.GetResourceMetrics() {
			for _, a := range r.GetResource().GetAttributes() {
				if a.GetKey() == "service.name" {
					service = a.GetValue().GetStringValue()
				}
			}
			for _, scope := range r.GetScopeMetrics() {
				value = max(value, counter(scope.GetMetrics(), name))
			}
		}
	}
	return value, service
}

func counter(all []*metricspb.Metric, name string) (value float64) {
	for _, m := range all {
		if points := m.GetSum().GetDataPoints(); m.GetName() == name && len(points) > 0 {
			value = points[0].GetAsDouble()
		}
	}
	return value
}

func TestSender(t *testing.T) {
	t.Setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
	c, server := &collector{}, grpc.NewServer()
	collectorpb.RegisterMetricsServiceServer(server, c)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	registry := prometheus.NewRegistry()
	frames := prometheus.NewCounter(prometheus.CounterOpts{Name: "frames_total", Help: "Frames."})
	registry.MustRegister(frames)
	frames.Add(3)

	ctx, stop := context.WithCancel(t.Context())
	sender, err := metrics.Dial(ctx, "http://"+listener.Addr().String(), "xpu-test", registry,
		logr.Discard())
	must.Succeed(t, err)
	ended := make(chan error, 1)
	go func() { ended <- sender.Run(ctx) }()

	must.Eventually(t, "the collector has the counter", func() bool {
		value, service := c.last("frames_total")
		return value == 3 && service == "xpu-test"
	})

	frames.Add(4)
	stop()
	must.Succeed(t, <-ended)
	if value, _ := c.last("frames_total"); value != 7 {
		t.Errorf("at the end the collector has %v frames, want 7", value)
	}
}

func TestCollectorThatIsAway(t *testing.T) {
	t.Setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
	t.Setenv("OTEL_METRIC_EXPORT_TIMEOUT", "20")
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	must.Succeed(t, listener.Close())

	logged := make(chan string, 100)
	log := funcr.New(func(_, line string) {
		select {
		case logged <- line:
		default:
		}
	}, funcr.Options{})

	ctx, stop := context.WithCancel(t.Context())
	sender, err := metrics.Dial(ctx, "http://"+listener.Addr().String(), "xpu-test",
		prometheus.NewRegistry(), log)
	must.Succeed(t, err)
	if line := <-logged; !strings.Contains(line, "Metrics were not sent") {
		t.Errorf("logged %s", line)
	}
	stop()
	must.Succeed(t, sender.Run(ctx))
}

func TestDialRefuses(t *testing.T) {
	_, err := metrics.Dial(t.Context(), "collector:4317", "xpu-test", prometheus.NewRegistry(),
		logr.Discard())
	if err == nil || !strings.Contains(err.Error(), "must be a URL such as http://collector:4317") {
		t.Errorf("%v", err)
	}
}
