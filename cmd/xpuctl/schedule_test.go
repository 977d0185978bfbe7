// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const capacity = "../../test/scenarios/capacity/"

func TestScheduleText(t *testing.T) {
	const want = `POD             NODE        CLAIM       REQUEST   DEVICE                              TAKES
default/gpu-0   node-00     gpu-0-gpu   gpu       foozer.example.com/node-00/dev-00   the device
default/gpu-1   node-00     gpu-1-gpu   gpu       foozer.example.com/node-00/dev-01   the device
default/gpu-2   <pending>   -           -         -                                   -
default/gpu-3   <pending>   -           -         -                                   -
default/gpu-4   <pending>   -           -         -                                   -

default/gpu-2 is pending: none of 2 nodes can take it.
  node-00:
    claim gpu-2-gpu, request gpu: needs 1 of DeviceClass foozer.example.com, and can have 0 of the node's 2 devices
      2 are in use by ResourceClaims default/gpu-0-gpu, default/gpu-1-gpu
  node-01:
    the node has the taint gone:NoSchedule, which the pod does not tolerate
`

	stdout, stderr, err := run("", "schedule", "-f", capacity+"classes.yaml", "-f",
		capacity+"two-simple-gpus.yaml",
		"--add", "../../test/scenarios/pools-two-nodes-two-simple-gpus.yaml", "--taint",
		"node=node-01:gone:NoSchedule")
	if !errors.Is(err, errNo) || stderr != "" {
		t.Errorf("%v, %q", err, stderr)
	}

	got, _, _ := strings.Cut(stdout, "\ndefault/gpu-3 is pending")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	stdout, _, err = run("", "schedule", "-f", capacity+"classes.yaml",
		"-f", capacity+"two-simple-gpus.yaml",
		"-f", "../../test/scenarios/pod-one-container-one-gpu.yaml", "--taint",
		"node=node-01:gone:NoSchedule", "--all")

	if err != nil ||
		!strings.Contains(stdout, "\ndefault/foozer is on node-00: 1 of 2 nodes can take it.\n  "+
			"node-01:\n    the node has the taint") {
		t.Errorf("--all: %v, %s", err, stdout)
	}
}

func TestScheduleErrors(t *testing.T) {
	bad := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(bad, []byte("clusters: 1"), 0o600); err != nil {
		t.Fatal(err)
	}

	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"no file": {[]string{"-f", "/does/not/exist"}, "/does/not/exist"},
		"output": {
			[]string{"-f", "-", "-o", "wide"}, `--output "wide": must be text, yaml or json`,
		},
		"version": {[]string{"-f", "-", "--kubernetes", "1.20"}, "the oldest is 1.34"},
		"gate": {
			[]string{"-f", "-", "--feature-gates", "X=true"}, "unrecognized feature gate: X",
		},
		"remove": {
			[]string{"-f", "-", "--remove", "node/x"}, "remove node/x: there is none of that name",
		},
		"add":            {[]string{"-f", "-", "--add", "/does/not/exist"}, "/does/not/exist"},
		"taint":          {[]string{"-f", "-", "--taint", "x"}, "taint x: must be PLACE:KEY"},
		"argument":       {[]string{"pod.yaml"}, `unknown command "pod.yaml"`},
		"bad kubeconfig": {[]string{"--kubeconfig", bad}, "kubeconfig"},
	} {
		stdout, stderr, err := run("", append([]string{"schedule"}, tt.args...)...)
		if err == nil || errors.Is(err, errNo) || !strings.Contains(err.Error(), tt.want) ||
			stdout != "" || !strings.Contains(stderr, "Error: ") {
			t.Errorf("%s: %v, want %q; standard output %q, standard error %q", name, err, tt.want,
				stdout, stderr)
		}
	}
}

func TestScheduleNotes(t *testing.T) {
	_, stderr, err := run("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n",
		"schedule", "-f", "-")
	if err != nil || !strings.HasPrefix(stderr, "note: left out, ") ||
		!strings.HasSuffix(stderr, ": 1 Deployment\n") {
		t.Errorf("%v, %q", err, stderr)
	}
}

func TestGenerate(t *testing.T) {
	stdout, stderr, err := run("", "generate", "foozer-1000-tiny", "--nodes", "3", "--stats")
	if err != nil || stderr != "" || !strings.Contains(stdout, " 3 Nodes\n") ||
		!strings.Contains(stdout, " 6 devices\n") {
		t.Errorf("%v, %s%s", err, stdout, stderr)
	}

	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"no shape":      {nil, "accepts 1 arg"},
		"unknown shape": {[]string{"x"}, `there is no shape "x"`},
		"share": {
			[]string{"sriov", "--allocated", "half"}, `--allocated "half": must be a percentage`,
		},
		"too much": {[]string{"sriov", "--allocated", "101%"}, "must be 0% to 100%"},
		"output":   {[]string{"sriov", "-o", "text"}, `--output "text": must be yaml or json`},
	} {
		if stdout, _, err := run("", append([]string{"generate"}, tt.args...)...); err == nil ||
			!strings.Contains(err.Error(), tt.want) || stdout != "" {
			t.Errorf("%s: %v, want %q; printed %q", name, err, tt.want, stdout)
		}
	}
}

func TestServeErrors(t *testing.T) {
	if _, _, err := run("", "serve", "--assets", t.TempDir()); err == nil ||
		!strings.Contains(err.Error(), "lacks etcd, kube-apiserver, kube-scheduler, "+
			"kube-controller-manager: name a directory with --assets") {
		t.Error(err)
	}
}
