// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/opiproject/xpu-device-plugin/pkg/monitoring"
)

func TestServeMonitoring(t *testing.T) {
	addresses := make(chan string, 1)
	log := funcr.NewJSON(func(line string) {
		if _, rest, ok := strings.Cut(line, `"address":"`); ok {
			address, _, _ := strings.Cut(rest, `"`)
			addresses <- address
		}
	}, funcr.Options{})

	registry := monitoring.NewRegistry("xpu-test")
	var problem atomic.Pointer[error]
	notYet := errors.New("not connected to the container runtime at /run/nri.sock")
	problem.Store(&notYet)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	config := Config{Servers: Servers{ListenAddress: "127.0.0.1:0"}}
	current := func() error { return *problem.Load() }
	go func() { done <- serveMonitoring(ctx, config, registry, current, log) }()

	base := "http://" + <-addresses
	want := func(path string, code int, text string) {
		t.Helper()
		response, err := http.Get(base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()

		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		if response.StatusCode != code || !strings.Contains(string(body), text) {
			t.Errorf("GET %s: %d %q, want %d with %q", path, response.StatusCode, body, code, text)
		}
	}

	want("/healthz", http.StatusOK, "ok")
	want("/readyz", http.StatusServiceUnavailable, notYet.Error())
	want("/metrics", http.StatusOK, `program="xpu-test"`)
	want("/", http.StatusNotFound, "")
	var ready error
	problem.Store(&ready)
	want("/readyz", http.StatusOK, "ok")
	stop()
	if err := <-done; err != nil {
		t.Errorf("serveMonitoring = %v, want nil when its context ends", err)
	}
}

func TestServeImpossibleAddress(t *testing.T) {
	config := Config{Servers: Servers{ListenAddress: "256.0.0.1:1"}}
	err := serveMonitoring(t.Context(), config, prometheus.NewRegistry(), nil, logr.Discard())
	if err == nil || !strings.Contains(err.Error(), "--listen") {
		t.Errorf("serveMonitoring = %v for an address that cannot be, want an error", err)
	}
}
