// SPDX-License-Identifier: Apache-2.0

package version

import "testing"

func TestStringIsNeverEmpty(t *testing.T) {
	if String() == "" {
		t.Error("String() is empty")
	}
}

func TestReleaseOfTheLinkerWins(t *testing.T) {
	t.Cleanup(func() { release = "" })
	release = "v1.2.3"
	if got := String(); got != "v1.2.3" {
		t.Errorf("String() = %q, want v1.2.3", got)
	}
}
