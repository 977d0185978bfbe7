// SPDX-License-Identifier: Apache-2.0

// Package workflows tests the workflows of .github: what they run is pinned, and no job may write
// what it does not need to.
package workflows

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

const root = "../.."

// workflow is what matters here of the syntax of GitHub's workflows.
type workflow struct {
	Permissions any            `json:"permissions"`
	Jobs        map[string]job `json:"jobs"`
}

type job struct {
	Permissions any    `json:"permissions"`
	Needs       any    `json:"needs"`
	Container   any    `json:"container"`
	Steps       []step `json:"steps"`
}

type step struct {
	Uses string         `json:"uses"`
	Run  string         `json:"run"`
	With map[string]any `json:"with"`
}

// writes are the permissions to write that jobs need, as "file job".
func writes() map[string][]string {
	return map[string][]string{
		"release.yaml push":      {"attestations", "id-token", "packages"},
		"release.yaml page":      {"contents"},
		"scorecard.yaml analyse": {"id-token", "security-events"},
	}
}

var (
	pinnedAction = regexp.MustCompile(
		`^\s*(- )?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`,
	)
	anyAction = regexp.MustCompile(`^\s*(- )?uses:`)
)

func all(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(root + "/.github/workflows/*.y*ml")
	must.Succeed(t, err)
	if len(paths) == 0 {
		t.Fatal("there are no workflows")
	}

	texts := map[string]string{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		must.Succeed(t, err)
		texts[filepath.Base(path)] = string(text)
	}

	return texts
}

// TestActionsArePinned: a tag can be moved by whoever takes over an action's repository.
func TestActionsArePinned(t *testing.T) {
	for name, text := range all(t) {
		number := 0
		for line := range strings.Lines(text) {
			number++
			line = strings.TrimRight(line, "\n")
			if anyAction.MatchString(line) && !pinnedAction.MatchString(line) {
				t.Errorf("%s:%d: %s: name the action by its 40 hex digits, and the version in a "+
					"comment", name, number, strings.TrimSpace(line))
			}
		}
	}
}

// TestPermissions: a workflow may read the repository, and a job writes what [writes] says.
func TestPermissions(t *testing.T) {
	for name, text := range all(t) {
		var w workflow
		must.Succeed(t, yaml.UnmarshalStrict([]byte(text), &map[string]any{}))
		must.Succeed(t, yaml.Unmarshal([]byte(text), &w))
		if top, isMap := w.Permissions.(map[string]any); !isMap || len(top) != 1 ||
			top["contents"] != "read" {
			t.Errorf("%s: permissions: are %v, must be {contents: read}", name, w.Permissions)
		}

		for id, job := range w.Jobs {
			permissions, isMap := job.Permissions.(map[string]any)
			if job.Permissions != nil && !isMap {
				t.Errorf("%s: job %s: permissions: %v gives all; name each", name,
					id, job.Permissions)
			}

			var writable []string
			for _, scope := range slices.Sorted(maps.Keys(permissions)) {
				if permissions[scope] == "write" {
					writable = append(writable, scope)
				}
			}

			if want := writes()[name+" "+id]; !slices.Equal(writable, want) {
				t.Errorf("%s: job %s may write %v, and needs %v", name, id, writable, want)
			}
		}
	}
}

// TestCredentialsDoNotPersist: a checkout leaves no token in .git for what a job runs after it.
func TestCredentialsDoNotPersist(t *testing.T) {
	for name, text := range all(t) {
		var w workflow
		must.Succeed(t, yaml.Unmarshal([]byte(text), &w))

		for id, job := range w.Jobs {
			for _, step := range job.Steps {
				if strings.HasPrefix(step.Uses, "actions/checkout@") &&
					step.With["persist-credentials"] != false {
					t.Errorf("%s: job %s: checkout: with.persist-credentials must be false",
						name, id)
				}
			}
		}
	}
}

// TestPublishesWhatWasTested: jobs that may write make nothing, they take what the job test built.
func TestPublishesWhatWasTested(t *testing.T) {
	var w workflow
	must.Succeed(t, yaml.Unmarshal([]byte(all(t)["release.yaml"]), &w))
	uploads := slices.ContainsFunc(w.Jobs["test"].Steps, func(s step) bool {
		return strings.HasPrefix(s.Uses, "actions/upload-artifact@")
	})
	if !uploads {
		t.Error("job test uploads nothing")
	}

	for _, id := range []string{"push", "page"} {
		downloads, compares := false, false
		for _, step := range w.Jobs[id].Steps {
			downloads = downloads || strings.HasPrefix(step.Uses, "actions/download-artifact@")
			compares = compares || strings.Contains(step.Run, "sha256sum --check --strict")

			for _, builds := range []string{
				"make images", "make chart", "make build", "make binaries", "go build", ".ci/run",
			} {
				if strings.Contains(step.Run, builds) {
					t.Errorf("job %s builds anew: %s", id, step.Run)
				}
			}
		}

		if !downloads || !compares {
			t.Errorf("job %s downloads: %v, and compares digests: %v", id, downloads, compares)
		}
	}
}
