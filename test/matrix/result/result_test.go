// SPDX-License-Identifier: Apache-2.0

package result

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAdd: the file has one entry for each combination of versions, sorted, and the newest counts.
func TestAdd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "versions.yaml")
	of := func(kubernetes, multus, story string) Result {
		return Result{Kubernetes: kubernetes, Runtime: "containerd 1.7.24", Multus: multus, Story: story}
	}
	for _, r := range []Result{
		of("1.37.1", "4.2.4", Holds), of("1.37.1", "4.3.0", Fails), of("1.34.12", "4.3.0", Unbuilt),
		of("1.34.5", "4.3.0", Holds), of("1.37.1", "4.3.0", Holds),
	} {
		must.Succeed(t, Add(path, r))
	}

	all, err := Read(path)
	must.Succeed(t, err)
	want := []Result{
		of("1.34.5", "4.3.0", Holds), of("1.34.12", "4.3.0", Unbuilt), of("1.37.1", "4.3.0", Holds),
		of("1.37.1", "4.2.4", Holds),
	}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	for text, want := range map[string]string{
		"- {kubernetes: 1.37.1, story: fine}":                "story: is",
		"- {kubernetes: '1.37', story: holds}":               "kubernetes:",
		"- {kubernetes: 1.37.1, story: holds, passed: true}": "unknown field",
	} {
		must.Succeed(t, os.WriteFile(path, []byte(text), 0o600))
		if _, err := Read(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

// TestTable: what is not known of a run is not said.
func TestTable(t *testing.T) {
	got := Table([]Result{
		{Kubernetes: "1.34.5", Runtime: "r", Multus: "m", Story: Holds, GatesOff: []string{"A", "B"}},
		{Kubernetes: "1.35.4", Runtime: "r", Multus: "m", Story: Fails, GatesOff: []string{"A", "B"},
			Commit: "0123abc", Date: "2026-11-27"},
		{Kubernetes: "1.36.0", Runtime: "r", Multus: "m", Story: Unbuilt},
		{Kubernetes: "1.36.1", Runtime: "r", Multus: "m", Story: Fails},
		{Kubernetes: "1.37.0", Runtime: "r", Multus: "m", Story: Holds},
	})
	_, rows, _ := strings.Cut(got, "--- |\n")
	want := "| 1.34.5 | r | m | holds | `A`, `B` | not noted |\n" +
		"| 1.35.4 | r | m | does not hold | the same | 2026-11-27, 0123abc |\n" +
		"| 1.36.0 | r | m | cannot be built | - | not noted |\n" +
		"| 1.36.1 | r | m | does not hold | - | not noted |\n" +
		"| 1.37.0 | r | m | holds | none that matter | not noted |\n"
	if rows != want {
		t.Errorf("got\n%s\nwant\n%s", rows, want)
	}
}
