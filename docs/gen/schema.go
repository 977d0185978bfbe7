// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"

	"github.com/invopop/jsonschema"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
)

// scheduleSchema returns the JSON schema of xpuctl schedule's output, with the comments of its
// types.
func scheduleSchema() ([]byte, error) {
	const module = "github.com/opiproject/xpu-device-plugin"
	reflector := &jsonschema.Reflector{AllowAdditionalProperties: true} // fields may be added
	for _, dir := range []string{"pkg/schedule", "pkg/schedule/report"} {
		if err := reflector.AddGoComments(module, dir); err != nil {
			return nil, fmt.Errorf("comments of %s: %w", dir, err)
		}
	}

	schema := reflector.Reflect(&report.Schedule{})
	schema.Title, schema.ID = "Schedule of xpuctl", ""
	content, err := json.MarshalIndent(schema, "", "  ")

	return append(content, '\n'), err
}
