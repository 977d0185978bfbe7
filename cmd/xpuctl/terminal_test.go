// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/pkg/terminal"
)

// hostile is in names of objects and in what others say: each line of it that stands alone is
// forged.
const hostile = "\x1b[2J\r\nFORGED\t\u202e\u009b31m"

const hostileShown = `\x1b[2J\r\nFORGED\t\u202e\u009b31m`

// hostileObjects are objects of files, whose names no API server has looked at.
const hostileObjects = `apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata: {name: "node1\e[2J\r\nFORGED\t\u202E\u009B31m"}
  spec: {taints: [{key: "gone\e[2J\nFORGED", effect: NoSchedule}]}
- {apiVersion: v1, kind: Node, metadata: {name: node2}}
- {apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: nic}}
- apiVersion: resource.k8s.io/v1
  kind: ResourceSlice
  metadata: {name: node2}
  spec:
    driver: x.example.com
    nodeName: node2
    pool: {name: node2, resourceSliceCount: 1}
    devices: [{name: d0}]
- apiVersion: resource.k8s.io/v1
  kind: ResourceClaim
  metadata: {name: one}
  spec:
    devices:
      requests:
      - {name: nic, exactly: {deviceClassName: nic, selectors: [{cel: {expression: %q}}]}}
- apiVersion: v1
  kind: Pod
  metadata: {name: "web\e[2J\r\nFORGED\t\u202E\u009B31m"}
  spec: {resourceClaims: [{name: nic, resourceClaimName: one}], containers: [{name: c, image: i}]}
`

// TestScheduleHostile: names and selectors neither reach the terminal as they are nor forge a line.
func TestScheduleHostile(t *testing.T) {
	for name, tt := range map[string]struct{ selector, shown string }{
		"no CEL": {
			"device.driver == '\x1b[2J\r\u202e'\nFORGED",
			`token recognition error at: ''\x1b[2J\r'` + "\n    |  | ",
		},
		"fits no device": {
			"device.driver == '\x1b[2J\u202e\u009b31m'\n|| false",
			"selector device.driver == '" + `\x1b[2J\u202e\u009b31m` + "'\n        | || false\n",
		},
	} {
		objects := fmt.Sprintf(hostileObjects, tt.selector)
		stdout, stderr, err := run(objects, "schedule", "-f", "-")
		if !errors.Is(err, errNo) {
			t.Errorf("%s: %v", name, err)
		}

		harmless(t, stdout+stderr)
		pod := "default/web" + hostileShown
		for _, want := range []string{pod + "   <pending>", pod + " is pending", tt.shown} {
			if !strings.Contains(stdout, want) {
				t.Errorf("%s: the text lacks %q:\n%s", name, want, stdout)
			}
		}

		stdout, _, _ = run(objects, "schedule", "-f", "-", "-o", "json")
		if want := `web\u001b[2J\r\nFORGED\t` + "\u202e\u009b31m"; !strings.Contains(stdout, want) {
			t.Errorf("%s: JSON lacks %q:\n%s", name, want, stdout)
		}
	}
}

// TestDiscoverHostile: what an agent and the kernel say neither reaches the terminal as it is nor
// forges a line.
func TestDiscoverHostile(t *testing.T) {
	state := &nodestate.State{Node: "node1" + hostile, Agent: "v1" + hostile}
	state.Functions = []nodestate.Function{{
		Kind: "VF", Pool: "fast" + hostile, Driver: "mlx5_core" + hostile, Netdev: "eth0" + hostile,
		Problems: []nodestate.Problem{{Message: "broken" + hostile}},
	}}

	var out bytes.Buffer
	if err := printState(terminal.NewWriter(&out), "wide", state); err != nil {
		t.Fatal(err)
	}

	harmless(t, out.String())
	for _, want := range []string{"node1", "v1", "pool fast", "mlx5_core", "eth0", "broken"} {
		if want += hostileShown; !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &out)
		}
	}
}

// TestErrorsHostile: errors may quote what others wrote.
func TestErrorsHostile(t *testing.T) {
	_, stderr, err := run("", "generate", "sriov\x1b[2J\u202e", "--nodes=1")
	if err == nil || !strings.HasPrefix(stderr, "Error: ") {
		t.Errorf("%v, %q", err, stderr)
	}

	harmless(t, stderr)

	_, stderr, _ = run("", "--flag\x1b[2J")
	if want := `Error: unknown flag: --flag\x1b[2J`; !strings.HasPrefix(stderr, want) {
		t.Errorf("%q, want %q", stderr, want)
	}
}

// harmless fails for a text that could control a terminal, or in which a value forged a line.
func harmless(t *testing.T, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		for _, r := range line {
			if !strconv.IsPrint(r) {
				t.Errorf("line %q has %q", line, r)
			}
		}

		if strings.HasPrefix(strings.TrimSpace(line), "FORGED") {
			t.Errorf("line %q is forged", line)
		}
	}
}
