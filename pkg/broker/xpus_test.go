// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// TestWithoutEndpoint checks that a tenant does not read the endpoint of an OPI agent, and reads
// the text of an XPU that has none as it is.
func TestWithoutEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"xpu-1:50151": "the OPI agent at its endpoint answers",
		"xpu-2:50151": "the OPI agent at xpu-1:50151 answers",
		"":            "the OPI agent at xpu-1:50151 answers",
	} {
		xpu := &v1alpha1.XPU{Spec: v1alpha1.XPUSpec{Endpoint: endpoint}}
		if got := withoutEndpoint("the OPI agent at xpu-1:50151 answers", xpu); got != want {
			t.Errorf("endpoint %q: %q, want %q", endpoint, got, want)
		}
	}
}
