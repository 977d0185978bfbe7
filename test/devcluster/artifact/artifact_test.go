// SPDX-License-Identifier: Apache-2.0

package artifact

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/devcluster"
)

func TestModuleVersion(t *testing.T) {
	goMod := `module m

require k8s.io/one v1.0.0

require (
	k8s.io/kubernetes v1.37.1
	k8s.io/two v0.2.0 // indirect
)

replace (
	k8s.io/three => k8s.io/three v0.3.0
)
`
	for module, want := range map[string]string{
		"k8s.io/kubernetes": "v1.37.1",
		"k8s.io/one":        "v1.0.0",
		"k8s.io/two":        "v0.2.0",
		"k8s.io/three":      "",
		"k8s.io/kube":       "",
	} {
		got, err := moduleVersion(goMod, module)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%s: got %q, %v; want %q", module, got, err, want)
		}
	}
}

func TestVersionFlags(t *testing.T) {
	got, err := versionFlags("v1.37.1")
	if err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		"version.gitVersion=v1.37.1", "version.gitMajor=1", "version.gitMinor=37",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%s lacks %s", got, want)
		}
	}

	if _, err := versionFlags("v1"); err == nil {
		t.Error("v1 was taken for a version")
	}
}

func TestCountPackages(t *testing.T) {
	output := "go: downloading k8s.io/api v0.37.1\nruntime\nk8s.io/api/core/v1\n# " +
		"k8s.io/kubernetes/cmd\nmain.go:1:2: wrong\n"
	var compiled atomic.Int64
	others := countPackages(strings.NewReader(output), &compiled)
	if compiled.Load() != 2 {
		t.Errorf("%d packages, want 2", compiled.Load())
	}
	if got := string(others); !strings.Contains(got, "main.go:1:2: wrong") ||
		strings.Contains(got, "core/v1") {
		t.Errorf("other lines: %q", got)
	}
}

func TestOSRelease(t *testing.T) {
	file := filepath.Join(t.TempDir(), "os-release")
	if err := os.WriteFile(file, []byte("ID=debian\nVERSION_CODENAME=\"bookworm\"\n"),
		0o644); err != nil {
		t.Fatal(err)
	}

	for field, want := range map[string]string{
		"ID": "debian", "VERSION_CODENAME": "bookworm", "VERSION": "",
	} {
		got, err := osRelease(file, field)
		if got != want || (err != nil) != (want == "") {
			t.Errorf("%s: got %q, %v; want %q", field, got, err, want)
		}
	}
}

func TestSourcesNameTheVersion(t *testing.T) {
	cache := Cache{Dir: t.TempDir(), Sources: devcluster.Sources, Log: io.Discard}
	set, artifacts, err := cache.plan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(set.KubernetesVersion, "v1.") || len(artifacts) != 4 {
		t.Errorf("version %q, %d artifacts", set.KubernetesVersion, len(artifacts))
	}
	if _, err := cache.Find(t.Context()); !errors.Is(err, ErrMissing) {
		t.Errorf("Find in an empty cache: %v, want %v", err, ErrMissing)
	}
}

