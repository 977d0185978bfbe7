// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/xml"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// TestDiscover shows a simulated host in every format.
func TestDiscover(t *testing.T) {
	root := t.TempDir()
	host, err := simulate.New(t.Context(), simulate.Config{
		Root: root, HostNS: netns.New(t).Path(), XPUNS: netns.New(t).Path(),
		Cards: []simulate.Card{{PFs: 2, VFs: 8, Bus: "3b"}}, Log: logr.Discard(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { host.Close() })

	for form, want := range map[string]string{
		"text": "├── 0000:3b:00.0 PF, enp59s0f0, mlx5_core, link up, 8 of 8 VFs",
		"wide": "0000:3b:02.7 VF 7",
		"json": `"function": "0000:3b:01.0"`, "yaml": "function: 0000:3b:01.0",
		"svg": "0000:3b:01.3 VF 3", "html": "<td>0000:3b:01.3</td>",
	} {
		out, _, err := run("", "discover", "--root", filepath.Dir(host.SysRoot()), "-o", form)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("%s: %v, want %q in\n%s", form, err, want, out)
		}

		if form == "svg" {
			for decoder := xml.NewDecoder(strings.NewReader(out)); ; {
				if _, err := decoder.Token(); errors.Is(err, io.EOF) {
					break
				} else if err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func TestBadInput(t *testing.T) {
	for arguments, want := range map[string]string{
		"discover --root /proc":                             "--root /proc: no sysfs there",
		"schedule --apply -f pod.yaml":                      "--apply: is for what the cluster has",
		"discover --verify -o svg":                          `--verify: --output "svg": must be text, json or yaml`,
		"discover --verify --root /mnt":                     "--root /mnt: sriovnet can read /sys only",
		"discover -o png":                                   `--output "png": must be text, wide, json, yaml, svg or html`,
		"pools -o table":                                    `--output "table": must be text, wide, yaml or json`,
		"ports --kubeconfig /nowhere":                       "/nowhere",
		"explain pod":                                       "accepts 1 arg",
		"explain pod x -o wide":                             `--output "wide": must be text, json or yaml`,
		"release node1":                                     `"node1": must be xpu/NAME, or a node, with a Function after it`,
		"release node1 0000:3b:01.0 --port-gone":            "--port-gone: needs --hook=port",
		"release node1 0000:3b:01.0 --as-it-is --hook=port": "none of the others can be",
		"release node1 3b:01.0 --hook=port":                 "3b:01.0",
		"release xpu/card --port-gone":                      "name it after xpu/card",
		"release xpu/card 3b:01.0":                          "3b:01.0",
		"release xpu/card 0000:3b:01.0 --hook=port": "--hook and --as-it-is: are for a " +
			"node's Function",
		"bundle --log-lines 0":               "--log-lines 0: must be 1 or more",
		"dead-letters --kubeconfig /nowhere": "/nowhere",
	} {
		_, _, err := run("", strings.Fields(arguments)...)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", arguments, err, want)
		}
	}
}
