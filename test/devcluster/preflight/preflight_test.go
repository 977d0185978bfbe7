// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestEnabled(t *testing.T) {
	table := "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t4\t5\t1\nmemory\t0\t1\t0\npids 1 2 1\n"
	got, err := enabled(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"cpuset", "pids"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestGroups(t *testing.T) {
	all := "cpu 1 1 1\ncpuset 1 1 1\nmemory 1 1 1\npids 1 1 1\n"
	for _, test := range []struct {
		name    string
		unified string   // content of cgroup.controllers
		mounted []string // hierarchies of version 1
		table   string
		want    string // part of the error
	}{
		{name: "version 2", unified: "cpuset cpu io memory pids\n"},
		{name: "version 2 without memory", unified: "cpuset cpu io pids\n", want: "memory"},
		{name: "version 1", mounted: []string{"cpu", "cpuset", "memory", "pids"}, table: all},
		{name: "version 1 without a mount", mounted: []string{"cpu", "memory", "pids"}, table: all,
			want: "cpuset"},
		{name: "version 1 with a controller off",
			mounted: []string{"cpu", "cpuset", "memory", "pids"},
			table:   strings.Replace(all, "pids 1 1 1", "pids 1 1 0", 1), want: "pids"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root := t.TempDir()
			if test.unified != "" {
				write(t, filepath.Join(root, "cgroup.controllers"), test.unified)
			}

			for _, m := range test.mounted {
				if err := os.Mkdir(filepath.Join(root, m), 0o755); err != nil {
					t.Fatal(err)
				}
			}

			check(t, groups(root, write(t, filepath.Join(t.TempDir(), "cgroups"), test.table)),
				test.want)
		})
	}
}

func TestOverlay(t *testing.T) {
	dir := t.TempDir()
	check(t, overlay(write(t, filepath.Join(dir, "a"), "nodev\tproc\nnodev\toverlay\n")), "")
	check(t, overlay(write(t, filepath.Join(dir, "b"), "nodev\toverlayish\n\text4\n")),
		"modprobe overlay")
}

func TestSpace(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "not", "there", "yet")
	check(t, space(missing, 1), "")
	check(t, space(missing, math.MaxUint64), "disk space")
}

func TestRoot(t *testing.T) {
	check(t, root(0), "")
	check(t, root(1000), "1000")
}

func TestCommand(t *testing.T) {
	check(t, command("sh", "install it"), "")
	check(t, command("no-such-command", "install it"), "install it")
}

// check wants an error of one line that contains the text, or no error for "".
func check(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("got %v, want no error", err)
	case want != "" &&
		(err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n")):
		t.Errorf("got %v, want one line with %q", err, want)
	}
}
