// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestMetricsOf(t *testing.T) {
	dir := t.TempDir()
	source := `package p

var (
	a = prometheus.NewCounter(prometheus.CounterOpts{Name: "a_total", Help: "One " + "thing."})
	b = factory.NewHistogramVec(prometheus.HistogramOpts{Name: "b_seconds", Help: "B.", Buckets: nil}, []string{"x", "y"})
	c = prometheus.NewDesc("c", "C.", []string{"z"}, nil)
	l = []string{"m"}
	f = prometheus.NewDesc("f_total", "F.", l, nil)
	d = prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "d", Help: "D.", ConstLabels: prometheus.Labels{"v": v}}, nil)
	e = errors.New("no metric")
)
`

	if err := os.WriteFile(filepath.Join(dir, "p.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}

	got, err := metricsOf(dir)
	if err != nil {
		t.Fatal(err)
	}

	want := []metric{
		{"a_total", "counter", "One thing.", nil},
		{"b_seconds", "histogram", "B.", []string{"x", "y"}},
		{"c", "gauge", "C.", []string{"z"}},
		{"f_total", "counter", "F.", []string{"m"}},
		{"d", "gauge", "D.", []string{"v"}},
	}

	if diff := cmp.Diff(want, got, cmp.AllowUnexported(metric{})); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if _, err := metricsOf(t.TempDir()); err == nil {
		t.Error("a directory without Go files is no error")
	}
}
