// SPDX-License-Identifier: Apache-2.0

package workflows

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// advisories is GitHub's form for reports of vulnerabilities, which only maintainers can read.
const advisories = "https://github.com/opiproject/xpu-device-plugin/security/advisories/new"

// form is GitHub's syntax for issue forms:
// https://docs.github.com/en/communities/using-templates-to-encourage-useful-issues-and-pull-requests/syntax-for-issue-forms
type form struct {
	Name        string    `json:"name"`
	Description string    `json:"description"`
	Labels      []string  `json:"labels"`
	Body        []element `json:"body"`
}

// element is a part of a form. Its syntax is that of GitHub's form schema.
type element struct {
	Type       string `json:"type"`
	ID         string `json:"id"`
	Attributes struct {
		Label       string   `json:"label"`
		Description string   `json:"description"`
		Placeholder string   `json:"placeholder"`
		Value       string   `json:"value"`
		Options     []string `json:"options"`
	} `json:"attributes"`
	Validations struct {
		Required bool `json:"required"`
	} `json:"validations"`
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	must.Succeed(t, err)
	return string(text)
}

// TestIssueForms: GitHub shows no form at all for a file that it does not understand.
func TestIssueForms(t *testing.T) {
	paths, err := filepath.Glob(root + "/.github/ISSUE_TEMPLATE/*.yml")
	must.Succeed(t, err)

	forms := 0
	for _, path := range paths {
		if filepath.Base(path) == "config.yml" {
			continue
		}

		forms++
		t.Run(filepath.Base(path), func(t *testing.T) {
			var f form
			text, err := os.ReadFile(path)
			must.Succeed(t, err)
			must.Succeed(t, yaml.UnmarshalStrict(text, &f))
			checkForm(t, f)
		})
	}

	if forms == 0 {
		t.Error("there are no forms")
	}
}

func checkForm(t *testing.T, f form) {
	t.Helper()
	if f.Name == "" || f.Description == "" {
		t.Error("name and description must be set")
	}

	asks := false
	ids := map[string]bool{}
	for i, e := range f.Body {
		asks = asks || e.Type != "markdown"
		switch {
		case !slices.Contains([]string{"markdown", "textarea", "input", "dropdown"}, e.Type):
			t.Errorf("body[%d].type %q: is unknown", i, e.Type)
		case e.Type == "markdown" && e.Attributes.Value == "":
			t.Errorf("body[%d]: markdown has no value", i)
		case e.Type != "markdown" && (e.Attributes.Label == "" || e.ID == "" || ids[e.ID]):
			t.Errorf("body[%d]: must have a label and an id of its own", i)
		case (e.Type == "dropdown") != (len(e.Attributes.Options) > 0):
			t.Errorf("body[%d]: a dropdown, and nothing else, has options", i)
		}
		ids[e.ID] = true
	}

	if !asks {
		t.Error("the form asks nothing")
	}
}

// TestVulnerabilitiesHaveAForm: whoever opens an issue or reads the policy finds the private form.
func TestVulnerabilitiesHaveAForm(t *testing.T) {
	var config struct {
		Blank bool `json:"blank_issues_enabled"`
		Links []struct {
			Name  string `json:"name"`
			URL   string `json:"url"`
			About string `json:"about"`
		} `json:"contact_links"`
	}
	must.Succeed(t, yaml.UnmarshalStrict([]byte(read(t, ".github/ISSUE_TEMPLATE/config.yml")),
		&config))

	found := false
	for _, link := range config.Links {
		found = found || link.URL == advisories
		if link.Name == "" || link.About == "" {
			t.Errorf("contact link %s: name and about must be set", link.URL)
		}
	}
	if !found {
		t.Errorf("config.yml has no contact link to %s", advisories)
	}

	for _, path := range []string{"SECURITY.md", "SUPPORT.md"} {
		if !strings.Contains(read(t, path), advisories) {
			t.Errorf("%s does not name %s", path, advisories)
		}
	}
}

// TestFormsThatAreNamed: a link to a form that does not exist opens an empty issue.
func TestFormsThatAreNamed(t *testing.T) {
	named := regexp.MustCompile(`issues/new\?template=([\w.-]+)`)
	for _, path := range []string{"README.md", "ROADMAP.md", "SUPPORT.md"} {
		for _, match := range named.FindAllStringSubmatch(read(t, path), -1) {
			read(t, ".github/ISSUE_TEMPLATE/"+match[1])
		}
	}
}

// TestLinksOfTheFirstPages: the documentation's site checks links of docs/, and not these.
func TestLinksOfTheFirstPages(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#:\s]+)(#[^)\s]*)?\)`)
	for _, path := range []string{
		"CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "MAINTAINERS.md", "README.md", "ROADMAP.md",
		"SECURITY.md", "SUPPORT.md",
	} {
		for _, match := range link.FindAllStringSubmatch(read(t, path), -1) {
			if _, err := os.Stat(filepath.Join(root, match[1])); err != nil {
				t.Errorf("%s: link to %s: %v", path, match[1], err)
			}
		}
	}
}

// TestOwnersAreTheMaintainers: every file has an owner, and MAINTAINERS.md names each.
func TestOwnersAreTheMaintainers(t *testing.T) {
	all := false
	for line := range strings.Lines(read(t, ".github/CODEOWNERS")) {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(line, "#") {
			continue
		}

		all = all || fields[0] == "*"
		for _, owner := range fields[1:] {
			if !strings.Contains(read(t, "MAINTAINERS.md"), owner) {
				t.Errorf("MAINTAINERS.md does not name %s", owner)
			}
		}
	}

	if !all {
		t.Error("CODEOWNERS has no line for *")
	}
}
