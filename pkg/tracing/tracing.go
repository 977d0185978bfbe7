// SPDX-License-Identifier: Apache-2.0

// Package tracing sends traces to an OpenTelemetry collector, which show how long each stage took
// from a claim to a working Function.
//
// Each claim, and each pod that has Functions without a claim, has one trace. Its id is the
// object's UID without dashes. So controller and agents agree on it without communication, and
// people can find the trace by the UID.
package tracing

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/otlp"
)

// EndpointUsage describes the endpoint of [Dial], as the usage of a flag.
const EndpointUsage = "URL of an OpenTelemetry collector that takes traces by OTLP over gRPC, " +
	"such as http://collector:4317, or https:// for TLS; " +
	"OTEL_EXPORTER_OTLP_* in the environment say more; empty: no traces"

// Tracer creates spans. Its methods are safe for concurrent use, and do nothing on a nil Tracer.
type Tracer struct {
	log      logr.Logger
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// Dial returns a Tracer that sends spans by OTLP over gRPC to a collector at "http://host:port" or
// "https://host:port". For "" it returns nil. Environment variables such as
// OTEL_EXPORTER_OTLP_HEADERS and OTEL_EXPORTER_OTLP_CERTIFICATE add settings (specification of the
// OpenTelemetry protocol exporter). Dial does not wait for a connection. Spans that the collector
// does not accept are dropped, and the error is logged.
func Dial(ctx context.Context, endpoint, program string, log logr.Logger) (*Tracer, error) {
	if endpoint == "" {
		return nil, nil
	}
	if err := otlp.CheckEndpoint(endpoint); err != nil {
		return nil, err
	}

	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpointURL(endpoint))
	if err != nil {
		return nil, fmt.Errorf("collector %s: %w", endpoint, err)
	}

	return New(sdktrace.NewBatchSpanProcessor(loggingExporter{exporter, log}), program, log)
}

// loggingExporter logs the errors of an exporter, which OpenTelemetry would print.
type loggingExporter struct {
	sdktrace.SpanExporter
	log logr.Logger
}

func (l loggingExporter) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	if err := l.SpanExporter.ExportSpans(ctx, spans); err != nil {
		l.log.Error(err, "Traces are lost", "spans", len(spans))
	}
	return nil
}

// New returns a Tracer that passes spans to the processor.
func New(processor sdktrace.SpanProcessor, program string, log logr.Logger) (*Tracer, error) {
	described, err := otlp.Describe(program)
	if err != nil {
		return nil, err
	}

	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(processor),
		sdktrace.WithResource(described),
		sdktrace.WithIDGenerator(idGenerator{}), sdktrace.WithSampler(objectSampler{}))
	return &Tracer{log, provider, provider.Tracer("github.com/opiproject/xpu-device-plugin")}, nil
}

// Stop sends the remaining spans, even if ctx has ended, if the collector accepts them soon. The
// Tracer sends nothing afterwards.
func (t *Tracer) Stop(ctx context.Context) {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Error(err, "The last traces are lost")
	}
}

// Stage starts a span in the trace of the object with this UID. The caller must end it with the
// error of the stage. Spans and OPI calls in the returned context are its children. An object whose
// UID is not a UUID has no trace.
func (t *Tracer) Stage(
	ctx context.Context, of types.UID, name string, attributes ...attribute.KeyValue,
) (_ context.Context, end func(error)) {
	root, ok := rootOf(of)
	if t == nil || !ok {
		return ctx, func(error) {}
	}

	ctx, span := t.tracer.Start(trace.ContextWithRemoteSpanContext(ctx, root), name,
		trace.WithAttributes(attributes...))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}

// Whole writes the root span of an object, which ends now and is the parent of its stages.
func (t *Tracer) Whole(
	ctx context.Context, of types.UID, name string, begin time.Time,
	attributes ...attribute.KeyValue,
) {
	root, ok := rootOf(of)
	if t == nil || !ok {
		return
	}
	_, span := t.tracer.Start(context.WithValue(ctx, rootKey{}, root), name,
		trace.WithNewRoot(), trace.WithTimestamp(begin), trace.WithAttributes(attributes...))
	span.End()
}

// ClientHandler returns a handler that makes a span of each gRPC call in the context of a
// [Tracer.Stage], and passes it to the server (W3C Trace Context). It returns nil for a nil Tracer.
func (t *Tracer) ClientHandler() stats.Handler {
	if t == nil {
		return nil
	}
	return otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(t.provider),
		otelgrpc.WithPropagators(propagation.TraceContext{}))
}

// rootOf returns the root span of an object. Its id is the second half of the UID.
func rootOf(uid types.UID) (trace.SpanContext, bool) {
	var id trace.TraceID
	raw, err := hex.DecodeString(strings.ReplaceAll(string(uid), "-", ""))
	if err != nil || len(raw) != len(id) {
		return trace.SpanContext{}, false
	}

	copy(id[:], raw)
	root := trace.SpanContextConfig{
		TraceID: id, SpanID: trace.SpanID(id[8:]), TraceFlags: trace.FlagsSampled, Remote: true,
	}
	return trace.NewSpanContext(root), id.IsValid()
}
