// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"crypto/rand"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// rootKey is the key of the [trace.SpanContext] that a span is to have, in its context.
type rootKey struct{}

// ids are at random but for spans of objects as a whole. It is an sdktrace.IDGenerator.
type ids struct{}

func (ids) NewIDs(ctx context.Context) (id trace.TraceID, span trace.SpanID) {
	if root, ok := ctx.Value(rootKey{}).(trace.SpanContext); ok {
		return root.TraceID(), root.SpanID()
	}
	_, _ = rand.Read(id[:]) // it never fails
	_, _ = rand.Read(span[:])
	return id, span
}

func (ids) NewSpanID(context.Context, trace.TraceID) (span trace.SpanID) {
	_, _ = rand.Read(span[:])
	return span
}

// sampler takes the spans of objects, and no others: most calls of OPI agents are for none. It is
// an sdktrace.Sampler.
type sampler struct{}

func (sampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	result := sdktrace.SamplingResult{Decision: sdktrace.Drop}
	if p.ParentContext.Value(rootKey{}) != nil ||
		trace.SpanContextFromContext(p.ParentContext).IsSampled() {
		result.Decision = sdktrace.RecordAndSample
	}
	return result
}

func (sampler) Description() string { return "spans of objects" }
