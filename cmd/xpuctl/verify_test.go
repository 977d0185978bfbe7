// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// verifies serves the result of a comparison as an agent does, and returns its socket.
func verifies(t *testing.T, v *nodestate.Verification) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "admin.sock")
	listener, err := net.Listen("unix", socket)
	must.Succeed(t, err)

	mux := http.NewServeMux()
	mux.HandleFunc("GET "+nodestate.VerifyPath, func(w http.ResponseWriter, _ *http.Request) {
		state := nodestate.State{Node: "node1", Agent: "v0.1.0", Verification: v}
		must.Succeed(t, json.NewEncoder(w).Encode(state))
	})
	server := &http.Server{Handler: mux}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })

	return socket
}

// TestVerify checks what is shown of a comparison, and the exit code.
func TestVerify(t *testing.T) {
	vf := function.ID{Address: "0000:3b:01.0"}
	different := &nodestate.Verification{
		Time: time.Unix(1e9, 0), Same: 40, Different: 34, Unknown: 3,
		Differences: []nodestate.Difference{
			{Function: vf, Property: "vf-index", Inventory: "0", Sriovnet: "4", Look: "ls -l /sys"},
			{Function: vf, Property: "netdev", Inventory: "a", Sriovnet: "b\x1b[2J", Look: "ls"},
		},
		Unknowns: []nodestate.Unverified{
			{Property: "driver", Functions: 3, First: vf, Reason: "knows no driver"},
		},
	}
	same := &nodestate.Verification{Same: 43}

	for name, test := range map[string]struct {
		verification *nodestate.Verification
		form         string
		want         []string
		code         int
		err          string
	}{
		"different": {different, "text", []string{
			"node1: the inventory of xpu-agent v0.1.0 compared with sriovnet, 2001-09-09 01:46:40Z",
			"40 properties are the same, 34 different, 3 unknown",
			"0000:3b:01.0   vf-index    0           4", "  to see which is right: ls -l /sys",
			"32 more are not listed", "driver    3           0000:3b:01.0   knows no driver",
			"report the card",
		}, exitNo, ""},
		"different, for programs": {different, "json", []string{
			`"different": 34`, `"function": "0000:3b:01.0"`, `"look": "ls -l /sys"`,
		}, exitNo, ""},
		"same": {same, "text", []string{
			"43 properties are the same, 0 different, 0 unknown"}, 0, ""},
		"same, in YAML": {same, "yaml", []string{"same: 43"}, 0, ""},
		"nothing compared": {&nodestate.Verification{Skipped: "no card"}, "text", []string{
			"0 properties are the same"}, exitFailed, "there is no result: no card"},
		"agent of another version": {nil, "text", nil, exitFailed, "upgrade it"},
	} {
		t.Run(name, func(t *testing.T) {
			out, _, err := run("", "discover", "--verify", "-o", test.form, "--socket",
				verifies(t, test.verification))
			code := 0
			if errors.Is(err, errNo) {
				code = exitNo
			} else if err != nil {
				code = exitFailed
			}

			if code != test.code || code == exitFailed && !strings.Contains(err.Error(), test.err) {
				t.Errorf("exit code %d, error %v, want %d, %q", code, err, test.code, test.err)
			}
			for _, want := range test.want {
				if !strings.Contains(out, want) {
					t.Errorf("want %q in\n%s", want, out)
				}
			}
			if strings.Contains(out, "\x1b") {
				t.Errorf("text of the kernel controls the terminal:\n%q", out)
			}
		})
	}
}
