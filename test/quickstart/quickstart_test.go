// SPDX-License-Identifier: Apache-2.0

// Package quickstart tests scripts/quickstart where clusters are not as it expects them. Instead of
// kubectl, helm and kind it runs programs that answer what a test says. On a whole cluster
// test/e2e runs it.
package quickstart

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// rule is what a program answers to a command that has a text in it.
type rule struct {
	has, says string
	status    int
}

// cluster is a machine with a kubectl whose cluster answers by rules, the first that matches.
type cluster struct {
	t    *testing.T
	root string // of the script
	bin  string // the only directory of PATH
}

// healthy is a cluster of kind without xpu-device-plugin, on which the quickstart works.
func healthy() []rule {
	return []rule{
		{has: "config current-context", says: "kind-one"},
		{has: "config view --minify", says: "the pinned cluster"},
		{has: "cluster.server", says: "https://127.0.0.1:6443"},
		{has: "get nodes -o name", says: "node/node-1"},
		{has: "{.metadata.name} {.spec.nodeName}", says: "card-1 node-1\ncard-2 node-2"},
		{has: "{.status.podIP}", says: "10.0.0.1"},
		{has: "get resourceclaim", says: "10.10.0.2/24"},
		{has: "exec blue-1 -- /tryout ping", says: "10.10.0.2 answers after 1ms"},
		{has: "exec red-1 -- /tryout ping", says: "tryout: no answer", status: 1},
	}
}

// started is a cluster on which the quickstart is up, on two nodes.
func started() []rule {
	return append([]rule{
		{has: "get namespace xpu-system", says: "namespace/xpu-system"},
		{has: "get namespaces -l quickstart.xpu.opiproject.org/made", says: "namespace/xpu-system"},
		{has: "get nodes -l quickstart.xpu.opiproject.org/made", says: "node-1\nnode-2"},
		{has: "get secrets -l owner=helm", says: "secret/sh.helm.release.v1.xpu.v1"},
	}, healthy()...)
}

func newCluster(t *testing.T, rules ...rule) cluster {
	t.Helper()
	c := cluster{t: t, root: t.TempDir(), bin: t.TempDir()}
	for _, file := range []string{
		"scripts/quickstart", "examples/quickstart/cards.yaml", "examples/quickstart/networks.yaml",
		"examples/quickstart/pods.yaml",
	} {
		text, err := os.ReadFile(filepath.Join("../..", file))
		must.Succeed(t, err)
		must.Succeed(t, os.MkdirAll(filepath.Dir(filepath.Join(c.root, file)), 0o755))
		must.Succeed(t, os.WriteFile(filepath.Join(c.root, file), text, 0o755))
	}

	for _, name := range []string{
		"awk", "basename", "bash", "cat", "dirname", "echo", "env", "grep", "mktemp", "rm", "sed", "sort",
		"timeout", "wc", "xargs",
	} {
		path, err := exec.LookPath(name)
		must.Succeed(t, err)
		must.Succeed(t, os.Symlink(path, filepath.Join(c.bin, name)))
	}
	for _, name := range []string{"kubectl", "helm", "kind", "minikube"} {
		c.program(name, rules)
	}
	return c
}

// program writes a program that logs how it is called and for which cluster, and answers.
func (c cluster) program(name string, rules []rule) {
	c.t.Helper()
	var text strings.Builder
	fmt.Fprintf(&text, "#!/usr/bin/env bash\n"+
		"{ cat \"$KUBECONFIG\" || echo any; echo \": ${HELM_KUBECONTEXT+elsewhere }%s $*\"; } "+
		"2>/dev/null | { read -r a; read -r b; echo \"$a$b\"; } >>%s/log\n"+
		"case \"%s $*\" in\n", name, c.root, name)
	for _, rule := range rules {
		fmt.Fprintf(&text, "*'%s'*) echo '%s'; exit %d ;;\n", rule.has, rule.says, rule.status)
	}
	text.WriteString("esac\n")
	must.Succeed(c.t, os.WriteFile(filepath.Join(c.bin, name), []byte(text.String()), 0o755))
}

// run runs the script without a terminal, and returns what it prints and the calls that it made.
func (c cluster) run(args ...string) (out, calls string, err error) {
	c.t.Helper()
	cmd := exec.CommandContext(c.t.Context(), filepath.Join(c.root, "scripts/quickstart"), args...)
	cmd.Env = []string{"PATH=" + c.bin, "HELM_KUBECONTEXT=elsewhere", "KUBECONFIG=/dev/null/none",
		"TMPDIR=" + c.t.TempDir()}
	var printed bytes.Buffer
	cmd.Stdout, cmd.Stderr = &printed, &printed
	err = cmd.Run()
	log, _ := os.ReadFile(filepath.Join(c.root, "log"))
	return printed.String(), string(log), err
}

