// SPDX-License-Identifier: Apache-2.0

// Package monitoring tests the alerts and the dashboard: they use metrics that exist, alerts do
// what they say, and have runbooks.
package monitoring

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	root = "../.."
	dir  = root + "/deploy/monitoring"
)

type rule struct {
	Alert       string
	Expr        string
	Labels      map[string]string
	Annotations map[string]string
}

func rules(t testing.TB) (spec map[string]any, all []rule) {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, "rules.yaml"))
	must.Succeed(t, err)
	var object struct {
		Spec map[string]any
	}
	must.Succeed(t, yaml.Unmarshal(content, &object))
	text, err := json.Marshal(object.Spec)
	must.Succeed(t, err)
	var typed struct {
		Groups []struct{ Rules []rule }
	}
	must.Succeed(t, json.Unmarshal(text, &typed))

	for _, g := range typed.Groups {
		all = append(all, g.Rules...)
	}

	return object.Spec, all
}

// queries are those of the dashboard, by the title of the panel.
func queries(t testing.TB) map[string][]string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, "dashboard.json"))
	must.Succeed(t, err)

	var dashboard struct {
		Panels []struct {
			Title, Type, Description string
			Targets                  []struct{ Expr string }
		}
	}

	must.Succeed(t, json.Unmarshal(content, &dashboard))
	found := map[string][]string{}
	for _, p := range dashboard.Panels {
		if p.Type != "row" && (len(p.Targets) == 0 || p.Description == "") {
			t.Errorf("panel %q has no query or no description", p.Title)
		}
		for _, target := range p.Targets {
			found[p.Title] = append(found[p.Title], target.Expr)
		}
	}

	return found
}

var (
	name       = regexp.MustCompile(`\b(?:xpu|opi_bridge|sriov)_[a-z0-9_]+`)
	documented = regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)` \\| ([a-z]+) \\|(.*?)\\|")
	matchers   = regexp.MustCompile(`\{[^}]*\}`)
)

// metrics are those of the reference, with the suffixes that a histogram has.
func metrics(t testing.TB) map[string]bool {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(root, "docs/reference/metrics.md"))
	must.Succeed(t, err)
	known := map[string]bool{}
	for _, m := range documented.FindAllStringSubmatch(string(page), -1) {
		if m[2] == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				known[m[1]+suffix] = true
			}
			continue
		}
		known[m[1]] = true
	}

	return known
}

// TestMetricsExist: alerts, dashboard and page use metrics of the reference only.
func TestMetricsExist(t *testing.T) {
	known := metrics(t)
	if len(known) < 40 {
		t.Fatalf("the reference has only %d metrics", len(known))
	}

	_, all := rules(t)
	used := queries(t)
	for _, r := range all {
		used[r.Alert] = append(used[r.Alert], r.Expr)
	}

	for where, expressions := range used {
		for _, expression := range expressions {
			found := name.FindAllString(matchers.ReplaceAllString(expression, ""), -1)
			if len(found) == 0 && !strings.HasPrefix(expression, "up{") {
				t.Errorf("%s: %s has no metric of ours", where, expression)
			}
			for _, n := range found {
				if !known[n] {
					t.Errorf("%s: metric %s does not exist", where, n)
				}
			}
		}
	}
}

// TestRunbooks: every alert has a section on the page with its query, and the page has no others.
func TestRunbooks(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/how-to/monitor.md"))
	must.Succeed(t, err)
	_, all := rules(t)
	var names []string
	for _, r := range all {
		names = append(names, r.Alert)
		if !strings.Contains(string(page), "\n### "+r.Alert+"\n") ||
			!strings.Contains(string(page), "\n"+r.Expr+"\n") {
			t.Errorf("%s: docs/how-to/monitor.md lacks the section, or has another query", r.Alert)
		}
		if want := "/docs/how-to/monitor.md#" +
			strings.ToLower(r.Alert); !strings.HasSuffix(r.Annotations["runbook_url"], want) {
			t.Errorf("%s: runbook_url %s, want %s", r.Alert, r.Annotations["runbook_url"], want)
		}
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" ||
			r.Labels["severity"] == "" {
			t.Errorf("%s: has no summary, description or severity", r.Alert)
		}
	}

	for _, section := range regexp.MustCompile(`(?m)^### (.*)$`).FindAllStringSubmatch(string(page),
		-1) {
		if !slices.Contains(names, section[1]) {
			t.Errorf("docs/how-to/monitor.md has a section for alert %s, which does not exist",
				section[1])
		}
	}
}

// TestAlerts has promtool evaluate the rules.
func TestAlerts(t *testing.T) {
	promtool := filepath.Join(root, "bin", "promtool")
	if _, err := os.Stat(promtool); err != nil {
		t.Skipf("there is no promtool: scripts/test builds it: %v", err)
	}

	spec, _ := rules(t)
	text, err := yaml.Marshal(spec)
	must.Succeed(t, err)
	work := t.TempDir()
	must.Succeed(t, os.WriteFile(filepath.Join(work, "rules.yaml"), text, 0o600))
	tests, err := os.ReadFile("rules_test.yaml")
	must.Succeed(t, err)
	must.Succeed(t, os.WriteFile(filepath.Join(work, "rules_test.yaml"), tests, 0o600))

	for _, args := range [][]string{
		{"check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"},
		{"test", "rules", "rules_test.yaml"},
	} {
		absolute, err := filepath.Abs(promtool)
		must.Succeed(t, err)
		cmd := exec.Command(absolute, args...)
		cmd.Dir = work
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, output)
		}
	}
}
