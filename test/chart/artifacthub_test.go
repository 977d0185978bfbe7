// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// annotations are those of Chart.yaml that Artifact Hub reads. Artifact Hub shows nothing of a value
// that it does not understand.
func annotations(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(chartDir, "Chart.yaml"))
	must.Succeed(t, err)

	var chart struct {
		Annotations map[string]string `json:"annotations"`
	}
	must.Succeed(t, yaml.Unmarshal(text, &chart))
	return chart.Annotations
}

// TestArtifactHubImages: Artifact Hub scans the images that the annotation names, so it names those
// that the chart can run, in the version of the file VERSION.
func TestArtifactHubImages(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "VERSION"))
	must.Succeed(t, err)
	version := strings.TrimSpace(string(text))

	var images []struct {
		Name  string `json:"name"`
		Image string `json:"image"`
	}
	must.Succeed(t, yaml.UnmarshalStrict([]byte(annotations(t)["artifacthub.io/images"]), &images))

	got := map[string]string{}
	for _, image := range images {
		got[image.Name] = image.Image
	}
	want := map[string]string{}
	for _, name := range []string{"xpu-agent", "xpu-controller", "opi-bridge", "xpuctl"} {
		want[name] = "ghcr.io/opiproject/" + name + ":" + version
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("artifacthub.io/images (-want +got); make generate sets the version:\n%s", diff)
	}

	prerelease := strconv.FormatBool(strings.Contains(version, "-"))
	if got := annotations(t)["artifacthub.io/prerelease"]; got != prerelease {
		t.Errorf("artifacthub.io/prerelease: is %s, must be %s for version %s", got, prerelease, version)
	}
}

// TestArtifactHubCRDs: the annotation lists the CRDs of deploy/crds, with their served version.
func TestArtifactHubCRDs(t *testing.T) {
	type crd struct {
		Kind        string `json:"kind"`
		Version     string `json:"version"`
		Name        string `json:"name"`
		DisplayName string `json:"displayName"`
		Description string `json:"description"`
	}
	var listed []crd
	must.Succeed(t, yaml.UnmarshalStrict([]byte(annotations(t)["artifacthub.io/crds"]), &listed))

	got := map[string]string{}
	for _, c := range listed {
		got[c.Name] = c.Kind + " " + c.Version
		if c.DisplayName == "" || c.Description == "" {
			t.Errorf("%s: displayName and description must be set", c.Name)
		}
	}

	paths, err := filepath.Glob(filepath.Join(root, "deploy/crds/xpu.opiproject.org_*.yaml"))
	must.Succeed(t, err)
	want := map[string]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		must.Succeed(t, err)
		var d apiextensionsv1.CustomResourceDefinition
		must.Succeed(t, yaml.Unmarshal(text, &d))
		want[d.Name] = d.Spec.Names.Kind + " " + d.Spec.Versions[0].Name
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("artifacthub.io/crds (-want +got):\n%s", diff)
	}
}

func TestArtifactHubLinks(t *testing.T) {
	var links []struct {
		Name string `json:"name"`
		URL  string `json:"url"`
	}
	must.Succeed(t, yaml.UnmarshalStrict([]byte(annotations(t)["artifacthub.io/links"]), &links))

	for _, link := range links {
		path, isFile := strings.CutPrefix(link.URL,
			"https://github.com/opiproject/xpu-device-plugin/blob/main/")
		if _, err := os.Stat(filepath.Join(root, path)); isFile && err != nil {
			t.Errorf("%s: %v", link.Name, err)
		}
	}
}
