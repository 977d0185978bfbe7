// SPDX-License-Identifier: Apache-2.0

// Package debian unpacks Debian packages, with all their dependencies, into a directory: QEMU, the
// guest's kernel and its tools. It installs nothing, and neither uses nor changes the machine's own
// packages, so that every machine with apt gets the same.
package debian

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Release is the source of packages. trixie is the first Debian release whose QEMU has the NIC igb
// and whose kernel is 6.12 or later.
type Release struct {
	Mirror string // URL of the archive; see [MachineMirror]
	Suite  string // "trixie"
	// absolute path of the file with the release's keys, from package debian-archive-keyring
	Keyring string
}

// MachineMirror returns the Debian archive of this machine's own packages.
func MachineMirror(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages").Output()
	if err != nil {
		return "", fmt.Errorf("where this machine's Debian packages come from: %w", err)
	}

	for line := range strings.Lines(string(out)) {
		if mirror := strings.TrimSuffix(strings.TrimSpace(line), "/"); strings.HasSuffix(mirror,
			"/debian") {
			return mirror, nil
		}
	}

	return "", errors.New("apt of this machine has no Debian archive; name one with -mirror")
}

// Root is a directory with unpacked packages.
type Root string

// Unpack returns a directory in cache with these packages and their dependencies, and makes it if
// it is missing. It does not update an existing directory. Several processes may call Unpack at
// once. Output of apt-get is shown only if it fails.
func (r Release) Unpack(ctx context.Context, cache string, packages ...string) (Root, error) {
	key := sha256.Sum256(
		[]byte(strings.Join(append([]string{r.Mirror, r.Suite}, packages...), "\n")),
	)
	root := filepath.Join(cache, fmt.Sprintf("%s-%x", r.Suite, key[:4]))
	if _, err := os.Stat(root); err == nil {
		return Root(root), nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}

	temporary, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temporary)

	unpacked := Root(filepath.Join(temporary, "root"))
	if err := r.unpack(ctx, filepath.Join(temporary, "apt"), unpacked, packages); err != nil {
		return "", fmt.Errorf("unpack %s: %w", strings.Join(packages, ", "), err)
	}
	if err := unpacked.finish(ctx); err != nil {
		return "", err
	}
	// another process may have made the directory first
	if err := os.Rename(string(unpacked), root); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}

	return Root(root), nil
}

func (r Release) unpack(ctx context.Context, state string, root Root, packages []string) error {
	if _, err := os.Stat(r.Keyring); err != nil {
		return fmt.Errorf("the keys of Debian: %w: install package debian-archive-keyring", err)
	}
	if err := r.configure(state); err != nil {
		return err
	}

	apt := func(args ...string) error {
		return run(ctx, "APT_CONFIG="+filepath.Join(state, "apt.conf"), "apt-get", args...)
	}
	if err := apt("--quiet", "--error-on=any", "update"); err != nil {
		return err
	}

	install := []string{"--quiet", "--yes", "--download-only", "--no-install-recommends", "install"}
	if err := apt(append(install, packages...)...); err != nil {
		return err
	}

	files, err := filepath.Glob(filepath.Join(state, "cache/archives/*.deb"))
	if err != nil {
		return err
	}

	for _, file := range files {
		if err := run(ctx, "LC_ALL=C", "dpkg", "--extract", file, string(root)); err != nil {
			return err
		}
	}

	return nil
}

// configure writes a configuration of apt with its own package lists and caches, and an empty list
// of installed packages. The machine's apt.conf also applies, for proxies, but not the commands
// that the machine lets apt run.
func (r Release) configure(state string) error {
	for _, dir := range []string{"lists/partial", "cache/archives/partial", "log"} {
		if err := os.MkdirAll(filepath.Join(state, dir), 0o755); err != nil {
			return err
		}
	}

	var main strings.Builder
	if _, err := os.Stat("/etc/apt/apt.conf"); err == nil {
		main.WriteString("#include \"/etc/apt/apt.conf\";\n")
	}

	main.WriteString("#clear APT::Update;\n#clear DPkg;\n")
	for _, setting := range [][2]string{
		{"APT::Architecture", "amd64"},
		{"APT::Sandbox::User", "root"}, // another user may not be able to read the directory
		{"Dir::Etc::SourceList", filepath.Join(state, "sources.list")},
		{"Dir::Etc::SourceParts", "/dev/null"},
		{"Dir::Etc::Preferences", "/dev/null"},
		{"Dir::Etc::PreferencesParts", "/dev/null"},
		{"Dir::State", state},
		{"Dir::State::Lists", filepath.Join(state, "lists")},
		{"Dir::State::status", filepath.Join(state, "status")},
		{"Dir::Cache", filepath.Join(state, "cache")},
		{"Dir::Cache::Archives", filepath.Join(state, "cache/archives")},
		{"Dir::Log", filepath.Join(state, "log")},
	} {
		fmt.Fprintf(&main, "%s %q;\n", setting[0], setting[1])
	}

	for name, content := range map[string]string{
		"apt.conf":  fmt.Sprintf("Dir::Etc::Main %q;\n", filepath.Join(state, "main.conf")),
		"main.conf": main.String(),
		"sources.list": fmt.Sprintf("deb [signed-by=%s] %s %s main\n", r.Keyring,
			r.Mirror, r.Suite),
		"status": "",
	} {
		if err := os.WriteFile(filepath.Join(state, name), []byte(content), 0o644); err != nil {
			return err
		}
	}

	return nil
}

// finish makes what Debian makes when it installs packages: the program awk, and the lists of
// kernel modules. Packages without a kernel need neither.
func (r Root) finish(ctx context.Context) error {
	if _, err := os.Stat(r.Path("/boot")); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.Symlink("gawk", r.Path("/usr/bin/awk")); err != nil &&
		!errors.Is(err, fs.ErrExist) {
		return err
	}

	release, err := r.Kernel()
	if err != nil {
		return err
	}

	args := r.Command("/usr/sbin/depmod", "-b", r.Path("/usr"), "-m", "/lib/modules", release)
	return run(ctx, "LC_ALL=C", args[0], args[1:]...)
}

// Path returns the path of a file of the packages on this machine.
func (r Root) Path(name string) string { return filepath.Join(string(r), name) }

// Command returns the command line that runs a program of the packages with their own dynamic
// linker and libraries.
func (r Root) Command(program string, args ...string) []string {
	return append([]string{
		r.Path("/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
		"--library-path", r.Path("/usr/lib/x86_64-linux-gnu"),
		r.Path(program),
	}, args...)
}

// Kernel returns the release of the unpacked kernel, such as "6.12.107+deb13-amd64".
func (r Root) Kernel() (string, error) {
	const prefix = "/boot/vmlinuz-"
	found, err := filepath.Glob(r.Path(prefix) + "*")
	if err != nil {
		return "", err
	}
	if len(found) != 1 {
		return "", fmt.Errorf("kernel: want one file %s*, found %q", r.Path(prefix), found)
	}
	return strings.TrimPrefix(found[0], r.Path(prefix)), nil
}

func run(ctx context.Context, setting, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), setting, "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	output, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "),
			err, bytes.TrimSpace(output))
	}
	return nil
}
