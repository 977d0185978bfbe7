// SPDX-License-Identifier: Apache-2.0

package site

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// TestVersions builds the site of a small repository with three releases: each version has its own
// pages, its own search, and links to the others. One cannot be built, and another has a map that is
// not right: the site goes without the first and has the second.
func TestVersions(t *testing.T) {
	modules, err := filepath.Abs("../../docs/site/node_modules")
	must.Succeed(t, err)
	needs.Built(t, filepath.Join(modules, "vitepress"), "site")
	root := repository(t, modules)
	said := run(t, root, "scripts/site", "/base/")
	for _, want := range []string{
		"docs/README.md lists gone.md, which does not exist", "docs/lost.md is not in docs/README.md",
		"docs/more/untitled.md has no heading", "v0.0.1 is left out",
	} {
		if !strings.Contains(said, want) {
			t.Errorf("it does not warn that %s: %s", want, said)
		}
	}

	out := filepath.Join(root, "bin/site")
	for page, wants := range map[string][]string{
		"index.html":        {"The newest words", "v0.3.0-dev"},
		"v0.2.1/index.html": {"Words of v0.2.1", "blob/v0.2.1/LICENSE"},
		"v0.1.0/index.html": {"Words of v0.1.0", "blob/v0.1.0/LICENSE"},
	} {
		text, err := os.ReadFile(filepath.Join(out, page))
		if err != nil {
			t.Error(err)
			continue
		}
		wants = append(wants, `href="/base/v0.2.1/"`, `href="/base/v0.1.0/"`, `href="/base/"`)
		for _, want := range wants {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s has no %s", page, want)
			}
		}
		if strings.Contains(string(text), "/base/v0.0.1/") {
			t.Errorf("%s leads to v0.0.1, which cannot be built", page)
		}
	}

	// v0.2.0 has a later patch, a candidate is no release, and v0.0.1 cannot be built.
	for _, name := range []string{"v0.2.0", "v0.3.0-rc.1", "v0.0.1"} {
		if _, err := os.Stat(filepath.Join(out, name)); err == nil {
			t.Errorf("there is a site of %s", name)
		}
	}
	if left := run(t, root, "git", "worktree", "list"); strings.Count(left, "\n") != 1 {
		t.Errorf("worktrees are left: %s", left)
	}
}

// repository returns a repository with this project's program for the site and little text.
func repository(t *testing.T, modules string) string {
	t.Helper()
	root := t.TempDir()
	must.Succeed(t, os.CopyFS(filepath.Join(root, "docs/site/.vitepress"),
		os.DirFS("../../docs/site/.vitepress")))
	copyFile(t, "../../docs/site/package.json", filepath.Join(root, "docs/site/package.json"))
	// Without package-lock.json nothing is newer than what is installed, and it stays.
	copyFile(t, "../../scripts/site", filepath.Join(root, "scripts/site"))
	must.Succeed(t, os.Chmod(filepath.Join(root, "scripts/site"), 0o755))
	// Most of the time goes into Mermaid, and there are no diagrams.
	write(t, root, "docs/site/.vitepress/theme/Diagram.vue", "<template><div /></template>\n")
	must.Succeed(t, os.Symlink(modules, filepath.Join(root, "docs/site/node_modules")))
	write(t, root, "LICENSE", "")
	write(t, root, "CHANGELOG.md", "# Changelog\n")
	write(t, root, ".gitignore", "/bin\nnode_modules\n/docs/site/.vitepress/.temp/\n")
	write(t, root, "docs/page.md", "# Page\n")

	run(t, root, "git", "init", "--quiet", "--initial-branch=main")
	tagged(t, root, "v0.0.1") // has no map

	const documentation = "# Documentation\n\n**Read**:\n\n- [Page](page.md)\n"
	write(t, root, "docs/README.md", documentation+"- [Gone](gone.md)\n- [More](more/README.md)\n")
	write(t, root, "docs/more/README.md", "# More\n\n[Untitled](untitled.md)\n")
	write(t, root, "docs/more/untitled.md", "Words\n")
	write(t, root, "docs/lost.md", "# Lost\n")
	tagged(t, root, "v0.1.0")

	write(t, root, "docs/README.md", documentation)
	must.Succeed(t, os.RemoveAll(filepath.Join(root, "docs/more")))
	must.Succeed(t, os.Remove(filepath.Join(root, "docs/lost.md")))
	for _, tag := range []string{"v0.2.0", "v0.2.1", "v0.3.0-rc.1"} {
		tagged(t, root, tag)
	}
	release(t, root, "v0.3.0-dev", "The newest words")
	return root
}

// tagged makes a release with its tag.
func tagged(t *testing.T, root, tag string) {
	t.Helper()
	release(t, root, tag, "Words of "+tag)
	run(t, root, "git", "tag", tag)
}

func release(t *testing.T, root, version, words string) {
	t.Helper()
	write(t, root, "VERSION", version+"\n")
	write(t, root, "README.md", "# Project\n\n"+words+", under a [licence](LICENSE).\n")
	run(t, root, "git", "add", "--all")
	run(t, root, "git", "-c", "user.name=x", "-c", "user.email=x@example.com", "commit", "--quiet",
		"--message", version)
}

func write(t *testing.T, root, name, text string) {
	t.Helper()
	path := filepath.Join(root, name)
	must.Succeed(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must.Succeed(t, os.WriteFile(path, []byte(text), 0o644))
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	must.Succeed(t, err)
	must.Succeed(t, os.MkdirAll(filepath.Dir(to), 0o755))
	must.Succeed(t, os.WriteFile(to, text, 0o644))
}

func run(t *testing.T, dir string, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	if strings.Contains(name, "/") {
		cmd.Path = filepath.Join(dir, name)
	}
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}
