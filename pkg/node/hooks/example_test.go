// SPDX-License-Identifier: Apache-2.0

package hooks

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWorkedExample runs the hook of docs/how-to/post-delete-hooks.md, with a shell and a directory
// of its own, and compares the input that the page shows with the input that hooks get.
func TestWorkedExample(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../../docs/how-to/post-delete-hooks.md")
	must.Succeed(t, err)

	block := func(language string) string {
		_, rest, _ := strings.Cut(string(page), "\n```"+language+"\n")
		text, _, found := strings.Cut(rest, "\n```\n")
		if !found {
			t.Fatalf("no block of %s", language)
		}
		return text + "\n"
	}

	dir, state := hooksDir(t), filepath.Join(t.TempDir(), "state")
	busybox := filepath.Join(t.TempDir(), "busybox")
	write(t, busybox, "#!/bin/sh\nexec \"$@\"\n", 0o755)
	write(t, filepath.Join(dir, "10-usage"), strings.NewReplacer(
		"/etc/xpu-agent/hooks.d/.bin/busybox", busybox, "/var/lib/xpu-agent", state,
	).Replace(block("sh")), 0o755)

	d := newDirectory(Options{Node: "node1", Dir: dir, Timeout: time.Minute, Log: logr.Discard()})
	if err := d.run(t.Context(), "10-usage", released(0)); err == nil ||
		!strings.Contains(err.Error(), "exit status 75") {
		t.Errorf("error %v without a directory, want one that asks for another try", err)
	}

	must.Succeed(t, os.Mkdir(state, 0o700))
	a := released(0)
	must.Succeed(t, d.run(t.Context(), "10-usage", a))
	noted, err := os.ReadFile(filepath.Join(state, "usage.jsonl"))
	must.Succeed(t, err)
	want, err := input("node1", a, 1)
	must.Succeed(t, err)
	if string(noted) != string(want) {
		t.Errorf("noted %s, want %s", noted, want)
	}

	decoder := json.NewDecoder(strings.NewReader(block("json")))
	decoder.DisallowUnknownFields()
	var shown Input
	if err := decoder.Decode(&shown); err != nil {
		t.Errorf("the input that is shown: %v", err)
	}
}
