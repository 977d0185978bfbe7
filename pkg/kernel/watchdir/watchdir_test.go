// SPDX-License-Identifier: Apache-2.0

package watchdir_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
)

func open(t *testing.T, path string, matters func(fsnotify.Event) bool) *watchdir.Dir {
	t.Helper()
	d, err := watchdir.Open(path, matters)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })

	if err := d.Watch(); err != nil {
		t.Fatal(err)
	}

	return d
}

// changed calls do and waits until the change is reported.
func changed(t *testing.T, d *watchdir.Dir, what string, do func() error) {
	t.Helper()
	if err := do(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-d.Changes():
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: nobody was told", what)
	}
}

func write(path string) func() error {
	return func() error { return os.WriteFile(path, []byte("x"), 0o600) }
}

// drained waits until all earlier changes are reported. It creates a file, because the kernel
// reports changes in order.
func drained(t *testing.T, d *watchdir.Dir, dir string) {
	t.Helper()
	marker := filepath.Join(dir, "marker")
	changed(t, d, "marker", write(marker))

	for {
		select {
		case <-d.Changes():
		case <-time.After(50 * time.Millisecond):
			return
		}
	}
}

func TestChanges(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}

	d := open(t, dir, nil)
	changed(t, d, "a file came", write(filepath.Join(dir, "a")))
	drained(t, d, dir)
	changed(t, d, "a file went", func() error { return os.Remove(filepath.Join(dir, "a")) })
	drained(t, d, dir)
	changed(t, d, "the directory went", func() error { return os.RemoveAll(dir) })
	if err := d.Watch(); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v, want one that names %s", err, dir)
	}

	changed(t, d, "the directory came", func() error { return os.Mkdir(dir, 0o700) })
	if err := d.Watch(); err != nil {
		t.Fatal(err)
	}

	changed(t, d, "a file came into it", write(filepath.Join(dir, "b")))
}

func TestMatters(t *testing.T) {
	parent := t.TempDir()
	dir := filepath.Join(parent, "dir")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}

	asked := make(chan string, 100)
	d := open(t, dir, func(event fsnotify.Event) bool {
		asked <- event.Name
		return event.Has(fsnotify.Create) && filepath.Base(event.Name) == "wanted"
	})

	for _, path := range []string{filepath.Join(parent, "beside"), filepath.Join(dir, "other")} {
		if err := write(path)(); err != nil {
			t.Fatal(err)
		}
	}

	// Changes of the parent's other entries are not passed to matters.
	if first := <-asked; first != filepath.Join(dir, "other") {
		t.Errorf("asked about %s", first)
	}

	select {
	case <-d.Changes():
		t.Error("told of what does not matter")
	default:
	}

	changed(t, d, "what matters", write(filepath.Join(dir, "wanted")))
}
