package bridge

import (
	"context"
	"path"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Metrics are the agent's Prometheus metrics. They are a [prometheus.Collector].
type Metrics struct {
	calls *prometheus.HistogramVec
	agent *Agent
	ports *prometheus.Desc
	nets  *prometheus.Desc
}

// NewMetrics makes the metrics of an agent.
func NewMetrics(a *Agent) *Metrics {
	return &Metrics{
		agent: a,
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "opi_bridge_rpc_duration_seconds",
			Help:    "Time the agent took for a call, by RPC and gRPC status code.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 4, 8), // 0.1 ms to 1.6 s
		}, []string{"method", "code"}),
		ports: prometheus.NewDesc("opi_bridge_ports", "Bridge ports, by state.", []string{"state"}, nil),
		nets:  prometheus.NewDesc("opi_bridge_networks", "Logical bridges, by state.", []string{"state"}, nil),
	}
}

// Describe is part of [prometheus.Collector].
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	m.calls.Describe(ch)
	ch <- m.ports
	ch <- m.nets
}

// Collect is part of [prometheus.Collector].
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.calls.Collect(ch)
	m.agent.mu.RLock()
	networks, ports := m.agent.networks.count(), m.agent.ports.count()
	m.agent.mu.RUnlock()
	for _, s := range []state{stateUp, stateDown, stateDeleting} {
		ch <- prometheus.MustNewConstMetric(m.ports, prometheus.GaugeValue, float64(ports[s]), s.word)
		ch <- prometheus.MustNewConstMetric(m.nets, prometheus.GaugeValue, float64(networks[s]), s.word)
	}
}

// observe measures and logs calls.
func (m *Metrics) observe(log logr.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		begin := time.Now()
		reply, err := handle(ctx, req)
		took, rpc, code := time.Since(begin), path.Base(info.FullMethod), status.Code(err)
		m.calls.WithLabelValues(rpc, code.String()).Observe(took.Seconds())
		call := log.WithValues("rpc", rpc, "code", code.String(), "took", took.Round(time.Microsecond).String())
		if err != nil && code != codes.NotFound {
			call.Info("call refused", "reason", status.Convert(err).Message())
		} else {
			call.V(1).Info("call")
		}
		return reply, err
	}
}
