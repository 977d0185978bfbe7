// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"strings"
	"testing"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestTrace: the claim's trace has what was done for it, up to the call of the OPI agent.
func TestTrace(t *testing.T) {
	exporter := tracetest.NewInMemoryExporter()
	tracer, err := tracing.New(sdktrace.NewSimpleSpanProcessor(exporter), "xpu-controller",
		logr.Discard())
	must.Succeed(t, err)
	c := newCluster(t, func(o *Options) { o.Tracer = tracer })
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "blue")
	o := c.claim(want{name: "a", pool: "fast", function: vf(0)})
	c.up(o, vf(0))

	trace := strings.ReplaceAll(string(o.UID), "-", "")
	parents := func() map[string]string {
		names, parents := map[string]string{}, map[string]string{}
		spans := exporter.GetSpans()
		for _, s := range spans {
			names[s.SpanContext.SpanID().String()] = s.Name
		}

		for _, s := range spans {
			if s.SpanContext.TraceID().String() == trace {
				parents[s.Name] = names[s.Parent.SpanID().String()]
			}
		}

		return parents
	}

	const create = "opi_api.network.evpn_gw.v1alpha1.BridgePortService/CreateBridgePort"
	want := map[string]string{"claim to Ready": "", "create XPUPort": "claim to Ready",
		"serve Port": "claim to Ready", create: "serve Port"}
	c.eventually("the trace is complete", func() error {
		got := parents()
		for name, parent := range want {
			if has, is := got[name]; !is || has != parent {
				return fmt.Errorf("spans and their parents are %v, want %v among them", got, want)
			}
		}
		return nil
	})

	for _, s := range exporter.GetSpans() {
		if !strings.HasPrefix(trace, s.SpanContext.TraceID().String()) {
			t.Errorf("span %s is of trace %s, want none but %s", s.Name,
				s.SpanContext.TraceID(), trace)
		}
	}
}
