// SPDX-License-Identifier: Apache-2.0

package workflows

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// plugin is krew's manifest of a kubectl plugin, without what scripts/krew does not use:
// https://github.com/kubernetes-sigs/krew/blob/master/pkg/index/types.go
type plugin struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Metadata   struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Spec struct {
		Version          string     `json:"version"`
		Homepage         string     `json:"homepage"`
		ShortDescription string     `json:"shortDescription"`
		Description      string     `json:"description"`
		Platforms        []platform `json:"platforms"`
	} `json:"spec"`
}

type platform struct {
	Selector struct {
		MatchLabels map[string]string `json:"matchLabels"`
	} `json:"selector"`
	URI    string `json:"uri"`
	SHA256 string `json:"sha256"`
	Bin    string `json:"bin"`
}

// archives returns a directory with archives as scripts/binaries names them. Their content does not
// matter to the manifest.
func archives(t *testing.T, version string, platforms ...string) string {
	t.Helper()
	directory := t.TempDir()
	for _, platform := range platforms {
		path := filepath.Join(directory, "xpuctl_"+version+"_"+platform+".tar.gz")
		must.Succeed(t, os.WriteFile(path, []byte("archive for "+platform), 0o600))
	}
	return directory
}

// TestKrewManifest: krew installs an archive only if it has the digest of the manifest.
func TestKrewManifest(t *testing.T) {
	directory := archives(t, "v1.2.3", "linux_amd64", "darwin_arm64", "windows_amd64")
	out, err := exec.Command(root+"/scripts/krew", directory, "v1.2.3").Output()
	must.Succeed(t, err)

	var p plugin
	must.Succeed(t, yaml.UnmarshalStrict(out, &p))
	if p.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || p.Kind != "Plugin" ||
		p.Metadata.Name != "xpu" || p.Spec.Version != "v1.2.3" {
		t.Errorf("is %s %s %s in version %s", p.APIVersion, p.Kind, p.Metadata.Name, p.Spec.Version)
	}

	// krew-index accepts at most 50 characters, and no full stop.
	if s := p.Spec.ShortDescription; s == "" || len(s) > 50 || strings.HasSuffix(s, ".") {
		t.Errorf("shortDescription %q: must have 1 to 50 characters, without full stop", s)
	}

	if len(p.Spec.Platforms) != 3 {
		t.Fatalf("has %d platforms, want 3", len(p.Spec.Platforms))
	}
	for _, got := range p.Spec.Platforms {
		checkPlatform(t, directory, got)
	}
}

func checkPlatform(t *testing.T, directory string, got platform) {
	t.Helper()
	labels := got.Selector.MatchLabels
	name := "xpuctl_v1.2.3_" + labels["os"] + "_" + labels["arch"] + ".tar.gz"
	content, err := os.ReadFile(filepath.Join(directory, name))
	must.Succeed(t, err)

	digest := sha256.Sum256(content)
	if got.SHA256 != hex.EncodeToString(digest[:]) {
		t.Errorf("%s: sha256 %s: is not the archive's", name, got.SHA256)
	}
	if want := "https://github.com/opiproject/xpu-device-plugin/releases/download/v1.2.3/" +
		name; got.URI != want {
		t.Errorf("uri %s, want %s", got.URI, want)
	}
	if isWindows := labels["os"] == "windows"; isWindows != strings.HasSuffix(got.Bin, ".exe") {
		t.Errorf("%s: bin: is %s", name, got.Bin)
	}
}

// TestKrewWithoutArchives: a manifest without platforms would install nothing.
func TestKrewWithoutArchives(t *testing.T) {
	command := exec.Command(root+"/scripts/krew", archives(t, "v1.2.3", "linux_amd64"), "v1.2.4")
	out, err := command.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "run make binaries") {
		t.Errorf("err = %v, output %q", err, out)
	}
}

// TestReleaseHasBinaries: the archives of xpuctl and the manifest are built in the job test, are in
// the sums, and reach the release's page. So is what the manifest says of their digests true.
func TestReleaseHasBinaries(t *testing.T) {
	var w workflow
	must.Succeed(t, yaml.Unmarshal([]byte(all(t)["release.yaml"]), &w))

	text := func(id string) string {
		var all strings.Builder
		for _, step := range w.Jobs[id].Steps {
			path, _ := step.With["path"].(string)
			all.WriteString(step.Run + "\n" + path + "\n")
		}
		return all.String()
	}

	for id, patterns := range map[string][]string{
		"test": {`(?m)^make binaries$`, `sha256sum .*bin/release/\*`, `(?m)^bin/release/\*$`},
		"page": {`gh release create .*bin/release/\*`},
	} {
		for _, pattern := range patterns {
			if !regexp.MustCompile(pattern).MatchString(text(id)) {
				t.Errorf("job %s has nothing like %s", id, pattern)
			}
		}
	}
}
