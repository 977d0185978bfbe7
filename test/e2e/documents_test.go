// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/e2e/documents"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// documented are the documents whose commands are run, in this order.
var documented = []string{
	"README.md", "examples/README.md", "docs/tutorial/first-pod.md",
	"docs/how-to/configure-interface.md",
	"docs/how-to/use-device-plugin.md", "docs/how-to/service-a-card.md",
	"docs/how-to/will-my-pod-get-its-device.md", "docs/how-to/inspect.md",
}

// directMode is the document that takes the product away and comes to direct mode.
const directMode = "docs/how-to/direct-mode.md"

// testDocuments runs the commands of documents, and compares what they print with what is shown.
func (k *kept) testDocuments(t *testing.T) {
	for _, document := range documented {
		k.try(t, document, func(t *testing.T) {
			dir := k.workplace(t)
			defer k.restore(t, dir)
			k.follow(t, document, dir)
		})
	}
}

// testDirectMode does the same with the document about direct mode. The product is gone after it.
func (k *kept) testDirectMode(t *testing.T) { k.follow(t, directMode, k.workplace(t)) }

// follow does in a directory what a reader of the document does.
func (k *kept) follow(t *testing.T, document, dir string) {
	text, err := os.ReadFile(filepath.Join(k.Source, document))
	must.Succeed(t, err)
	blocks, err := documents.Parse(string(text))
	must.Succeed(t, err)

	for _, block := range blocks {
		switch {
		case block.NotRun != "":
			t.Logf("%s:%d is not run: %s", document, block.Line, block.NotRun)
		case block.File != "":
			must.Succeed(t, os.WriteFile(filepath.Join(dir, block.File), []byte(block.Content), 0o600))
		}
	}

	out, code, err := k.script(t.Context(), dir, documents.Script(blocks))
	where := document
	for _, part := range documents.Parts(out) {
		block := blocks[part.Block]
		where = fmt.Sprintf("%s:%d", document, block.Line)
		if missing := documents.Missing(block.Output, part.Output); missing != "" {
			t.Errorf("%s: shown, but not printed:\n%s\nprinted:\n%s", where, missing, part.Output)
		}
	}
	if err != nil || code != 0 {
		t.Errorf("%s: a command ended with %d, %v; the document printed\n%s", where, code, err, out)
	}
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
	out, code, err := k.script(context.WithoutCancel(t.Context()), dir, `set -e
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
	"docs/tutorial/quickstart.md":                     "TestQuickstart runs its commands",
	"docs/tutorial/moving-from-sriovdp.md":            otherDriver,
	"docs/how-to/move-from-dranet.md":                 otherDriver,
	"docs/how-to/move-from-dra-driver-sriov.md":       otherDriver,
	"docs/how-to/move-from-sriov-network-operator.md": otherDriver,
	"docs/how-to/install.md":                          registry,
	"docs/how-to/upgrade.md":                          registry,
	"docs/how-to/uninstall.md":                        registry,
	"docs/how-to/monitor.md":                          "the cluster has no Prometheus",
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
	for _, pattern := range []string{
		"README.md", "examples/README.md", "docs/tutorial/*.md", "docs/how-to/*.md",
	} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		must.Succeed(t, err)
		files = append(files, found...)
	}

	followed := append(slices.Clone(documented), directMode)
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
		if _, isOther := others[name]; isOther == slices.Contains(followed, name) {
			t.Errorf("%s must be in one of the two lists: documents that are run, and others", name)
		}
	}

	for _, name := range slices.Concat(followed, slices.Collect(maps.Keys(others))) {
		if !withCommands[name] {
			t.Errorf("%s has no commands", name)
		}
	}
}
