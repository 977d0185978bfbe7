// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/matrix/result"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// played is a proxy that resolves some versions and lists others.
func played(lists, resolves string) proxy {
	return proxy{
		list: func(context.Context, string) ([]string, error) {
			return append([]string{kubernetesModule}, strings.Fields(lists)...), nil
		},
		resolves: func(_ context.Context, _, version string) (bool, error) {
			return slices.Contains(strings.Fields(resolves), version), nil
		},
	}
}

// TestReleases: the ends of each minor release count, whether the proxy lists them or not. What is
// not released does not.
func TestReleases(t *testing.T) {
	for name, test := range map[string]struct{ lists, resolves, want string }{
		"listed": {"v1.33.9 v1.34.0 v1.34.5 v1.35.2", "v1.34.0 v1.34.5 v1.35.2",
			"1.34.0 1.34.5 1.35.2"},
		"not listed": {"v1.34.4", "v1.34.4 v1.34.5 v1.34.7 v1.34.12 v1.35.0", "1.34.4 1.34.7 1.35.0"},
		"a next minor release that is not listed": {"v1.34.0", "v1.34.0 v1.35.0 v1.35.1",
			"1.34.0 1.35.0 1.35.1"},
		"pre-releases": {"v1.34.0 v1.35.0-rc.1", "v1.34.0 v1.35.0-rc.1", "1.34.0"},
		"a gap":        {"v1.34.1 v1.36.1", "v1.34.1 v1.36.1", "1.34.1 1.36.1"},
		"none":         {"", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := played(test.lists, test.resolves).releases(t.Context())
			must.Succeed(t, err)
			if diff := cmp.Diff(test.want, strings.Join(got, " ")); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}

	away := proxy{list: func(context.Context, string) ([]string, error) {
		return nil, errors.New("no network")
	}}
	if _, err := away.releases(t.Context()); err == nil {
		t.Error("no error without the proxy")
	}

	broken := played("v1.34.0 v1.35.0", "")
	broken.resolves = func(context.Context, string, string) (bool, error) {
		return false, errors.New("connection refused")
	}
	if got, err := broken.releases(t.Context()); err == nil {
		t.Errorf("releases %q, although the proxy does not say which there are", got)
	}
}

// TestSaysThereIsNone: only what the proxy says of the version is an answer.
func TestSaysThereIsNone(t *testing.T) {
	const read = "go: k8s.io/kubernetes@v1.34.99: reading https://proxy.example/k8s.io/kubernetes/@v/v1.34.99.info"
	for stderr, want := range map[string]bool{
		read + ": 404 Not Found\n\tserver response: not found: unknown revision v1.34.99": true,
		read + ": 410 Gone": true,
		read + ": 403 Forbidden\n\tserver response: This module version is not available.": true,
		"go: k8s.io/kubernetes@v1.34.99: invalid version: unknown revision v1.34.99":       true,
		read + ": 403 Forbidden":   false,
		read + ": 502 Bad Gateway": false,
		`Get "https://proxy.example": dial tcp 192.0.2.1:443: connect: connection refused`: false,
		`exec: "git": executable file not found in $PATH`:                                  false,
		"no space left on device": false,
	} {
		if got := saysThereIsNone(stderr); got != want {
			t.Errorf("%t for %q, want %t", got, stderr, want)
		}
	}
}

func TestCombinations(t *testing.T) {
	all, err := combinations(t.Context(), played("v1.34.0", "v1.34.0 v1.34.1"), nil)
	must.Succeed(t, err)
	want := "[1.34.0/default/default 1.34.1/default/default default/default/default " +
		"default/containerd-2/default default/cri-o/default default/default/4.2 " +
		"default/default/4.1 default/default/4.0]"
	if got := fmt.Sprint(all); got != want {
		t.Errorf("got %s, want %s", got, want)
	}

	all, err = combinations(t.Context(), proxy{}, []string{"1.35", "default/cri-o", "1.36/default/4.0"})
	must.Succeed(t, err)
	if got := fmt.Sprint(all); got != "[1.35/default/default default/cri-o/default 1.36/default/4.0]" {
		t.Errorf("got %s", got)
	}
	if got := strings.Join(all[1].flags(), " "); got != "--kubernetes= --runtime=cri-o --multus-version=" {
		t.Errorf("flags %s", got)
	}
	for _, wrong := range []string{"1.35//4.2", "1/2/3/4", ""} {
		if _, err := combinations(t.Context(), proxy{}, []string{wrong}); err == nil {
			t.Errorf("%q is taken", wrong)
		}
	}
}

// TestVersions: a combination that cannot be built is noted with the versions that it would have.
func TestVersions(t *testing.T) {
	t.Chdir("../..")
	for flag, prefix := range map[string]string{project: "1.", "1.35": "1.35.", "1.36.1": "1.36.1"} {
		got := versionIn(kubernetes, flag, "go", "kubernetes")
		if !strings.HasPrefix(got, prefix) || strings.Count(got, ".") != 2 {
			t.Errorf("%s is Kubernetes %s", flag, got)
		}
	}
	for flag, prefix := range map[string]string{project: "4.", "4.1": "4.1."} {
		if got := versionIn(multus, flag, "plugins", "multus"); !strings.HasPrefix(got, prefix) {
			t.Errorf("%s is Multus %s", flag, got)
		}
	}
	for flag, prefix := range map[string]string{"containerd-2": "containerd 2.", "cri-o": "CRI-O 1."} {
		if got := moduleOf(flag); !strings.HasPrefix(got, prefix) {
			t.Errorf("%s is %s", flag, got)
		}
	}
}

// TestLog: versions and feature gates are those that the log names.
func TestLog(t *testing.T) {
	const log = `
  Kubernetes v1.34.5, cri-o 1.34.0
  DevicePool early: needs feature gate DRADeviceTaints, and feature gate DRAConsumableCapacity
  feature gate DRADeviceTaints is off
`
	on, runtime := ranOn([]byte(log))
	gates := strings.Join(gatesOff([]byte(log)), " ")
	if on != "1.34.5" || runtime != "CRI-O 1.34.0" ||
		gates != "DRAConsumableCapacity DRADeviceTaints" {
		t.Errorf("%q, %q, %q", on, runtime, gates)
	}
	if on, _ := ranOn([]byte("no cluster")); on != "" {
		t.Errorf("version %q of nothing", on)
	}
	for log, want := range map[string]string{
		"Kubernetes v1.37.1, containerd 1.7.24~ds1":                               "containerd 1.7.24", // Debian's
		"Kubernetes v1.37.1, containerd v2.2.0":                                   "containerd 2.2.0",
		"Kubernetes v1.37.1, containerd 1.7.24\nKubernetes v1.37.1, cri-o 1.34.0": "CRI-O 1.34.0",
	} {
		if _, runtime := ranOn([]byte(log)); runtime != want {
			t.Errorf("%q: runtime %q, want %q", log, runtime, want)
		}
	}
}

// programs puts programs into bin of a new working directory, as scripts for a shell.
func programs(t *testing.T, devcluster, demo string) {
	t.Helper()
	t.Chdir(t.TempDir())
	must.Succeed(t, os.Mkdir("bin", 0o755))
	for name, script := range map[string]string{"devcluster": devcluster, "demo": demo} {
		must.Succeed(t, os.WriteFile("bin/"+name, []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
}

// TestTell: every result has the runtime's version, so that it replaces the one before, and there is
// no result where nothing was found out about the versions.
func TestTell(t *testing.T) {
	const built = `echo "Kubernetes v1.37.1, containerd 1.7.24~ds1"`
	const buildsOnly137 = `case "$*" in *--kubernetes=\ *) ` + built + `; exit;; esac; `
	for name, test := range map[string]struct {
		devcluster, demo string
		want             string // of the story, or what the error says
	}{
		"holds":                        {built, "true", result.Holds},
		"the cluster does not come up": {built, "false", result.Fails},
		"does not compile": {
			buildsOnly137 + `echo "pkg/a.go:7:2: undefined: b"; exit 1`, "true", result.Unbuilt,
		},
		"no such version": {
			buildsOnly137 + `echo "invalid version: unknown revision v1.34.0"; exit 1`, "true",
			result.Unbuilt,
		},
		"disk full": {
			buildsOnly137 + `echo "a.go:7:2: write: no space left on device"; exit 1`, "true",
			"does not say that the versions are why",
		},
		"no network": {
			buildsOnly137 + `echo "dial tcp: lookup proxy.example: no such host"; exit 1`, "true",
			"does not say that the versions are why",
		},
		"not even the project's versions": {"exit 1", "true", "version of runtime default"},
	} {
		t.Run(name, func(t *testing.T) {
			programs(t, test.devcluster, test.demo)
			r, err := combination{"1.34.0", project, project}.tell(t.Context())
			if err != nil {
				if !strings.Contains(err.Error(), test.want) {
					t.Errorf("error %v, want %q", err, test.want)
				}
				return
			}
			if r.Story != test.want || r.Runtime != "containerd 1.7.24" {
				t.Errorf("%+v, want that it %s with containerd 1.7.24", r, test.want)
			}
		})
	}
}
