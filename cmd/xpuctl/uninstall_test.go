// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strings"
	"testing"
)

// TestConfirm: only a clear yes is one.
func TestConfirm(t *testing.T) {
	for answer, want := range map[string]bool{
		"y\n": true, "YES\n": true, " yes \n": true, "\n": false, "n\n": false, "": false, "yep\n": false,
	} {
		if got := confirm(t.Context(), strings.NewReader(answer), io.Discard); got != want {
			t.Errorf("%q: %v, want %v", answer, got, want)
		}
	}
	if isTerminal(strings.NewReader("")) {
		t.Error("a text is no terminal")
	}
}

// TestConfirmInterrupted: an interrupt at the question is a no, although no answer comes.
func TestConfirmInterrupted(t *testing.T) {
	silent, end := io.Pipe()
	defer end.Close()
	ctx, interrupt := context.WithCancel(t.Context())
	interrupt()
	if confirm(ctx, silent, io.Discard) {
		t.Error("an interrupt is a yes")
	}
}
