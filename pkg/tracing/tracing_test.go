// SPDX-License-Identifier: Apache-2.0

package tracing_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/go-logr/logr/testr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/pkg/tracing"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	uid     = "4b1a7e9c-52d3-4c1e-9f00-0123456789ab"
	traceID = "4b1a7e9c52d34c1e9f000123456789ab"
	rootID  = "9f000123456789ab"
)

func newTracer(t *testing.T) (*tracing.Tracer, *tracetest.InMemoryExporter) {
	t.Helper()
	exporter := tracetest.NewInMemoryExporter()
	tracer, err := tracing.New(sdktrace.NewSimpleSpanProcessor(exporter), "xpu-test",
		logr.Discard())
	must.Succeed(t, err)
	return tracer, exporter
}

// TestTrace checks that two programs which share only an object's UID write one trace.
func TestTrace(t *testing.T) {
	agent, ofAgent := newTracer(t)
	controller, ofController := newTracer(t)
	ctx, end := agent.Stage(t.Context(), uid, "prepare claim",
		attribute.String("k8s.node.name", "node1"))
	_, endInner := agent.Stage(ctx, uid, "attach Function")
	endInner(nil)
	end(errors.New("the xPU does not answer"))
	begin := time.Now().Add(-time.Minute)
	controller.Whole(t.Context(), uid, "claim to Ready", begin)

	spans := ofAgent.GetSpans()
	if len(spans) != 2 || spans[0].Name != "attach Function" || spans[1].Name != "prepare claim" {
		t.Fatalf("spans %v, want attach Function and prepare claim", spans)
	}

	for _, s := range spans {
		if got := s.SpanContext.TraceID().String(); got != traceID {
			t.Errorf("%s is of trace %s, want %s", s.Name, got, traceID)
		}
		if got := s.Parent.SpanID().String(); got != rootID {
			t.Errorf("%s is a part of span %s, want %s", s.Name, got, rootID)
		}
	}

	failed := spans[1]
	if failed.Status.Code != codes.Error || failed.Status.Description != "the xPU does not answer" {
		t.Errorf("status %v, want the error", failed.Status)
	}
	if !slices.Contains(failed.Attributes, attribute.String("k8s.node.name", "node1")) {
		t.Errorf("attributes %v, want the node's name", failed.Attributes)
	}
	if !slices.Contains(failed.Resource.Attributes(),
		attribute.String("service.name", "xpu-test")) {
		t.Errorf("resource %v, want the program's name", failed.Resource)
	}

	whole := ofController.GetSpans()
	if len(whole) != 1 || whole[0].SpanContext.TraceID().String() != traceID ||
		whole[0].SpanContext.SpanID().String() != rootID ||
		whole[0].Parent.IsValid() || !whole[0].StartTime.Equal(begin) {
		t.Errorf("spans %v, want span %s of trace %s without a parent, from %s", whole, rootID,
			traceID, begin)
	}
}

// TestNoTrace checks that nothing happens without a collector, and for objects whose UID is not a
// UUID.
func TestNoTrace(t *testing.T) {
	none, err := tracing.Dial(t.Context(), "", "xpu-test", testr.New(t))
	if none != nil || err != nil {
		t.Fatalf("Dial = %v, %v, want nil", none, err)
	}
	if handler := none.ClientHandler(); handler != nil {
		t.Errorf("ClientHandler = %v, want nil", handler)
	}

	some, exporter := newTracer(t)
	for _, tracer := range []*tracing.Tracer{none, some} {
		for _, of := range []string{
			"", "static-pod", "00000000-0000-0000-0000-000000000000", uid + uid,
		} {
			ctx, end := tracer.Stage(t.Context(), types.UID(of), "prepare claim")
			end(nil)
			if ctx != t.Context() {
				t.Errorf("%q: the context has changed", of)
			}
			tracer.Whole(t.Context(), types.UID(of), "claim to Ready", time.Now())
		}
		tracer.Stop(t.Context())
	}

	none.Whole(t.Context(), uid, "claim to Ready", time.Now())
	if spans := exporter.GetSpans(); len(spans) > 0 {
		t.Errorf("spans %v, want none", spans)
	}
}

