package bridge

import (
	"context"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
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
	networks, ports := m.agent.count()
	for _, state := range []string{"up", "down", "deleting"} {
		ch <- prometheus.MustNewConstMetric(m.ports, prometheus.GaugeValue, float64(ports[state]), state)
		ch <- prometheus.MustNewConstMetric(m.nets, prometheus.GaugeValue, float64(networks[state]), state)
	}
}

// count is how many networks and ports are in each state.
func (a *Agent) count() (networks, ports map[string]int) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	networks, ports = map[string]int{}, map[string]int{}
	for _, n := range a.networks {
		networks[stateWord(n.deleting, n.failure)]++
	}
	for _, p := range a.ports {
		ports[stateWord(p.deleting, a.failureOf(p))]++
	}
	return networks, ports
}

func stateWord(deleting bool, failure error) string {
	switch {
	case deleting:
		return "deleting"
	case failure != nil:
		return "down"
	}
	return "up"
}

func (m *Metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	begin := time.Now()
	reply, err := handle(ctx, req)
	m.calls.WithLabelValues(path.Base(info.FullMethod), status.Code(err).String()).Observe(time.Since(begin).Seconds())
	return reply, err
}
