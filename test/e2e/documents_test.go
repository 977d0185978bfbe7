// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/e2e/documents"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// documented are the documents whose commands are run, in this order.
var documented = []string{
	"README.md", "docs/tutorial/first-pod.md", "docs/how-to/configure-interface.md",
	"docs/how-to/use-device-plugin.md", "docs/how-to/service-a-card.md",
	"docs/how-to/will-my-pod-get-its-device.md", "docs/how-to/inspect.md",
}

// testDocuments runs the commands of documents, and compares what they print with what is shown.
func (k *kept) testDocuments(t *testing.T) {
	for _, document := range documented {
		t.Run(filepath.Base(document), func(t *testing.T) { k.follow(t, document) })
	}
}

// follow does what a reader of the document does.
func (k *kept) follow(t *testing.T, document string) {
	text, err := os.ReadFile(filepath.Join(k.Source, document))
	must.Succeed(t, err)
	blocks, err := documents.Parse(string(text))
	must.Succeed(t, err)

	dir := k.workplace(t)
	defer k.restore(t, dir)
	// A command that fails ends the script, unless the next one asks for its exit code.
	script := "shopt -s expand_aliases\nmark() { local code=$?; printf '\\n@@@ %s\\n' $1; return $code; }\nset -e\n"
	for i, block := range blocks {
		asked := i+1 < len(blocks) && blocks[i+1].Commands == "echo $?\n"
		switch {
		case block.NotRun != "":
			t.Logf("%s:%d is not run: %s", document, block.Line, block.NotRun)
		case block.File != "":
			must.Succeed(t, os.WriteFile(filepath.Join(dir, block.File), []byte(block.Content), 0o600))
		default:
			script += fmt.Sprintf("mark %d\n", i)
			if asked {
				script += "set +e\n"
			}
			if block.Fails {
				script += "set +e\n"
			}
			script += block.Commands
			if block.Fails || block.Commands == "echo $?\n" {
				script += "set -e\n"
			}
		}
	}

	out, code, err := k.Shell(t.Context(), dir, script)
	must.Succeed(t, err)
	last := -1
	for _, part := range parts(out) {
		last = part.block
		if missing := documents.Missing(blocks[last].Output, part.output); missing != "" {
			t.Errorf("%s:%d: shown, but not printed:\n%s\nprinted:\n%s", document, blocks[last].Line,
				missing, part.output)
		}
	}
	if code != 0 {
		t.Errorf("%s:%d: a command ended with %d:\n%s", document, blocks[last].Line, code,
			blocks[last].Commands)
	}
}

// part is what the commands of a block printed.
type part struct {
	block  int
	output string
}

var marks = regexp.MustCompile(`(?m)^@@@ ([0-9]+)\n`)

// parts divides what a document's script printed.
func parts(out string) (all []part) {
	found := marks.FindAllStringSubmatchIndex(out, -1)
	for i, at := range found {
		end := len(out)
		if i+1 < len(found) {
			end = found[i+1][0]
		}
		block, _ := strconv.Atoi(out[at[2]:at[3]])
		all = append(all, part{block, out[at[1]:end]})
	}
	return all
}

// workplace returns a directory that looks like the project's, in which a reader saves files.
func (k *kept) workplace(t *testing.T) string {
	dir := t.TempDir()
	entries, err := os.ReadDir(k.Source)
	must.Succeed(t, err)
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), ".") {
			must.Succeed(t, os.Symlink(filepath.Join(k.Source, entry.Name()),
				filepath.Join(dir, entry.Name())))
		}
	}
	return dir
}

