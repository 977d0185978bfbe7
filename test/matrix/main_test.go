// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// played is a proxy that resolves some versions and lists others.
func played(lists, resolves string) proxy {
	return proxy{
		list: func(context.Context, string) ([]string, error) {
			return append([]string{kubernetesModule}, strings.Fields(lists)...), nil
		},
		resolves: func(_ context.Context, _, version string) bool {
			return slices.Contains(strings.Fields(resolves), version)
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
}