func TestUp(t *testing.T) {
	out, calls, err := newCluster(t, healthy()...).run("up", "--built", "--yes")
	if err != nil || !strings.Contains(out, "It works.") {
		t.Fatalf("%v: %s\n%s", err, out, calls)
	}
	for _, want := range []string{
		"kind load image-archive --name one ", "label node node-1 quickstart", "label node node-2 quickstart",
		"helm upgrade --install xpu bin/chart.tgz",
	} {
		if !strings.Contains(calls, want) {
			t.Errorf("it does not call %s", want)
		}
	}
	// The context could be another one by now.
	finds := regexp.MustCompile(`kubectl config (current-context|view --minify)`)
	for line := range strings.Lines(calls) {
		pinned := strings.HasPrefix(line, "the pinned cluster: ") && !strings.Contains(line, "elsewhere")
		if !pinned && !finds.MatchString(line) {
			t.Errorf("not for the cluster of the beginning: %s", line)
		}
	}
}

// TestUpRefuses: it installs on no cluster that it could not leave as it was, and does not say that
// a broken network works.
func TestUpRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		rule rule
		args []string
		want string
		may  string // the last step that it may begin
	}{
		"a network that is broken": {
			rule: rule{has: "exec blue-1 -- /tryout ping", status: 1},
			want: "blue-1 does not reach blue-2", may: "6. ",
		},
		"a network that is not separate": {
			rule: rule{has: "exec red-1 -- /tryout ping", says: "10.10.0.2 answers"},
			want: "red-1 reaches", may: "6. ",
		},
		"a claim without an address": {
			rule: rule{has: "get resourceclaim"}, want: "the claim of pod blue-1", may: "6. ",
		},
		"another agent": {
			rule: rule{has: "get daemonsets -A -l app.kubernetes.io/name=xpu-agent", says: "net/xpu-agent "},
			want: "as net/xpu-agent",
		},
		"CRDs":                 {rule: rule{has: "get crds", says: "xpus.xpu.opiproject.org"}, want: "CRDs are there"},
		"CRDs are not told":    {rule: rule{has: "get crds", says: "Forbidden", status: 1}},
		"ResourceSlices":       {rule: rule{has: "get resourceslices", says: "slice/a"}, want: "slice/a"},
		"namespace xpu-system": {rule: rule{has: "get namespace xpu-system", says: "x"}, want: "not of the quick"},
		"files of an agent": {
			rule: rule{has: "exec card-2 -c simhost -- /tryout present", says: "/host/var/lib/xpu-agent"},
			want: "node node-2 has files", may: "2. ",
		},
		"files are not told": {
			rule: rule{has: "exec card-2 -c simhost -- /tryout present", status: 1},
			want: "cannot look at the files of node node-2", may: "2. ",
		},
		"another cluster than kind's": {
			rule: rule{has: "config current-context", says: "production"},
			args: []string{"--provider", "kind", "--name=one"}, want: "production is not kind's cluster one",
		},
		"another context than the profile": {
			args: []string{"--provider=minikube", "--name=two"}, want: "is not minikube's profile two",
		},
		"no value":     {args: []string{"--provider"}, want: "--provider has no value"},
		"empty value":  {args: []string{"--name="}, want: "--name has no value"},
		"another word": {args: []string{"--fast"}, want: "there is no --fast"},
	} {
		t.Run(name, func(t *testing.T) {
			rules := healthy()
			if test.rule.has != "" {
				rules = append([]rule{test.rule}, rules...)
			}
			args := append([]string{"up", "--built", "--yes"}, test.args...)
			out, calls, err := newCluster(t, rules...).run(args...)
			if err == nil || !strings.Contains(out, test.want) || strings.Contains(out, "It works") {
				t.Errorf("%v, want %s: %s", err, test.want, out)
			}

			last := ""
			for _, step := range regexp.MustCompile(`(?m)^\d\. `).FindAllString(out, -1) {
				last = step
			}
			if last != test.may {
				t.Errorf("the last step is %q, want %q", last, test.may)
			}
			if strings.HasPrefix(test.may, "2") && strings.Contains(calls, "label node node-2") {
				t.Error("it notes a node that has files of another")
			}
		})
	}
}

