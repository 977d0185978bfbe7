// SPDX-License-Identifier: Apache-2.0

package keep_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/node/keep"
	"github.com/opiproject/xpu-device-plugin/pkg/node/keep/keeptest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestCopies checks that the files of a library come back until it removes them.
func TestCopies(t *testing.T) {
	root := t.TempDir()
	dir, copies := filepath.Join(root, "run"), filepath.Join(root, "lib", "cdi")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	old := filepath.Join(dir, "lib_old.json") // of an agent that kept no copies
	must.Succeed(t, os.WriteFile(old, []byte("old"), 0o600))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "others.json"), nil, 0o600))

	must.Succeed(t, os.Mkdir(filepath.Join(dir, "lib_dir.json"), 0o755)) // cannot be copied
	c := keep.NewCopies(dir, copies)
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
	keeptest.WantFiles(t, copies, "lib_old.json", "lib_one.json")

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
	keeptest.WantFiles(t, copies, "lib_old.json", "lib_one.json")

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
	keeptest.WantFiles(t, dir)
	keeptest.WantFiles(t, copies)
}

// TestUnreadableCopy: it is not known whether a file has a copy that cannot be looked at.
func TestUnreadableCopy(t *testing.T) {
	root := t.TempDir()
	dir, copies := filepath.Join(root, "run"), filepath.Join(root, "lib")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	c := keep.NewCopies(dir, copies)
	must.Succeed(t, c.WriteFile(filepath.Join(dir, "one"), []byte("one"), 0o644))
	for name, want := range map[string]bool{"one": true, "none": false} {
		if has, err := c.Has(name); has != want || err != nil {
			t.Errorf("%s has a copy: %t, %v, want %t", name, has, err, want)
		}
	}

	must.Succeed(t, os.RemoveAll(copies))
	must.Succeed(t, os.Symlink(copies, copies)) // ELOOP
	if has, err := c.Has("one"); err == nil {
		t.Errorf("has a copy: %t, want an error", has)
	}
	if err := c.Adopt("one"); err == nil {
		t.Error("the copies cannot be looked at, and there is no error")
	}
}

// TestForgetReplaced: a file that somebody else has written does not come back as it was before.
func TestForgetReplaced(t *testing.T) {
	root := t.TempDir()
	dir, copies := filepath.Join(root, "run"), filepath.Join(root, "lib")
	must.Succeed(t, os.Mkdir(dir, 0o755))
	c := keep.NewCopies(dir, copies)
	for _, name := range []string{"missing", "replaced", "same"} {
		must.Succeed(t, c.WriteFile(filepath.Join(dir, name), []byte("ours"), 0o644))
	}
	must.Succeed(t, os.Remove(filepath.Join(dir, "missing")))
	must.Succeed(t, os.WriteFile(filepath.Join(dir, "replaced"), []byte("theirs"), 0o644))

	for _, name := range []string{"missing", "never", "replaced", "same"} {
		must.Succeed(t, c.ForgetReplaced(name))
	}
	keeptest.WantFiles(t, copies, "missing", "same")
	keeptest.WantFiles(t, dir, "replaced", "same")
}
