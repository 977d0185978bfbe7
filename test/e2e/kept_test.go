// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/e2e/mistakes"
	"github.com/opiproject/xpu-device-plugin/test/e2e/story"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// onDemo is for the development of TestKept.
var onDemo = flag.Bool("on-demo", false,
	"run TestKept on the cluster that make demo KEEP=1 has left up, and leave it up; its last subtest, "+
		"direct mode, takes the product away")

// TestKept does on the cluster that "make demo KEEP=1" leaves up what its users do: they apply the
// examples, make mistakes, and run the commands of the documents. At last they go to direct mode.
func TestKept(t *testing.T) {
	world := newWorld(t)
	// The names in the documents.
	world.Cluster.Name, world.StateDir = "demo", "/var/lib/xpu-device-plugin/demo"
	if *onDemo {
		must.Succeed(t, world.Attach(t.Context()))
	} else {
		if _, err := world.Cluster.Inspect(t.Context()); err == nil {
			t.Fatal("the cluster of make demo KEEP=1 is up: run make demo-down, or the test with -on-demo")
		}
		endAfter(t, world)
		run(t, world.KeptSteps(), world)
	}

	k := &kept{World: world}
	t.Run("examples", k.testExamples)
	t.Run("mistakes", k.testMistakes)
	t.Run("documents", k.testDocuments)
	t.Run("direct mode", k.testDirectMode)
}

// kept is the cluster of [TestKept].
type kept struct {
	*story.World
	// failures is the number of subtests that have failed since one succeeded.
	failures int
}

// try runs a subtest. After three failures in a row it ends the test, because the cluster no longer
// works then, and each further subtest would wait for minutes.
func (k *kept) try(t *testing.T, name string, test func(*testing.T)) {
	t.Helper()
	if t.Run(name, test) {
		k.failures = 0
		return
	}
	if k.failures++; k.failures >= 3 {
		t.Fatal("the rest is not run, because three in a row have failed")
	}
}

// script runs a script in a directory as [story.World.Shell] does, for at most four minutes.
func (k *kept) script(ctx context.Context, dir, script string) (out string, code int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 4*time.Minute)
	defer cancel()
	return k.Shell(ctx, dir, script)
}

// shell runs a script in the project's directory. It fails the test if the script fails.
func (k *kept) shell(t *testing.T, script string) string {
	t.Helper()
	out, code, err := k.script(t.Context(), k.Source, script)
	if err != nil || code != 0 {
		t.Fatalf("%s\nended with %d, %v:\n%s", script, code, err, out)
	}
	return out
}

// told waits until a command prints what is missing in no way any more, and returns its output.
func (k *kept) told(
	t *testing.T, patience time.Duration, command string, missing func(output string, code int) string,
) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	var out string
	for {
		now, code, err := k.Shell(ctx, k.Source, command)
		if err != nil {
			t.Fatalf("$ %s\n%v; it printed\n%s", command, err, out)
		}
		lacks := missing(now, code)
		if lacks == "" {
			return now
		}

		out = fmt.Sprintf("%sexit code %d; missing: %s", now, code, lacks)
		select {
		case <-ctx.Done():
			t.Fatalf("$ %s\nprints after %s\n%s", command, patience, out)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// manifest writes objects into a file, and returns its path.
func manifest(t *testing.T, objects string) string {
	t.Helper()
	// The name of the test, which t.TempDir has, may have commas, which kubectl takes for separators.
	dir, err := os.MkdirTemp("", "xpu")
	must.Succeed(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })

	path := filepath.Join(dir, "objects.yaml")
	must.Succeed(t, os.WriteFile(path, []byte(objects), 0o600))
	return path
}

// clear deletes the objects of a file, and waits until they are gone.
func (k *kept) clear(t *testing.T, path string) {
	t.Helper()
	out, code, err := k.script(context.WithoutCancel(t.Context()), k.Source,
		"kubectl delete --ignore-not-found --timeout=90s -f "+path)
	// Kinds that the cluster lacks, and objects that go with others.
	if err != nil || code != 0 && !strings.Contains(out, "no matches for kind") {
		t.Errorf("%s: %d, %v: %s", path, code, err, out)
	}
}

// testMistakes makes each mistake of the table, and checks that the sentences are said.
func (k *kept) testMistakes(t *testing.T) {
	sections, err := mistakes.All()
	must.Succeed(t, err)

	for _, section := range sections {
		for _, row := range section.Rows {
			k.try(t, row.Mistake, func(t *testing.T) { k.make(t, row) })
		}
	}
}

// make makes one mistake.
func (k *kept) make(t *testing.T, row mistakes.Row) {
	path := manifest(t, row.Manifest())
	defer k.undo(t, row, path)
	if row.Before != "" {
		k.shell(t, "set -e\n"+row.Before)
	}

	if row.Refused() {
		out, code, err := k.script(t.Context(), k.Source, "kubectl apply -f "+path)
		if missing := row.Missing(out); err != nil || code == 0 || missing != "" {
			t.Errorf("kubectl apply: %d, %v: missing %q in\n%s", code, err, missing, out)
		}
		t.Logf("%s", out)
		return
	}

	k.shell(t, "kubectl apply -f "+path)
	if row.Run != "" {
		k.shell(t, row.Run)
	}

	out := k.told(t, 2*time.Minute, row.Command(), func(output string, code int) string {
		if row.Look == "" { // the first line says what is wrong with it
			output, _, _ = strings.Cut(output, "\n")
		}
		if code != row.Exit {
			return fmt.Sprintf("exit code %d", row.Exit)
		}
		return row.Missing(output)
	})
	first, _, _ := strings.Cut(out, "\n")
	t.Logf("$ %s\n%s", row.Command(), first)
}

// undo takes a mistake back. The objects are deleted last, because only programs that run can release
// the Functions of pods.
func (k *kept) undo(t *testing.T, row mistakes.Row, path string) {
	t.Helper()
	defer k.clear(t, path)
	if row.Undo == "" {
		return
	}

	out, code, err := k.script(context.WithoutCancel(t.Context()), k.Source, "set -e\n"+row.Undo)
	if err != nil || code != 0 {
		t.Errorf("undo: %d, %v: %s", code, err, out)
	}
}
