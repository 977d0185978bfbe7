// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

var created = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	source := filepath.Join(dir, "app")
	if err := os.WriteFile(source, []byte("binary"), 0o700); err != nil {
		t.Fatal(err)
	}

	spec := Spec{Entrypoint: []string{"/usr/bin/app", "-v"}, User: "65532",
		Labels: map[string]string{"a": "b"},
		Files:  []File{{Source: source, Target: "/usr/bin/app"}}}
	amd64, arm64 := spec, spec
	amd64.Arch, arm64.Arch = "amd64", "arm64"
	first, second := filepath.Join(dir, "1.tar"), filepath.Join(dir, "2.tar")
	for _, out := range []string{first, second} {
		if err := Write(out, "docker.io/library/app:1", created, amd64, arm64); err != nil {
			t.Fatal(err)
		}
	}

	if !bytes.Equal(read(t, first), read(t, second)) {
		t.Error("the same input gives two images")
	}

	if got, err := Name(first); err != nil || got != "docker.io/library/app:1" {
		t.Errorf("Name: %q, %v", got, err)
	}

	for _, other := range []string{source, filepath.Join(dir, "none.tar")} {
		if got, err := Name(other); err == nil {
			t.Errorf("Name of %s: %q, want an error", other, got)
		}
	}

	manifest, images := unpack(t, first)
	if got := manifest.Annotations["io.containerd.image.name"]; got != "docker.io/library/app:1" {
		t.Errorf("the archive names the image %q", got)
	}

	for i, arch := range []string{"amd64", "arm64"} {
		if err := validate.Image(images[i]); err != nil {
			t.Error(err)
		}

		config, err := images[i].ConfigFile()
		if err != nil {
			t.Fatal(err)
		}

		got := Spec{Arch: config.Architecture, Entrypoint: config.Config.Entrypoint,
			User: config.Config.User, Labels: config.Config.Labels}
		want := Spec{Arch: arch, Entrypoint: spec.Entrypoint, User: spec.User, Labels: spec.Labels}
		if diff := cmp.Diff(want, got); diff != "" || config.OS != "linux" ||
			!config.Created.Equal(created) {
			t.Errorf("config %+v, -want +got:\n%s", config, diff)
		}
	}

	layers, err := images[0].Layers()
	if err != nil || len(layers) != 1 {
		t.Fatalf("%d layers, want 1: %v", len(layers), err)
	}

	r, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()

	want := map[string]int64{"dev/": 0o755, "etc/": 0o755, "proc/": 0o755, "sys/": 0o755,
		"tmp/": 0o1777,
		"usr/": 0o755, "usr/bin/": 0o755, "usr/bin/app": 0o755}
	if diff := cmp.Diff(want, modes(t, r)); diff != "" {
		t.Errorf("contents (-want +got):\n%s", diff)
	}
}

// unpack returns the index and the images of an archive.
func unpack(t *testing.T, archive string) (v1.Descriptor, []v1.Image) {
	t.Helper()
	dir := t.TempDir()
	if output, err := exec.Command("tar", "-C", dir, "-xf", archive).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}

	root, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		t.Fatal(err)
	}

	manifest, err := root.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if len(manifest.Manifests) != 1 {
		t.Fatalf("%d images in the archive, want one index", len(manifest.Manifests))
	}

	index, err := root.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}

	nested, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}

	var images []v1.Image
	for _, m := range nested.Manifests {
		img, err := index.Image(m.Digest)
		if err != nil {
			t.Fatal(err)
		}
		images = append(images, img)
	}

	return manifest.Manifests[0], images
}

