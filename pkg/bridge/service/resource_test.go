// SPDX-License-Identifier: Apache-2.0

package service

import (
	"strings"
	"testing"
)

// TestLongInput checks that an error does not repeat all that a client sent (AIP-193: messages
// should be brief). Errors are logged, and come back to the client in a header.
func TestLongInput(t *testing.T) {
	long := strings.Repeat("x", 1<<20)
	_, errName := networkNames.parseName(long)
	_, errID := portNames.parseName(portNames.prefix + long)
	_, _, errToken := page(nil, 0, long)
	for what, err := range map[string]error{"name": errName, "id": errID, "token": errToken} {
		if err == nil || len(err.Error()) > 1000 {
			t.Errorf("%s: %.200v", what, err)
		}
	}
}
