// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/go-logr/logr/testr"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep/keeptest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var devices = []specs.Device{{
	Name: "a", ContainerEdits: specs.ContainerEdits{Env: []string{"A=1"}},
}}

// TestRestore checks that files come back that were written or adopted, and no others.
func TestRestore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi")
	dir, err := cdi.Open(path)
	must.Succeed(t, err)
	for _, file := range []string{"xpu.opiproject.org-a.yaml", "xpu.opiproject.org-b.yaml"} {
		must.Succeed(t, dir.Write(file, kind, devices))
	}
	must.Succeed(t, dir.Remove("xpu.opiproject.org-b.yaml"))
	must.Succeed(t, os.WriteFile(filepath.Join(path, "other.json"), []byte("{}"), 0o600))
	content, err := os.ReadFile(filepath.Join(path, "xpu.opiproject.org-a.yaml"))
	must.Succeed(t, err)

	must.Succeed(t, os.RemoveAll(path))
	restored, err := dir.Restore()
	must.Succeed(t, err)
	if !slices.Equal(restored, []string{"xpu.opiproject.org-a.yaml"}) {
		t.Errorf("restored %q", restored)
	}
	keeptest.WantFiles(t, path, "xpu.opiproject.org-a.yaml")
	again, err := os.ReadFile(filepath.Join(path, "xpu.opiproject.org-a.yaml"))
	must.Succeed(t, err)
	if string(again) != string(content) {
		t.Errorf("restored is %s, it was %s", again, content)
	}
	if restored, err := dir.Restore(); err != nil || len(restored) != 0 {
		t.Errorf("restored %q, %v although nothing is missing", restored, err)
	}

	// The next agent knows only what it finds and adopts.
	next, err := cdi.Open(path)
	must.Succeed(t, err)
	must.Succeed(t, os.RemoveAll(path))
	if restored, err := next.Restore(); err != nil || len(restored) != 0 {
		t.Errorf("restored %q, %v although nothing was adopted", restored, err)
	}
	next.Adopt("xpu.opiproject.org-a.yaml")
	next.Adopt("xpu.opiproject.org-unknown.yaml")
	if restored, err := next.Restore(); err != nil || len(restored) != 1 {
		t.Errorf("restored %q, %v, want the adopted file", restored, err)
	}
	keeptest.WantFiles(t, path, "xpu.opiproject.org-a.yaml")
}

// TestKeepComplete checks that files come back whenever they are removed, also with their
// directory.
func TestKeepComplete(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cdi")
	dir, err := cdi.Open(path)
	must.Succeed(t, err)
	const file = "xpu.opiproject.org-a.yaml"
	must.Succeed(t, dir.Write(file, kind, devices))

	must.Run(t, func(ctx context.Context) error {
		return keep.Complete(ctx, path, testr.New(t), dir.Restore)
	})
	for _, remove := range []string{filepath.Join(path, file), path} {
		must.Succeed(t, os.Rename(remove, filepath.Join(t.TempDir(), "away")))
		must.Eventually(t, "the file is there again", func() bool { return dir.Has(file) })
	}
}
