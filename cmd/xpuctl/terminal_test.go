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

// hostile is put into names of objects and texts of others. A line that begins with FORGED is
// forged.
const hostile = "\x1b[2J\r\nFORGED\t\u202e\u009b31m"

const hostileShown = `\x1b[2J\r\nFORGED\t\u202e\u009b31m`

// hostileObjects are objects in files, whose names no API server has validated.
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

// TestScheduleHostile checks that names and selectors are escaped and forge no line.
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

		checkHarmless(t, stdout+stderr)
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

// TestDiscoverHostile checks that texts of an agent and of the kernel are escaped and forge no
// line.
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

	checkHarmless(t, out.String())
	for _, want := range []string{"node1", "v1", "pool fast", "mlx5_core", "eth0", "broken"} {
		if want += hostileShown; !strings.Contains(out.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, &out)
		}
	}
}

// TestErrorsHostile checks that foreign texts in errors are escaped.
func TestErrorsHostile(t *testing.T) {
	_, stderr, err := run("", "generate", "sriov\x1b[2J\u202e", "--nodes=1")
	if err == nil || !strings.HasPrefix(stderr, "Error: ") {
		t.Errorf("%v, %q", err, stderr)
	}

	checkHarmless(t, stderr)

	_, stderr, _ = run("", "--flag\x1b[2J")
	if want := `Error: unknown flag: --flag\x1b[2J`; !strings.HasPrefix(stderr, want) {
		t.Errorf("%q, want %q", stderr, want)
	}
}

// checkHarmless fails the test if a text could control a terminal, or a value forged a line.
func checkHarmless(t *testing.T, text string) {
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
