// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/go-logr/logr/testr"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var devices = []specs.Device{{
	Name: "a", ContainerEdits: specs.ContainerEdits{Env: []string{"A=1"}},
}}

// list returns the names of the files in a directory.
func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	if got := list(t, dir); !slices.Equal(got, want) {
		t.Errorf("%s has %q, want %q", dir, got, want)
	}
}

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
	wantFiles(t, path, "xpu.opiproject.org-a.yaml")
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
	wantFiles(t, path, "xpu.opiproject.org-a.yaml")
}

// TestCopies checks that the files of a library come back until it removes them.
func TestCopies(t *testing.T) {
	root := t.TempDir()
	dir, copies := filepath.Join(root, "run"), filepath.Join(root, "lib", "cdi")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	old := filepath.Join(dir, "lib_old.json") // of an agent that kept no copies
	must.Succeed(t, os.WriteFile(old, []byte("old"), 0o600))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "others.json"), nil, 0o600))

	must.Succeed(t, os.Mkdir(filepath.Join(dir, "lib_dir.json"), 0o755)) // cannot be copied
	c := cdi.NewCopies(dir, copies)
	if restored, err := c.Restore(); err != nil || len(restored) != 0 {
		t.Errorf("restored %q, %v without copies", restored, err)
	}
	if err := c.Adopt("lib_*.json"); err == nil {
		t.Error("a directory was copied")
	}
	must.Succeed(t, os.Remove(filepath.Join(dir, "lib_dir.json")))
	must.Succeed(t, c.Adopt("lib_*.json"))
	one := filepath.Join(dir, "lib_one.json")
	must.Succeed(t, c.WriteFile(one, []byte("one"), 0o644))
	elsewhere := filepath.Join(root, "metadata.json")
	must.Succeed(t, c.WriteFile(elsewhere, []byte("data"), 0o644))
	wantFiles(t, copies, "lib_old.json", "lib_one.json")

	must.Succeed(t, os.RemoveAll(dir))
	found, err := c.Glob(filepath.Join(dir, "lib_*.json"))
	must.Succeed(t, err)
	if !slices.Equal(found, []string{old, one}) {
		t.Errorf("found %q, want those that have a copy", found)
	}
	restored, err := c.Restore()
	must.Succeed(t, err)
	if !slices.Equal(restored, []string{"lib_old.json", "lib_one.json"}) {
		t.Errorf("restored %q", restored)
	}
	if data, err := os.ReadFile(one); err != nil || string(data) != "one" {
		t.Errorf("restored is %q, %v", data, err)
	}
	found, err = c.Glob(filepath.Join(dir, "lib_*.json"))
	if err != nil || len(found) != 2 {
		t.Errorf("found %q, %v, want each once", found, err)
	}

	// Somebody removes the copies under a running agent.
	must.Succeed(t, os.RemoveAll(copies))
	must.Succeed(t, c.WriteFile(one, []byte("two"), 0o644))
	must.Succeed(t, c.Adopt("lib_*.json"))
	wantFiles(t, copies, "lib_old.json", "lib_one.json")

	unfinished := []string{
		filepath.Join(dir, ".lib_one.json.1.tmp"), filepath.Join(copies, ".lib_one.json.1.tmp"),
	}
	for _, file := range unfinished {
		must.Succeed(t, os.WriteFile(file, nil, 0o600))
	}
	if restored, err := c.Restore(); err != nil || len(restored) != 0 {
		t.Errorf("restored %q, %v of a file that was not finished", restored, err)
	}
	if found, err := c.Unfinished("lib_*.json"); err != nil || !slices.Equal(found, unfinished) {
		t.Errorf("unfinished %q, %v, want %q", found, err, unfinished)
	}
	for _, file := range unfinished {
		must.Succeed(t, os.Remove(file))
	}

	must.Succeed(t, c.Remove(one))
	must.Succeed(t, os.Remove(old))
	must.Succeed(t, c.Remove(old)) // only the copy is left
	must.Succeed(t, c.Remove(elsewhere))
	if err := c.Remove(one); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v of a file that is gone", err)
	}
	restored, err = c.Restore()
	if err != nil || len(restored) != 0 {
		t.Errorf("restored %q, %v after the removal", restored, err)
	}
	wantFiles(t, dir)
	wantFiles(t, copies)
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
		return cdi.KeepComplete(ctx, path, testr.New(t), dir.Restore)
	})
	for _, remove := range []string{filepath.Join(path, file), path} {
		must.Succeed(t, os.Rename(remove, filepath.Join(t.TempDir(), "away")))
		must.Eventually(t, "the file is there again", func() bool { return dir.Has(file) })
	}
}
