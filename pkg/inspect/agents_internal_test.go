// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"io"
	"strings"
	"testing"
)

// TestEndlessAnswer checks that endless output of an agent's program is cut off and reported as an
// error.
func TestEndlessAnswer(t *testing.T) {
	out := limitedBuffer{left: 100}
	if _, err := out.Write(make([]byte, 100)); err != nil {
		t.Errorf("100 bytes: %v", err)
	}
	if _, err := io.Copy(&out, strings.NewReader("x")); err == nil ||
		!strings.Contains(err.Error(), "too long") {
		t.Errorf("another byte: %v", err)
	}
	if out.all.Len() != 100 {
		t.Errorf("%d bytes are kept", out.all.Len())
	}
}
