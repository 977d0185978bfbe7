// SPDX-License-Identifier: Apache-2.0

package tracing

import (
	"context"
	"crypto/rand"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// rootKey is the context key of the [trace.SpanContext] that a new span must have.
type rootKey struct{}

// idGenerator generates random ids, except for the root spans of objects. It implements
// sdktrace.IDGenerator.
type idGenerator struct{}

func (idGenerator) NewIDs(ctx context.Context) (id trace.TraceID, span trace.SpanID) {
	if root, ok := ctx.Value(rootKey{}).(trace.SpanContext); ok {
		return root.TraceID(), root.SpanID()
	}
	_, _ = rand.Read(id[:]) // never fails
	_, _ = rand.Read(span[:])
	return id, span
}

func (idGenerator) NewSpanID(context.Context, trace.TraceID) (span trace.SpanID) {
	_, _ = rand.Read(span[:])
	return span
}

// objectSampler samples only the spans of objects, because most calls of OPI agents belong to none.
// It implements sdktrace.Sampler.
type objectSampler struct{}

func (objectSampler) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	result := sdktrace.SamplingResult{Decision: sdktrace.Drop}
	if p.ParentContext.Value(rootKey{}) != nil ||
		trace.SpanContextFromContext(p.ParentContext).IsSampled() {
		result.Decision = sdktrace.RecordAndSample
	}
	return result
}

func (objectSampler) Description() string { return "spans of objects" }