// TestClientHandler checks that calls in a stage are its children and are passed to the server, and
// that other calls have no trace.
func TestClientHandler(t *testing.T) {
	tracer, exporter := newTracer(t)
	var parents []string
	listener := serve(t, func(s *grpc.Server) {
		healthpb.RegisterHealthServer(s, health.NewServer())
	},
		grpc.UnaryInterceptor(func(
			ctx context.Context, r any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
		) (any, error) {
			headers, _ := metadata.FromIncomingContext(ctx)
			parents = append(parents, strings.Join(headers["traceparent"], ","))
			return handle(ctx, r)
		}))

	conn, err := grpc.NewClient(listener, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStatsHandler(tracer.ClientHandler()))
	must.Succeed(t, err)
	defer conn.Close()

	check := func(ctx context.Context) {
		t.Helper()
		_, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
		must.Succeed(t, err)
	}

	check(t.Context())
	ctx, end := tracer.Stage(t.Context(), uid, "serve Port")
	check(ctx)
	end(nil)

	var stage, call tracetest.SpanStub
	must.Eventually(t, "both spans have ended", func() bool {
		for _, s := range exporter.GetSpans() {
			if s.Name == "serve Port" {
				stage = s
			} else {
				call = s
			}
		}
		return stage.Name != "" && call.Name != ""
	})

	if len(exporter.GetSpans()) != 2 || call.Name != "grpc.health.v1.Health/Check" ||
		call.Parent.SpanID() != stage.SpanContext.SpanID() {
		t.Errorf("spans %v, want serve Port and one call in it", exporter.GetSpans())
	}

	want := "00-" + traceID + "-" + call.SpanContext.SpanID().String() + "-01"
	if len(parents) != 2 || strings.HasSuffix(parents[0], "-01") || parents[1] != want {
		t.Errorf("the server was told %q, want nothing that is sampled and then %s", parents, want)
	}
}

// collector records the names of spans.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer
	names chan string
}

func (c *collector) Export(
	_ context.Context, r *collectorpb.ExportTraceServiceRequest,
) (*collectorpb.ExportTraceServiceResponse, error) {
	for _, resource := range r.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			for _, span := range scope.Spans {
				c.names <- span.Name
			}
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// TestDial checks that ended spans have reached the collector after Stop.
func TestDial(t *testing.T) {
	c := &collector{names: make(chan string, 1)}
	address := serve(t, func(s *grpc.Server) { collectorpb.RegisterTraceServiceServer(s, c) })
	tracer, err := tracing.Dial(t.Context(), "http://"+address, "xpu-test", testr.New(t))
	must.Succeed(t, err)
	_, end := tracer.Stage(t.Context(), uid, "attach Function")
	end(nil)
	tracer.Stop(t.Context())
	if got := <-c.names; got != "attach Function" {
		t.Errorf("the collector got %q, want attach Function", got)
	}

	for _, endpoint := range []string{"collector:4317", "grpc://collector:4317"} {
		if _, err := tracing.Dial(t.Context(), endpoint, "xpu-test", testr.New(t)); err == nil ||
			!strings.Contains(err.Error(), endpoint) {
			t.Errorf("%s: error %v, want one that names it", endpoint, err)
		}
	}
}

// TestNoCollector checks that an unreachable collector only causes a line in the log.
func TestNoCollector(t *testing.T) {
	var mutex sync.Mutex
	var logged []string
	log := funcr.New(func(_, args string) {
		mutex.Lock()
		defer mutex.Unlock()
		logged = append(logged, args)
	}, funcr.Options{})

	tracer, err := tracing.Dial(t.Context(), "http://127.0.0.1:1", "xpu-test", log)
	must.Succeed(t, err)
	_, end := tracer.Stage(t.Context(), uid, "attach Function")
	end(nil)
	tracer.Stop(t.Context())
	mutex.Lock()
	defer mutex.Unlock()

	if len(logged) == 0 || !strings.Contains(strings.ToLower(logged[0]), "traces are lost") {
		t.Errorf("logged %q, want that traces are lost", logged)
	}
}

// serve serves gRPC and returns the address.
func serve(t *testing.T, register func(*grpc.Server), options ...grpc.ServerOption) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must.Succeed(t, err)
	server := grpc.NewServer(options...)
	register(server)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return listener.Addr().String()
}
