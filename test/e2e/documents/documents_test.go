// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	text := strings.ReplaceAll(`# Page

Save this as ~green.yaml~:

~~~yaml
kind: XPUNetwork
~~~

    kubectl apply -f green.yaml
    kubectl get xnet

~~~text
NAME
green
~~~

<!-- not run: it ends the cluster -->

    make demo-down

<!-- fails -->

    false

- an item

      kubectl get pods

~~~console
$ xpuctl pools
fast
$ echo $?
0
~~~
`, "~", "`")

	got, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}

	want := []Block{
		{Line: 5, File: "green.yaml", Content: "kind: XPUNetwork\n"},
		{Line: 9, Commands: "kubectl apply -f green.yaml\nkubectl get xnet\n",
			Output: []string{"NAME", "green"}},
		{Line: 19, Commands: "make demo-down\n", NotRun: "it ends the cluster"},
		{Line: 23, Commands: "false\n", Fails: true},
		{Line: 30, Commands: "xpuctl pools\n", Output: []string{"fast"}},
		{Line: 32, Commands: "echo $?\n", Output: []string{"0"}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("- want, + got:\n%s", diff)
	}

	if _, err := Parse("```text\nno end"); err == nil {
		t.Error("a block without an end is accepted")
	}
	if _, err := Parse("<!-- fails -->\n\n    true\n    false\n"); err == nil {
		t.Error("a block that fails is accepted with two commands")
	}
}

func TestMissing(t *testing.T) {
	const output = "NAME              READY   AGE\nxpu-agent-8k6nr   1/1     56s\nok     2.3s  blue: all of 2 pods\n" +
		"0\n" + "claim web-nic-zjhkh: Function 0000:3b:01.0\n" +
		"[pod/agent-wbdvj/agent] detached\n" + "[pod/web-5c68d7f9f4-x2k4p/web] ready\n"
	for shown, want := range map[string]string{
		"NAME  READY   AGE":                "",
		"xpu-agent-djbxz   1/1  3s":        "",
		"...":                              "",
		"0":                                "",
		"1":                                "1",
		"xpu-agent-djbxz   0/1   3s":       "xpu-agent-djbxz   0/1   3s",
		"ok     15ms  blue: all of 3 pods": "ok     15ms  blue: all of 3 pods",
		"ok     15ms  blue: ... pods":      "",
		"xpu-agent-djbxz   1/1   3s   x":   "xpu-agent-djbxz   1/1   3s   x",
		"ok     15ms  blue: all of 2 nuts": "ok     15ms  blue: all of 2 nuts",
		"claim web-nic-4c7jf: Function 0000:3b:01.1": "",
		"[pod/agent-d99jb/agent] detached":           "",
		"[pod/agent-zjhkh/agent] detached":           "",
		"[pod/web-7d9f8b6c5d-d99jb/web] ready":       "",
		"[pod/web-7d9f8b6c5d-zjhkh/web] ready":       "",
	} {
		if got := Missing([]string{shown}, output); got != want {
			t.Errorf("%q: %q is missing, want %q", shown, got, want)
		}
	}
}
