// SPDX-License-Identifier: Apache-2.0

package debian

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// BuildModule builds a kernel module out of tree and writes it to file. sources is a directory with
// a Makefile for kbuild that makes <name>.ko, with settings such as "CONFIG_X=m". BuildModule needs
// root, because the packages' own compiler runs in their root directory.
func (r Root) BuildModule(
	ctx context.Context, sources, name, file string, settings ...string,
) error {
	if err := r.build(ctx, sources, name, file, settings); err != nil {
		return fmt.Errorf("kernel module %s: %w", name, err)
	}
	return nil
}

func (r Root) build(
	ctx context.Context, sources, name, file string, settings []string,
) error {
	if os.Geteuid() != 0 {
		return errors.New("needs root, for chroot")
	}

	release, err := r.Kernel()
	if err != nil {
		return err
	}

	null := r.Path("/dev/null")
	if err := os.MkdirAll(filepath.Dir(null), 0o755); err != nil {
		return err
	}
	if err := unix.Mknod(null, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil &&
		!errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make %s: %w", null, err)
	}

	dir, err := os.MkdirTemp(string(r), "build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	if err := os.CopyFS(dir, os.DirFS(sources)); err != nil {
		return err
	}

	inside := "/" + filepath.Base(dir)
	// The module has no type information, which would need pahole and a vmlinux.
	args := append([]string{"-C", "/usr/src/linux-headers-" + release, "M=" + inside,
		"CONFIG_DEBUG_INFO_BTF_MODULES="}, settings...)
	cmd := exec.CommandContext(ctx, "/usr/bin/make", append(args, "modules")...)
	cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/bin", "LC_ALL=C", "TMPDIR=" + inside}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: string(r)}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make: %w\n%s", err, bytes.TrimSpace(output))
	}

	content, err := os.ReadFile(filepath.Join(dir, name+".ko"))
	if err != nil {
		return err
	}

	return os.WriteFile(file, content, 0o644)
}
