// SPDX-License-Identifier: Apache-2.0

// Package apt unpacks Debian packages into a directory without installing them. It runs apt-get and
// dpkg with their own configuration, package lists and caches, so that the machine's stay
// unchanged.
package apt

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Archive downloads packages from Sources. It keeps its state in Dir, which it creates.
type Archive struct {
	Dir     string // absolute
	Sources []Source
}

// Unpack downloads packages and unpacks them into target, in this order. A package is a name, or
// name/suite if several sources have it.
func (a Archive) Unpack(ctx context.Context, target string, packages ...string) error {
	if err := a.configure(); err != nil {
		return fmt.Errorf("apt: %w", err)
	}
	if err := a.run(ctx, "apt-get", "--quiet", "--error-on=any", "update"); err != nil {
		return err
	}
	if err := a.run(ctx, "apt-get",
		append([]string{"--quiet", "download"}, packages...)...); err != nil {
		return err
	}

	for _, p := range packages {
		name, _, _ := strings.Cut(p, "/")
		files, err := filepath.Glob(filepath.Join(a.debs(), name+"_*.deb"))
		if err != nil || len(files) != 1 {
			return fmt.Errorf("apt: package %s: want one downloaded file, found %q", p, files)
		}
		if err := a.run(ctx, "dpkg", "--extract", files[0], target); err != nil {
			return err
		}
	}

	return nil
}

func (a Archive) debs() string { return filepath.Join(a.Dir, "debs") }

// configure writes an apt configuration that keeps the machine's settings (proxies, certificates)
// and replaces all paths of state. It is used as Dir::Etc::Main, because only a file, not an
// option, can clear the hooks that the machine's configuration runs after an update.
func (a Archive) configure() error {
	for _, dir := range []string{
		a.debs(), filepath.Join(a.Dir, "lists/partial"),
		filepath.Join(a.Dir, "cache/archives/partial"),
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}

	var sources, main strings.Builder
	for _, s := range a.Sources {
		sources.WriteString(s.line())
	}

	if _, err := os.Stat("/etc/apt/apt.conf"); err == nil {
		main.WriteString("#include \"/etc/apt/apt.conf\";\n")
	}

	for _, hook := range []string{
		"APT::Update::Pre-Invoke", "APT::Update::Post-Invoke", "APT::Update::Post-Invoke-Success",
	} {
		fmt.Fprintf(&main, "#clear %s;\n", hook)
	}

	for _, setting := range [][2]string{
		{"Dir::Etc::SourceList", a.file("sources.list")},
		{"Dir::Etc::SourceParts", "/dev/null"},
		{"Dir::Etc::Preferences", "/dev/null"},
		{"Dir::Etc::PreferencesParts", "/dev/null"},
		{"Dir::State", a.Dir},
		{"Dir::State::Lists", a.file("lists")},
		{"Dir::State::status", a.file("status")},
		{"Dir::Cache", a.file("cache")},
		{"Dir::Cache::Archives", a.file("cache/archives")},
		{"Dir::Log", a.file("log")},
		// The directory may be unreadable for the user that apt would switch to.
		{"APT::Sandbox::User", "root"},
	} {
		fmt.Fprintf(&main, "%s %q;\n", setting[0], setting[1])
	}

	for name, content := range map[string]string{
		"sources.list": sources.String(),
		"status":       "",
		"main.conf":    main.String(),
		"apt.conf":     fmt.Sprintf("Dir::Etc::Main %q;\n", a.file("main.conf")),
	} {
		if err := os.WriteFile(a.file(name), []byte(content), 0o644); err != nil {
			return err
		}
	}

	return nil
}

func (a Archive) file(name string) string { return filepath.Join(a.Dir, name) }

func (a Archive) run(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = a.debs()
	cmd.Env = append(os.Environ(), "APT_CONFIG="+a.file("apt.conf"), "LC_ALL=C")
	output, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "),
			err, bytes.TrimSpace(output))
	}
	return nil
}
