// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"runtime"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

func TestBuildInfo(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewBuildInfo("xpu-test"))
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if len(families) != 1 || families[0].GetName() != "xpu_build_info" ||
		len(families[0].GetMetric()) != 1 {
		t.Fatalf("gathered %v, want xpu_build_info once", families)
	}

	metric := families[0].GetMetric()[0]
	if value := metric.GetGauge().GetValue(); value != 1 {
		t.Errorf("value is %v, want 1", value)
	}

	labels := map[string]string{}
	for _, label := range metric.GetLabel() {
		labels[label.GetName()] = label.GetValue()
	}

	want := map[string]string{
		"program": "xpu-test", "version": version.String(), "goversion": runtime.Version(),
	}
	for name, value := range want {
		if labels[name] != value {
			t.Errorf("label %s is %q, want %q", name, labels[name], value)
		}
	}
}
