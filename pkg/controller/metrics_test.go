// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// A replica that waits has the Ports in its cache too: counted twice, a sum over replicas would be
// wrong.
func TestOnlyLeaderCountsPorts(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	newMetrics(registry, nil, nil, make(chan struct{}))
	if n, err := testutil.GatherAndCount(registry, "xpu_ports"); n != 0 || err != nil {
		t.Errorf("%d series, %v, of a replica that is not the leader; want none", n, err)
	}
}

// TestPortsOfNoXPU: nodes write which XPU a Port is of, and make no series by that.
func TestPortsOfNoXPU(t *testing.T) {
	scheme, err := Scheme()
	must.Succeed(t, err)
	xpu := &v1alpha1.XPU{}
	xpu.Name = "card"
	var ports []*v1alpha1.XPUPort
	for i := range 500 {
		port := &v1alpha1.XPUPort{}
		port.Namespace, port.Name = "xpu-system", fmt.Sprint("port-", i)
		port.Spec.XPU = fmt.Sprint("made-up-", i)
		if i == 0 {
			port.Spec.XPU = xpu.Name
		}
		ports = append(ports, port)
	}

	elected := make(chan struct{})
	close(elected)

	registry := prometheus.NewPedanticRegistry()
	xpus := fake.NewClientBuilder().WithScheme(scheme).WithObjects(xpu).Build()
	newMetrics(registry, xpus, model.NewPorts(ports...), elected)
	families, err := registry.Gather()
	must.Succeed(t, err)

	got := map[string]float64{}
	for _, family := range families {
		for _, metric := range family.Metric {
			for _, label := range metric.Label {
				if label.GetName() == "xpu" {
					got[label.GetValue()] += metric.Gauge.GetValue()
				}
			}
		}
	}

	want := map[string]float64{"card": 1, "_other": 499}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Ports by XPU, -want +got:\n%s", diff)
	}
}
