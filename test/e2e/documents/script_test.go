// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestScript(t *testing.T) {
	for name, test := range map[string]struct {
		blocks []Block
		want   []Part
		fails  bool
	}{
		"each command succeeds": {
			blocks: []Block{{Commands: "echo a\n"}, {File: "b.yaml"}, {Commands: "echo c\n"},
				{Commands: "echo d\n", NotRun: "it cannot"}},
			want: []Part{{0, "a\n\n"}, {2, "c\n"}},
		},
		"a command fails": {
			blocks: []Block{{Commands: "false\necho a\n"}, {Commands: "echo b\n"}},
			want:   []Part{{0, ""}},
			fails:  true,
		},
		"the document asks for the exit code": {
			blocks: []Block{{Commands: "(exit 3)\n"}, {Commands: "echo $?\n"}, {Commands: "false\n"},
				{Commands: "echo b\n"}},
			want:  []Part{{0, "\n"}, {1, "3\n\n"}, {2, ""}},
			fails: true,
		},
		"a command fails, as the document says": {
			blocks: []Block{{Commands: "false\n", Fails: true}, {Commands: "echo a\n"},
				{Commands: "false\n"}, {Commands: "echo b\n"}},
			want:  []Part{{0, "\n"}, {1, "a\n\n"}, {2, ""}},
			fails: true,
		},
		"a command succeeds, and the document says that it fails": {
			blocks: []Block{{Commands: "true\n", Fails: true}, {Commands: "echo a\n"}},
			want:   []Part{{0, "it should fail\n"}},
			fails:  true,
		},
	} {
		out, err := exec.CommandContext(t.Context(), "bash", "-c", Script(test.blocks)).Output()
		if (err != nil) != test.fails {
			t.Errorf("%s: %v, should fail: %t", name, err, test.fails)
		}
		if diff := cmp.Diff(test.want, Parts(string(out))); diff != "" {
			t.Errorf("%s: - want, + got:\n%s", name, diff)
		}
	}
}
