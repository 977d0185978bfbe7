// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/source"
)

const config = `{"resourceList": [
  {"resourceName": "fast_nics", "selectors": {"pfNames": ["ens3f0#0-3", "ens3f0#7"]}},
  {"resourceName": "all", "selectors": {}}]}`

const devicePools = `apiVersion: xpu.opiproject.org/v1alpha1
kind: DevicePool
metadata:
  name: fast-nics
spec:
  allow:
  - mac
  - addresses
  - driver
  - vf.vlan
  - vf.qos
  - vf.trust
  - vf.spoofCheck
  - vf.minTxRate
  - vf.maxTxRate
  - vf.linkState
  devicePlugin:
    preferredAllocation: Pack
    provisionAt: Add
    resourceName: fast_nics
    resourcePrefix: intel.com
  deviceType: netDevice
  priority: 2
  provision: OnPrepare
  publish: DevicePlugin
  selectors:
  - pfNames:
    - ens3f0#0-3
---
apiVersion: xpu.opiproject.org/v1alpha1
kind: DevicePool
metadata:
  name: all
spec:
  allow:
  - mac
  - addresses
  - driver
  - vf.vlan
  - vf.qos
  - vf.trust
  - vf.spoofCheck
  - vf.minTxRate
  - vf.maxTxRate
  - vf.linkState
  devicePlugin:
    preferredAllocation: Pack
    provisionAt: Add
    resourceName: all
    resourcePrefix: intel.com
  deviceType: netDevice
  priority: 1
  provision: OnPrepare
  publish: DevicePlugin
  selectors:
  - isRdma: false
`

// run runs xpuctl.
func run(stdin string, args ...string) (stdout, stderr string, err error) {
	var out, notes bytes.Buffer
	c := command("xpuctl")
	c.SetArgs(args)
	err = execute(context.Background(), c, strings.NewReader(stdin), &out, &notes)
	return out.String(), notes.String(), err
}

func TestConvert(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}

	indented := strings.ReplaceAll(config, "\n", "\n    ")
	manifest := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: sriovdp-config}\ndata:\n  " +
		"config.json: |\n    " + indented + "\n"
	perNode := manifest + "  node-2: '{}'\n"
	for name, tt := range map[string]struct {
		stdin string
		args  []string
	}{
		"file":           {"", []string{file}},
		"standard input": {config, []string{"-"}},
		"ConfigMap":      {manifest, []string{"-"}},
		"ConfigMap with another key": {
			strings.Replace(manifest, "config.json", "node-1", 1), []string{"-"},
		},
		"ConfigMap with two keys": {perNode, []string{"-"}},
		"ConfigMap with two keys again": {
			strings.Replace(perNode, "config.json", "node-1", 1), []string{"-", "--key", "node-1"},
		},
		"other prefix": {
			config, []string{"-", "--resource-prefix", "example.com"},
		},
	} {
		stdout, stderr, err := run(tt.stdin, append([]string{"convert", "sriovdp"}, tt.args...)...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}

		want := devicePools
		if name == "other prefix" {
			want = strings.ReplaceAll(want, "intel.com", "example.com")
		}
		if diff := cmp.Diff(want, stdout); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if want := "note: resourceList[0].selectors.pfNames[1]: \"ens3f0#7\" matches " +
			"nothing"; !strings.HasPrefix(stderr, want) {
			t.Errorf("%s: standard error is %q, want %q", name, stderr, want)
		}
		if _, _, err := source.Parse([]byte(stdout), ""); err != nil {
			t.Errorf("%s: the agent does not take the result: %v", name, err)
		}
	}
}

func TestConvertErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		stdin string
		args  []string
		want  string
	}{
		"no file": {
			"", []string{"convert", "sriovdp", "/does/not/exist"}, "/does/not/exist",
		},
		"nothing named": {"", []string{"convert", "sriovdp"}, "accepts 1 arg"},
		"bad configuration": {
			`{"resourceList": [{"resourceName": "a"}]}`, []string{"convert", "sriovdp", "-"},
			"-: resourceList[0].selectors: must be",
		},
		"something else": {
			"kind: Pod\n", []string{"convert", "sriovdp", "-"},
			"-: must be JSON with a resourceList, or a ConfigMap",
		},
		"no YAML": {
			"\t:", []string{"convert", "sriovdp", "-"},
			"-: must be JSON with a resourceList, or a ConfigMap",
		},
		"ConfigMap, no key": {
			"kind: ConfigMap\nmetadata: {name: c}\ndata: {a: '', b: ''}\n",
			[]string{"convert", "sriovdp", "-"},
			`-: ConfigMap c: data has no key "config.json": name one with --key`,
		},
		"ConfigMap, bad key": {
			"kind: ConfigMap\nmetadata: {name: c}\ndata: {a: ''}\n", []string{
				"convert", "sriovdp", "-", "--key", "b",
			}, `-: ConfigMap c: data has no key "b"`,
		},
		"key, no ConfigMap": {
			config, []string{"convert", "sriovdp", "-", "--key", "b"}, "-: --key is for ConfigMaps",
		},
		"unknown command": {"", []string{"convert", "cni"}, "unknown command"},
	} {
		stdout, stderr, err := run(tt.stdin, tt.args...)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q in it", name, err, tt.want)
		}
		if stdout != "" || !strings.Contains(stderr, "Error: ") {
			t.Errorf("%s: standard output %q, standard error %q", name, stdout, stderr)
		}
	}
}

func TestKubectlPlugin(t *testing.T) {
	var out bytes.Buffer
	c := command("kubectl-xpu")
	c.SetArgs([]string{"schedule", "--help"})
	c.SetOut(&out)
	if err := c.Execute(); err != nil ||
		!strings.Contains(out.String(), "Usage:\n  kubectl xpu schedule ") {
		t.Errorf("%v, %s", err, out.String())
	}
}

func TestMan(t *testing.T) {
	dir := t.TempDir()
	if _, stderr, err := run("", "man", dir); err != nil {
		t.Fatalf("%v, %s", err, stderr)
	}

	for _, page := range []string{"xpuctl.1", "xpuctl-schedule.1", "xpuctl-convert-sriovdp.1"} {
		content, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil || !strings.Contains(string(content), ".SH SYNOPSIS") {
			t.Errorf("%s: %v, %s", page, err, content)
		}
	}

	if _, _, err := run("", "man", filepath.Join(dir, "none")); err == nil {
		t.Error("a directory that is not there is no error")
	}
}

func TestVersion(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}} {
		stdout, _, err := run("", args...)
		if err != nil || strings.TrimSpace(stdout) == "" {
			t.Errorf("%s: %q, %v", args, stdout, err)
		}
	}
}