// TestPatchReleases: a patch release is built of the module of its minor release, and of no other.
func TestPatchReleases(t *testing.T) {
	cache := Cache{Dir: t.TempDir(), Sources: devcluster.Sources, Log: io.Discard}
	paths := map[string]string{}
	for _, version := range []string{"", "1.34", "1.34.0", "1.34.99", "1.37.0", "1.37.99"} {
		cache.Kubernetes = version
		set, _, err := cache.plan(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if want := "v" + version; strings.Count(version, ".") == 2 && set.KubernetesVersion != want {
			t.Errorf("version %s, want %s", set.KubernetesVersion, want)
		}
		if other, ok := paths[set.Kubernetes]; ok {
			t.Errorf("%q and %q are the same programs", version, other)
		}
		paths[set.Kubernetes] = version

		m, err := cache.kubernetesModule()
		if err != nil || m.incomplete != (strings.Count(version, ".") == 2) {
			t.Errorf("%s: incomplete %t, %v", version, m.incomplete, err)
		}
		own, _ := strings.CutPrefix(set.KubernetesVersion, "v1.")
		for line := range strings.Lines(m.goMod) {
			_, replaced, _ := strings.Cut(line, "=> k8s.io/")
			if replaced != "" && !strings.HasSuffix(line, "v0."+own+"\n") {
				t.Errorf("%s: %s", version, line)
			}
		}
	}

	for _, version := range []string{"1.33.1", "1.34.x", "2.34.1"} {
		cache.Kubernetes = version
		if _, _, err := cache.plan(t.Context()); err == nil ||
			!strings.Contains(err.Error(), "a patch release of these") {
			t.Errorf("%s: error %v", version, err)
		}
	}
}

func TestPathDependsOnEveryInput(t *testing.T) {
	cache := Cache{Dir: "/cache"}
	seen := map[string][]string{}
	for _, inputs := range [][]string{nil, {"a"}, {"a", "b"}, {"ab"}, {"b", "a"}, {"a", "b", ""}} {
		path := cache.path(artifact{dir: "x", inputs: inputs})
		if other, ok := seen[path]; ok {
			t.Errorf("%q and %q are both at %s", inputs, other, path)
		}
		seen[path] = inputs
	}
}

func TestBuildOnce(t *testing.T) {
	cache := Cache{Dir: t.TempDir(), Log: io.Discard}
	var made atomic.Int64
	a := artifact{name: "a", dir: "x", make: func(_ context.Context, target string) error {
		made.Add(1)
		return os.WriteFile(filepath.Join(target, "file"), nil, 0o644)
	}}

	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if err := cache.build(t.Context(), a); err != nil {
				t.Error(err)
			}
		})
	}

	all.Wait()
	if made.Load() != 1 {
		t.Errorf("made %d times, want once", made.Load())
	}
	if !exists(filepath.Join(cache.path(a), "file")) {
		t.Error("the artifact is not there")
	}
}

func TestFailedBuildLeavesNothing(t *testing.T) {
	cache := Cache{Dir: t.TempDir(), Log: io.Discard}
	failure := errors.New("failure")
	a := artifact{name: "a", dir: "x", make: func(_ context.Context, target string) error {
		return errors.Join(os.WriteFile(filepath.Join(target, "half"), nil, 0o644), failure)
	}}
	if err := cache.build(t.Context(), a); !errors.Is(err, failure) {
		t.Errorf("got %v, want %v", err, failure)
	}
	if exists(cache.path(a)) || exists(cache.path(a)+".part") {
		t.Error("half an artifact is in the cache")
	}
}

func TestLinkReplaces(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "bin")
	for _, kubernetes := range []string{"/old", "/new"} {
		if err := (Set{Kubernetes: kubernetes}).Link(dir); err != nil {
			t.Fatal(err)
		}
	}

	got, err := os.Readlink(filepath.Join(dir, "kube-apiserver"))
	if err != nil || got != "/new/kube-apiserver" {
		t.Errorf("kube-apiserver links to %q, %v", got, err)
	}
}

// TestVersions: the versions are those that the programs say.
func TestVersions(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "usr/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for program, says := range map[string]string{
		"containerd": "containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6+deb13u1",
		"crio":       "crio version 1.34.0\n   GitCommit: unknown",
	} {
		script := "#!/bin/sh\ncat <<E\n" + says + "\nE\n"
		path := filepath.Join(dir, "usr/bin", program)
		if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}

	set := Set{KubernetesVersion: "v1.37.1", Runtime: dir}
	for want, isCRIO := range map[string]bool{
		"Kubernetes v1.37.1, containerd 1.7.24~ds1": false, "Kubernetes v1.37.1, cri-o 1.34.0": true,
	} {
		set.CRIO = isCRIO
		if got, err := set.Versions(t.Context()); err != nil || got != want {
			t.Errorf("%q, %v, want %q", got, err, want)
		}
	}
	set.Runtime = t.TempDir()
	if got, err := set.Versions(t.Context()); err == nil {
		t.Errorf("%q without a runtime", got)
	}
}
