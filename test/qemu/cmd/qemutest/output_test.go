// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"testing"
)

func TestLinePrefixer(t *testing.T) {
	var out bytes.Buffer
	w := &linePrefixer{to: &lockedWriter{to: &out}, prefix: "igb: "}
	for _, text := range []string{"one\n", "two\nthree\n"} {
		if n, err := w.Write([]byte(text)); n != len(text) || err != nil {
			t.Errorf("Write = %d, %v", n, err)
		}
	}

	if got, want := out.String(), "igb: one\nigb: two\nigb: three\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
