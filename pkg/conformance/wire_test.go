// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestCommandWire checks a wire that is a command, and what is said of one that fails.
func TestCommandWire(t *testing.T) {
	open := func(text string, limit time.Duration) (Wire, error) {
		path := filepath.Join(t.TempDir(), "wire")
		must.Succeed(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
		hooks := (Commands{Wire: path, Timeout: limit}).Hooks("ocabc", Endpoint{})
		return hooks.OpenWire(t.Context(), Port{ID: "ocabcp1", MAC: []byte{2, 17, 0, 0, 0, 1}})
	}

	// The command answers each frame by the same one, and before by lines that are no frames.
	wire, err := open("echo noise\necho ready\necho xyz\n"+
		`while read f; do [ "$OPI_CONFORMANCE_PORT_ID" = ocabcp1 ] && echo "$f"; done`, time.Minute)
	must.Succeed(t, err)
	must.Succeed(t, wire.Send([]byte{1, 2, 0xab}))
	if got := string(<-wire.Frames()); got != "\x01\x02\xab" {
		t.Errorf("heard %x", got)
	}
	must.Succeed(t, wire.Close())
	if err := wire.Send([]byte{1}); err == nil {
		t.Error("a closed wire sends")
	}

	if _, err := open("echo no such netdev >&2; exit 3", time.Minute); err == nil ||
		!strings.Contains(err.Error(), `ended before it printed "ready": no such netdev`) {
		t.Errorf("a command that fails: %v", err)
	}
	if _, err := open("exec sleep 100", time.Millisecond); err == nil ||
		!strings.Contains(err.Error(), `did not print "ready" in 1ms`) {
		t.Errorf("a command that hangs: %v", err)
	}
}

// TestStubbornWire checks that a command is killed that does not end with its input.
func TestStubbornWire(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wire")
	must.Succeed(t, os.WriteFile(path, []byte("#!/bin/sh\necho ready\nexec sleep 100"), 0o700))
	hooks := (Commands{Wire: path, Timeout: time.Second}).Hooks("ocabc", Endpoint{})
	wire, err := hooks.OpenWire(t.Context(), Port{ID: "ocabcp1"})
	must.Succeed(t, err)

	begin := time.Now()
	must.Succeed(t, wire.Close())
	if took := time.Since(begin); took > time.Minute {
		t.Errorf("Close took %s", took)
	}
}
