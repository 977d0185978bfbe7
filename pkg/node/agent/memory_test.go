// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"

	"github.com/prometheus/procfs"
)

// TestUnmapProgram: the program continues after its pages were unmapped, and has fewer of them.
func TestUnmapProgram(t *testing.T) {
	mapped := func() uint64 {
		t.Helper()
		self, err := procfs.Self()
		if err != nil {
			t.Fatal(err)
		}

		status, err := self.NewStatus()
		if err != nil {
			t.Fatal(err)
		}

		return status.RssFile
	}

	before := mapped()
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	if after := mapped(); after >= before/2 {
		t.Errorf("%d bytes of files are mapped, before %d: want less than half", after, before)
	}
}
