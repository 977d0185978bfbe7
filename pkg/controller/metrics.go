// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// metrics are the controller's own metrics. The metrics of controller-runtime are registered
// elsewhere.
type metrics struct {
	provisioning prometheus.Histogram
	errors       *prometheus.CounterVec
	orphans      *prometheus.CounterVec
}

// newMetrics registers the metrics. elected is closed once this process is the leader.
func newMetrics(
	registerer prometheus.Registerer, cache client.Reader, ports *model.Ports,
	elected <-chan struct{},
) *metrics {
	registerer.MustRegister(&portCollector{cache: cache, ports: ports, elected: elected})
	factory := promauto.With(registerer)
	return &metrics{
		provisioning: factory.NewHistogram(prometheus.HistogramOpts{
			Name: "xpu_port_provisioning_seconds",
			Help: "Time from the creation of an XPUPort until its xPU " +
				"serves it. The creation time is known to the second.",
			Buckets: []float64{
				.05, .1, .25, .5, 1, 2, 3, 5, 10, 20, 30, 60, 120,
			},
			NativeHistogramBucketFactor:    monitoring.NativeBucketFactor,
			NativeHistogramMaxBucketNumber: monitoring.NativeMaxBuckets,
		}),
		errors: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_opi_errors_total",
			Help: "Failed operations on OPI agents, by XPU, operation and gRPC code; " +
				"code Failed is a failure that the agent reported later.",
		}, []string{"xpu", "operation", "code"}),
		orphans: factory.NewCounterVec(prometheus.CounterOpts{
			Name: "xpu_orphans_deleted_total",
			Help: "Ports and networks of this cluster deleted from OPI agents because no object " +
				"wanted them, by XPU and kind: port, gateway, network or vrf.",
		}, []string{"xpu", "kind"}),
	}
}

// forget ends the series of an XPU that is gone.
func (m *metrics) forget(xpu string) {
	m.errors.DeletePartialMatch(prometheus.Labels{"xpu": xpu})
	m.orphans.DeletePartialMatch(prometheus.Labels{"xpu": xpu})
}

// failed counts an operation on an agent that failed.
func (m *metrics) failed(xpu, operation string, err error) {
	code := "Failed"
	if failure, ok := errors.AsType[*opi.Error](err); ok && failure.Err != nil {
		if c := status.Code(failure.Err); c != codes.Unknown {
			code = c.String()
		}
	}
	m.errors.WithLabelValues(xpu, operation, code).Inc()
}

// portCollector counts the Ports of the model at each scrape. Only the leader exports the counts,
// so that a sum over replicas is right.
type portCollector struct {
	cache   client.Reader
	ports   *model.Ports
	elected <-chan struct{}
}

var portsDesc = prometheus.NewDesc(
	"xpu_ports", "XPUPorts by XPU, which is _other if it does not exist, and by state: up, waiting, "+
		"refused, releasing, ahead if no pod has the XPUPort, or standby while its virtual machine is "+
		"being migrated. Only the leader has it.",
	[]string{"xpu", "state"}, nil)

// noXPU is the label of Ports whose XPU does not exist. No XPU can have this name. The names of
// Ports' XPUs are not used as labels otherwise, because nodes write them and could create any
// number of series.
const noXPU = "_other"

func (*portCollector) Describe(descs chan<- *prometheus.Desc) { descs <- portsDesc }

func (c *portCollector) Collect(out chan<- prometheus.Metric) {
	select {
	case <-c.elected:
	default:
		return
	}

	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()

	count, err := c.count(ctx)
	if err != nil {
		out <- prometheus.NewInvalidMetric(portsDesc, err)
		return
	}

	for s, n := range count {
		out <- prometheus.MustNewConstMetric(portsDesc, prometheus.GaugeValue, float64(n),
			s.xpu, s.state)
	}
}

// portSeries are the labels of a series.
type portSeries struct{ xpu, state string }

func (c *portCollector) count(ctx context.Context) (map[portSeries]int, error) {
	var xpus v1alpha1.XPUList
	if err := c.cache.List(ctx, &xpus, client.UnsafeDisableDeepCopy); err != nil {
		return nil, fmt.Errorf("list XPUs: %w", err)
	}

	exists := map[string]bool{}
	for i := range xpus.Items {
		exists[xpus.Items[i].Name] = true
	}

	ports, err := c.ports.All(ctx)
	if err != nil {
		return nil, err
	}

	count := map[portSeries]int{}
	for _, port := range ports {
		xpu := port.Spec.XPU
		if !exists[xpu] {
			xpu = noXPU
		}
		count[portSeries{xpu, stateOf(port)}]++
	}

	return count, nil
}

func stateOf(port *v1alpha1.XPUPort) string {
	ready := v1alpha1.ReadyOf(port.Status.Conditions)
	switch {
	case port.Spec.Ahead:
		return "ahead"
	case !port.DeletionTimestamp.IsZero():
		return "releasing"
	case ready.Status == metav1.ConditionTrue:
		return "up"
	case v1alpha1.Refused(ready.Reason):
		return "refused"
	case ready.Reason == v1alpha1.ReasonStandby:
		return "standby"
	}

	return "waiting"
}