func TestUpAsks(t *testing.T) {
	out, calls, err := newCluster(t, healthy()...).run("up", "--built")
	if err == nil || !strings.Contains(out, "say --yes") || strings.Contains(calls, "kind load") {
		t.Errorf("%v: %s\n%s", err, out, calls)
	}
}

func TestDown(t *testing.T) {
	out, calls, err := newCluster(t, started()...).run("down")
	if err != nil || !strings.Contains(out, "Nothing is left") {
		t.Fatalf("%v: %s\n%s", err, out, calls)
	}
	for _, want := range []string{
		"helm uninstall xpu", "exec card-1 -c simhost -- /tryout remove", "exec card-2 -c simhost",
		"spec.nodeName=node-1", "label node node-2 quickstart.xpu.opiproject.org/made-",
		"delete -f examples/quickstart/cards.yaml", "delete namespace xpu-system",
	} {
		if !strings.Contains(calls, want) {
			t.Errorf("it does not call %s:\n%s", want, calls)
		}
	}
}

// TestDownTouchesItsOwn: what up did not note belongs to others.
func TestDownTouchesItsOwn(t *testing.T) {
	rules := append([]rule{{has: "get nodes -l quickstart", says: "node-1"}}, started()...)
	out, calls, err := newCluster(t, rules...).run("down")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if strings.Contains(calls, "node-2") || strings.Contains(calls, "card-2") {
		t.Errorf("it touches a node that was not noted:\n%s", calls)
	}

	for name, rule := range map[string]rule{
		"namespace": {has: "get namespaces -l quickstart"},
		"agent":     {has: "get daemonsets -A -l app.kubernetes.io/name=xpu-agent", says: "net/xpu-agent "},
		"nothing":   {has: "get namespace xpu-system"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, append(append(rules[:0:0], rule), started()...)...)
			out, calls, err := c.run("down")
			if (err == nil) != (name == "nothing") {
				t.Errorf("%v: %s", err, out)
			}
			if regexp.MustCompile("delete|uninstall|remove").MatchString(calls) {
				t.Errorf("it deletes:\n%s", calls)
			}
		})
	}
}

// TestDownGoesOn: a node that does not answer keeps its files, and nothing else.
func TestDownGoesOn(t *testing.T) {
	rules := append([]rule{
		{has: "exec card-2", status: 1},
		{has: "delete -f examples/quickstart/networks.yaml", status: 1},
		{has: "--wait --timeout 150s", says: "xPUs do not answer", status: 1},
		{has: "get crds", says: "xpus.xpu.opiproject.org\nxpuports.xpu.opiproject.org"},
		{has: "get xpus.xpu.opiproject.org", says: "/xpu-1"},
		{has: "get xpuports.xpu.opiproject.org", says: "xpu-quickstart/port-1\nxpu-quickstart/port-2"},
	}, started()...)
	out, calls, err := newCluster(t, rules...).run("down")
	if err == nil || !strings.Contains(out, "files on node node-2") || strings.Contains(out, "Nothing is") {
		t.Errorf("%v: %s", err, out)
	}
	for _, want := range []string{
		"label node node-1 quickstart", "helm uninstall xpu --namespace xpu-system --no-hooks",
		"kubectl patch xpus.xpu.opiproject.org xpu-1 ",
		"kubectl -n xpu-quickstart patch xpuports.xpu.opiproject.org port-2 ",
		"delete -f examples/quickstart/cards.yaml", "delete namespace xpu-system",
	} {
		if !strings.Contains(calls, want) {
			t.Errorf("it does not call %s:\n%s", want, calls)
		}
	}
	if strings.Contains(calls, "label node node-2") || strings.Contains(calls, "spec.nodeName=node-2") {
		t.Errorf("node-2 is not noted any more:\n%s", calls)
	}
}

func TestDownWithoutHelm(t *testing.T) {
	c := newCluster(t, started()...)
	must.Succeed(t, os.Remove(filepath.Join(c.bin, "helm")))
	out, calls, err := c.run("down")
	if err == nil || !strings.Contains(out, "helm is missing") || strings.Contains(calls, "delete") {
		t.Errorf("with a release: %v: %s\n%s", err, out, calls)
	}

	c = newCluster(t, append([]rule{{has: "get secrets"}}, started()...)...)
	must.Succeed(t, os.Remove(filepath.Join(c.bin, "helm")))
	if out, _, err := c.run("down"); err != nil || !strings.Contains(out, "Nothing is left") {
		t.Errorf("without a release: %v: %s", err, out)
	}
}
