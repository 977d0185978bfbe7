// SPDX-License-Identifier: Apache-2.0

package image

import (
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// TestPush checks that scripts/push pushes every image, with both platforms, and the chart to a
// registry, and prints their digests.
func TestPush(t *testing.T) {
	const root = "../../.."
	if testing.Short() {
		t.Skip("needs images and chart")
	}
	if _, err := os.Stat(filepath.Join(root, "bin", "chart.tgz")); err != nil {
		t.Skipf("there is nothing to push: make images chart makes it: %v", err)
	}

	server := httptest.NewServer(registry.New())
	defer server.Close()

	address := strings.TrimPrefix(server.URL, "http://") + "/xpu"
	push := exec.Command(filepath.Join(root, "scripts", "push"), address, "--insecure")
	out, err := push.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}

	bills, err := filepath.Glob(filepath.Join(root, "bin", "images", "*.cdx.json"))
	if err != nil || len(bills) == 0 {
		t.Fatalf("bills of materials %q, %v, want some", bills, err)
	}

	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != len(bills)+1 {
		t.Fatalf("printed %q, want a line for each image of %q and one for the chart", lines, bills)
	}

	for i, line := range lines {
		words := strings.Fields(line)
		reference, err := name.NewDigest(words[0])
		if err != nil {
			t.Errorf("%q does not begin with a name with its digest: %v", line, err)
			continue
		}

		if i == len(bills) {
			if _, err := remote.Get(reference); err != nil ||
				!strings.Contains(words[0], "/charts/xpu-device-plugin@") {
				t.Errorf("chart %s: %v", words[0], err)
			}
			continue
		}

		if _, err := os.Stat(filepath.Join(root, words[1])); err != nil {
			t.Errorf("bill of materials: %v", err)
		}

		index, err := remote.Index(reference)
		if err != nil {
			t.Errorf("%s: %v", words[0], err)
			continue
		}

		manifest, err := index.IndexManifest()
		if err != nil || len(manifest.Manifests) != 2 {
			t.Errorf("%s: %+v, %v, want both platforms", words[0], manifest, err)
		}
	}
}
