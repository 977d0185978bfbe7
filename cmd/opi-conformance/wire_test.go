// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// echo is a wire whose frames come back.
type echo chan []byte

func (e echo) Send(frame []byte) error { e <- frame; return nil }
func (e echo) Frames() <-chan []byte   { return e }
func (e echo) Close() error            { return nil }

// TestPass checks the lines of the command wire, and that its input ends it.
func TestPass(t *testing.T) {
	in, give := io.Pipe()
	take, out := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- pass(t.Context(), make(echo), in, out) }()

	for _, step := range []struct{ give, want string }{{"", "ready\n"}, {"0102AB\n", "0102ab\n"}} {
		if step.give != "" {
			_, err := io.WriteString(give, step.give)
			must.Succeed(t, err)
		}
		got := make([]byte, len(step.want))
		_, err := io.ReadFull(take, got)
		must.Succeed(t, err)
		if string(got) != step.want {
			t.Errorf("got %q, want %q", got, step.want)
		}
	}

	must.Succeed(t, give.Close())
	must.Succeed(t, <-ended)

	err := pass(t.Context(), make(echo), strings.NewReader("xyz\n"), &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "input: ") {
		t.Errorf("%v, want that the input is no frame", err)
	}
}
