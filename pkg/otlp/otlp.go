// SPDX-License-Identifier: Apache-2.0

// Package otlp has what traces and metrics have in common when a program sends them to an
// OpenTelemetry collector (specification of the OpenTelemetry protocol exporter).
package otlp

import (
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/resource"

	"github.com/opiproject/xpu-device-plugin/pkg/version"
)

// CheckEndpoint returns an error unless the endpoint of a collector is a URL "http://host:port" or
// "https://host:port".
func CheckEndpoint(endpoint string) error {
	if !strings.HasPrefix(endpoint, "http://") && !strings.HasPrefix(endpoint, "https://") {
		return fmt.Errorf("collector %q: must be a URL such as http://collector:4317, or "+
			"https:// for TLS", endpoint)
	}
	return nil
}

// Describe returns the description of a program that the collector gets with all that the program
// sends. OTEL_RESOURCE_ATTRIBUTES in the environment adds to it.
func Describe(program string) (*resource.Resource, error) {
	described, err := resource.Merge(resource.Default(), resource.NewSchemaless(
		attribute.String("service.name", program),
		attribute.String("service.version", version.String())))
	if err != nil {
		return nil, fmt.Errorf("description of the program: %w", err)
	}
	return described, nil
}
