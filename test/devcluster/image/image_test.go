package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "app")
	if err := os.WriteFile(source, []byte("binary"), 0o755); err != nil {
		t.Fatal(err)
	}
	spec := Spec{Name: "devcluster.local/app:1", Entrypoint: []string{"/usr/bin/app", "-v"}, User: "65532",
		Files: []File{{Source: source, Target: "/usr/bin/app"}}}
	first, second := filepath.Join(dir, "1.tar"), filepath.Join(dir, "2.tar")
	for _, out := range []string{first, second} {
		if err := Write(out, spec); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(read(t, first), read(t, second)) {
		t.Error("the same input gives two images")
	}

	tag, err := name.NewTag(spec.Name)
	if err != nil {
		t.Fatal(err)
	}
	img, err := tarball.ImageFromPath(first, &tag)
	if err != nil {
		t.Fatal(err)
	}
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(spec.Entrypoint, config.Config.Entrypoint); diff != "" || config.Config.User != "65532" || config.OS != "linux" {
		t.Errorf("config: %+v", config)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if len(layers) != 1 {
		t.Fatalf("%d layers, want 1", len(layers))
	}
	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	want := map[string]int64{"dev/": 0o755, "etc/": 0o755, "proc/": 0o755, "sys/": 0o755, "tmp/": 0o1777,
		"usr/": 0o755, "usr/bin/": 0o755, "usr/bin/app": 0o755}
	if diff := cmp.Diff(want, modes(t, r)); diff != "" {
		t.Errorf("contents (-want +got):\n%s", diff)
	}
}

func TestWriteRejects(t *testing.T) {
	file := []File{{Source: os.Args[0], Target: "/app"}}
	for what, spec := range map[string]Spec{
		"no tag":        {Name: "devcluster.local/app", Entrypoint: []string{"/app"}, Files: file},
		"no registry":   {Name: "app:1", Entrypoint: []string{"/app"}, Files: file},
		"no entrypoint": {Name: "devcluster.local/app:1", Files: file},
		"no files":      {Name: "devcluster.local/app:1", Entrypoint: []string{"/app"}},
		"no such file":  {Name: "devcluster.local/app:1", Entrypoint: []string{"/app"}, Files: []File{{Source: "/nonexistent", Target: "/app"}}},
		"a directory":   {Name: "devcluster.local/app:1", Entrypoint: []string{"/app"}, Files: []File{{Source: "/", Target: "/app"}}},
	} {
		out := filepath.Join(t.TempDir(), "out.tar")
		if err := Write(out, spec); err == nil {
			t.Errorf("%s: no error", what)
		}
		if _, err := os.Stat(out); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a file was written", what)
		}
	}
}

func read(t *testing.T, file string) []byte {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func modes(t *testing.T, r io.Reader) map[string]int64 {
	t.Helper()
	found := map[string]int64{}
	for in := tar.NewReader(r); ; {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return found
		}
		if err != nil {
			t.Fatal(err)
		}
		found[header.Name] = header.Mode
	}
}
