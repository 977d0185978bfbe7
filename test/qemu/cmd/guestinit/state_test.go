// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLeft(t *testing.T) {
	before := state{"netdev of 0000:01:00.0": "up true", "netdev of 0000:01:10.0": "up false",
		"device lo": "up true"}
	after := state{
		"netdev of 0000:01:00.0": "up false", "bridge br0": "up true", "device lo": "up true",
	}

	want := []string{
		"bridge br0 is new",
		"netdev of 0000:01:00.0: up false; it was: up true",
		"netdev of 0000:01:10.0 is gone",
	}

	if diff := cmp.Diff(want, after.left(before)); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if left := before.left(before); len(left) > 0 {
		t.Errorf("left %q by nobody", left)
	}
}