// restore takes back what a document has left on the cluster.
func (k *kept) restore(t *testing.T, dir string) {
	out, code, err := k.Shell(context.WithoutCancel(t.Context()), dir, `set -e
for file in *.yaml; do
  [ ! -e "$file" ] || kubectl delete --ignore-not-found --timeout=60s -f "$file" || true
done
kubectl delete pods,deployments,resourceclaims --all --timeout=60s
kubectl apply -f test/e2e/manifests/pools.yaml -f test/e2e/manifests/device-plugin.yaml \
  -f test/e2e/manifests/networks.yaml -f test/e2e/direct/pools.yaml
kubectl wait --for=condition=Ready xnet --all --timeout=60s`)
	if err != nil || code != 0 {
		t.Errorf("%d, %v: %s", code, err, out)
	}
}

// others are documents with commands that the demo's cluster has nothing for, and why.
var others = map[string]string{
	"docs/tutorial/demo.md":                           "TestStory runs the demo",
	"docs/tutorial/quickstart.md":                     "TestQuickstart does what it says",
	"docs/tutorial/moving-from-sriovdp.md":            otherDriver,
	"docs/how-to/move-from-dranet.md":                 otherDriver,
	"docs/how-to/move-from-dra-driver-sriov.md":       otherDriver,
	"docs/how-to/move-from-sriov-network-operator.md": otherDriver,
	"docs/how-to/install.md":                          registry,
	"docs/how-to/upgrade.md":                          registry,
	"docs/how-to/uninstall.md":                        registry,
	"docs/how-to/monitor.md":                          "the cluster has no Prometheus",
	"docs/how-to/direct-mode.md":                      "the cluster is not in direct mode",
	"docs/how-to/join-a-tenant.md":                    "there is one cluster",
	"docs/how-to/certificates.md":                     "the cluster has no cert-manager",
	"docs/how-to/back-up-and-restore.md":              "it makes the cluster anew",
	"docs/how-to/debug.md":                            "TestKept makes these mistakes by its table",
	"docs/how-to/move-a-pool-to-dra.md":               "it needs jq",
	"docs/how-to/use-with-kubevirt.md":                "the cluster has no KubeVirt",
	"docs/how-to/use-with-multus.md":                  "the cluster has Multus already",
	"docs/how-to/use-with-vm-runtimes.md":             "the cluster has no such runtime",
	"docs/how-to/run-opi-bridge.md":                   hardware,
	"docs/how-to/test-an-opi-agent.md":                hardware,
	"docs/how-to/use-subfunctions.md":                 hardware,
	"docs/how-to/use-vfio.md":                         hardware,
	"docs/how-to/make-vfs.md":                         hardware,
	"docs/how-to/verify-cards.md":                     hardware,
	"docs/how-to/quarantine.md":                       hardware,
	"docs/how-to/post-delete-hooks.md":                hardware,
	"docs/how-to/choose-a-device-model.md":            "TestStory chooses the device models",
}

const (
	otherDriver = "it begins on a cluster with another driver"
	registry    = "it takes images and chart from a registry"
	hardware    = "it is about cards, or commands on their hosts"
)

// TestDocuments checks that each tutorial and how-to with commands is run by TestKept, or has a reason
// why not.
func TestDocuments(t *testing.T) {
	var files []string
	for _, pattern := range []string{"README.md", "docs/tutorial/*.md", "docs/how-to/*.md"} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		must.Succeed(t, err)
		files = append(files, found...)
	}

	withCommands := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must.Succeed(t, err)
		blocks, err := documents.Parse(string(text))
		must.Succeed(t, err)

		name, err := filepath.Rel("../..", file)
		must.Succeed(t, err)
		if !slices.ContainsFunc(blocks, func(b documents.Block) bool { return b.Commands != "" }) {
			continue
		}
		withCommands[name] = true
		if _, isOther := others[name]; isOther == slices.Contains(documented, name) {
			t.Errorf("%s must be in one of the two lists: documents that are run, and others", name)
		}
	}

	for _, name := range slices.Concat(documented, slices.Collect(maps.Keys(others))) {
		if !withCommands[name] {
			t.Errorf("%s has no commands", name)
		}
	}
}
