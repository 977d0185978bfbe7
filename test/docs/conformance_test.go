// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// conformancePage names the tests of the project for what Kubernetes asks of a driver.
const conformancePage = "docs/reference/kubernetes-conformance.md"

var (
	// namedTest matches a test with its package: `pkg/claim.TestLimits`.
	namedTest = regexp.MustCompile("`([a-z0-9/]+)\\.(Test[A-Za-z0-9]+)`")
	// spec matches the name of a spec of Ginkgo.
	spec = regexp.MustCompile(`\b(?:It|ConformanceIt)\("([^"]+)"`)
)

// TestNamedTestsExist: whoever follows a line of the page finds the test.
func TestNamedTestsExist(t *testing.T) {
	page := read(t, conformancePage)
	found := namedTest.FindAllStringSubmatch(page, -1)
	if len(found) < 50 {
		t.Fatalf("%s names %d tests", conformancePage, len(found))
	}

	for _, one := range found {
		if !hasTest(t, one[1], one[2]) {
			t.Errorf("%s has no test %s", one[1], one[2])
		}
	}
}

// hasTest reports whether a test file of the directory has the test.
func hasTest(t testing.TB, dir, name string) bool {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, dir, "*_test.go"))
	must.Succeed(t, err)
	for _, path := range paths {
		source, err := os.ReadFile(path)
		must.Succeed(t, err)
		if strings.Contains(string(source), "\nfunc "+name+"(") {
			return true
		}
	}
	return false
}

// TestSpecsAreNamed: the page has every spec of the version of Kubernetes that tests run.
func TestSpecsAreNamed(t *testing.T) {
	needs.Kubernetes(t)
	list := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes")
	list.Dir = filepath.Join(root, "test", "devcluster")
	dir, err := list.Output()
	must.Succeed(t, err)
	paths, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "test/e2e/dra/*.go"))
	must.Succeed(t, err)

	page := read(t, conformancePage)
	count := 0
	for _, path := range paths {
		source, err := os.ReadFile(path)
		must.Succeed(t, err)
		for _, one := range spec.FindAllStringSubmatch(string(source), -1) {
			count++
			if !strings.Contains(page, "`"+one[1]+"`") {
				t.Errorf("%s does not name the spec %q", conformancePage, one[1])
			}
		}
	}
	if count < 100 {
		t.Errorf("%d specs in %s", count, dir)
	}
}