func TestWriteRejects(t *testing.T) {
	const ref = "devcluster.local/app:1"
	file := []File{{Source: os.Args[0], Target: "/app"}}
	good := Spec{Arch: "amd64", Entrypoint: []string{"/app"}, Files: file}
	for what, test := range map[string]struct {
		ref  string
		spec []Spec
	}{
		"no tag":        {"devcluster.local/app", []Spec{good}},
		"no registry":   {"app:1", []Spec{good}},
		"no image":      {ref, nil},
		"no entrypoint": {ref, []Spec{{Arch: "amd64", Files: file}}},
		"no files":      {ref, []Spec{{Arch: "amd64", Entrypoint: []string{"/app"}}}},
		"no such file": {
			ref,
			[]Spec{{Arch: "amd64", Entrypoint: []string{"/app"},
				Files: []File{{Source: "/nonexistent", Target: "/app"}}}},
		},
		"a directory": {
			ref,
			[]Spec{{Arch: "amd64", Entrypoint: []string{"/app"},
				Files: []File{{Source: "/", Target: "/app"}}}},
		},
	} {
		out := filepath.Join(t.TempDir(), "out.tar")
		if err := Write(out, test.ref, created, test.spec...); err == nil {
			t.Errorf("%s: no error", what)
		}
		if left, err := os.ReadDir(filepath.Dir(out)); err != nil || len(left) > 0 {
			t.Errorf("%s: left %v, %v", what, left, err)
		}
	}
}

func TestWriteSBOM(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "pause")
	if output, err := exec.Command("go", "build", "-o", program,
		"../cmd/pause").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}

	files := []File{{Source: program, Target: "/app"}}
	specs := []Spec{
		{Arch: "amd64", Files: files,
			Labels: map[string]string{"org.opencontainers.image.version": "v1.2.3"}},
		{Arch: "arm64", Files: files},
	}

	first, second := filepath.Join(dir, "1.json"), filepath.Join(dir, "2.json")
	for _, out := range []string{first, second} {
		if err := WriteSBOM(out, "devcluster.local/app:1", specs...); err != nil {
			t.Fatal(err)
		}
	}

	if !bytes.Equal(read(t, first), read(t, second)) {
		t.Error("the same input gives two bills of materials")
	}

	var bom cdx.BOM
	if err := json.Unmarshal(read(t, first), &bom); err != nil {
		t.Fatal(err)
	}
	if c := bom.Metadata.Component; bom.SpecVersion != cdx.SpecVersion1_6 ||
		c.Name != "devcluster.local/app:1" || c.Version != "v1.2.3" {
		t.Errorf("%s of %s %s", bom.SpecVersion, c.Name, c.Version)
	}

	sum, err := digest(program)
	if err != nil {
		t.Fatal(err)
	}

	found := map[string]cdx.Component{}
	for _, c := range *bom.Components {
		found[c.BOMRef] = c
	}

	for _, ref := range []string{"linux/amd64/app", "linux/arm64/app"} {
		if c := found[ref]; c.Hashes == nil || (*c.Hashes)[0].Value != sum {
			t.Errorf("%s: %+v, want digest %s", ref, c, sum)
		}
	}

	for _, dependency := range *bom.Dependencies {
		for _, ref := range *dependency.Dependencies {
			if _, ok := found[ref]; !ok {
				t.Errorf("%s needs %s, which is not in the list", dependency.Ref, ref)
			}
		}
	}

	if std := "pkg:golang/std@" +
		strings.TrimPrefix(runtime.Version(), "go"); found[std].Name != "std" {
		t.Errorf("%s is not in the list", std)
	}

	if err := os.WriteFile(filepath.Join(dir, "text"), []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}

	text := Spec{
		Arch: "amd64", Files: []File{{Source: filepath.Join(dir, "text"), Target: "/text"}},
	}
	if err := WriteSBOM(filepath.Join(dir, "3.json"), "devcluster.local/app:1", text); err == nil ||
		!strings.Contains(err.Error(), "Go programs only") {
		t.Errorf("of a text: %v", err)
	}
}

func TestModule(t *testing.T) {
	got := module(debug.Module{
		Path: "example.com/a", Version: "v2.0.0+incompatible",
		Sum: "h1:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
	})

	want := cdx.Component{
		BOMRef:     "pkg:golang/example.com/a@v2.0.0%2Bincompatible",
		Type:       cdx.ComponentTypeLibrary,
		Name:       "example.com/a",
		Version:    "v2.0.0+incompatible",
		PackageURL: "pkg:golang/example.com/a@v2.0.0%2Bincompatible",
		Hashes: &[]cdx.Hash{
			{Algorithm: cdx.HashAlgoSHA256,
				Value: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
		},
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
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
