// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/pkg/schedule/report"
	"github.com/opiproject/xpu-device-plugin/test/scripted"
)

// TestScenarios runs the command in the header of each file in test/scenarios. Its output must
// equal the last document of the file, which go test -update writes.
func TestScenarios(t *testing.T) {
	t.Chdir("../..")
	files, err := filepath.Glob("test/scenarios/*.yaml")
	if err != nil || len(files) < 41 {
		t.Fatalf("%d scenarios, want at least 41: %v", len(files), err)
	}

	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}

			got := pipe(t, commandLine(t, content))
			objects, want, _ := strings.Cut(string(content), "\n---\napiVersion: "+
				report.GroupVersionKind().GroupVersion().String()+"\n")
			if scripted.Updating() {
				if err := os.WriteFile(file, []byte(strings.TrimRight(objects, "\n")+"\n---\n"+got),
					0o644); err != nil {
					t.Fatal(err)
				}
				return
			}

			if diff := cmp.Diff(scheduleOf(t,
				"apiVersion: "+report.GroupVersionKind().GroupVersion().String()+"\n"+want),
				scheduleOf(t, got)); diff != "" {
				t.Errorf("%s says (-want +got):\n%s", file, diff)
			}
		})
	}
}

// commandLine returns the command of the header: "# Run: xpuctl ...".
func commandLine(t *testing.T, content []byte) string {
	t.Helper()
	for line := range strings.Lines(string(content)) {
		if command, is := strings.CutPrefix(line, "# Run: "); is {
			return strings.TrimSpace(command)
		}
	}
	t.Fatal("the header has no line # Run: xpuctl schedule")
	return ""
}

// pipe runs commands of xpuctl, each with the previous one's output as input. The last one prints
// YAML.
func pipe(t *testing.T, line string) string {
	t.Helper()
	var out string
	for command := range strings.SplitSeq(line+" -o yaml", "|") {
		args := strings.Fields(command)
		if args[0] != "xpuctl" {
			t.Fatalf("%s: is no command of xpuctl", command)
		}

		stdout, stderr, err := run(out, args[1:]...)
		if err != nil && !errors.Is(err, errNo) || stderr != "" {
			t.Fatalf("%s: %v\n%s", command, err, stderr)
		}
		out = stdout
	}

	return out
}

func scheduleOf(t *testing.T, text string) (parsed report.Schedule) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(text), &parsed); err != nil {
		t.Fatalf("%v in:\n%s", err, text)
	}
	return parsed
}
