// SPDX-License-Identifier: Apache-2.0

// Package mount builds the file systems of a cluster and of a node. All functions change the mount
// namespace of the calling process, which must be a private one.
package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Private stops the propagation of mounts between this namespace and its parent.
func Private() error {
	return do("private", "none", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
}

// Shared lets mounts propagate between this namespace and its children, as container runtimes
// expect on a node (mountPropagation: Bidirectional).
func Shared() error {
	return do("shared", "none", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

// Proc mounts a proc for this process's PID namespace.
func Proc() error {
	return do("proc", "proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

// Bind mounts source at target, without mounts below source. It creates target.
func Bind(source, target string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return do("bind", source, target, "", unix.MS_BIND, "")
}

// Overlay mounts a writable copy of lower at target, which it creates. Lower may list several
// directories separated by colons, the uppermost first. Changes go to disk, a directory that must
// not be inside lower.
func Overlay(lower, disk, target string) error {
	upper, work := filepath.Join(disk, "upper"), filepath.Join(disk, "work")
	for _, dir := range []string{upper, work, target} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return do("overlay", "overlay", target, "overlay",
		0, fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", lower, upper, work))
}

// FreshRun replaces /run by an empty tmpfs with the binds (source to target, a path below /run).
// The sources may be anywhere, including in the old /run.
func FreshRun(binds map[string]string) error {
	if err := os.MkdirAll("/run", 0o755); err != nil {
		return err
	}
	// A mount point inside the old /run would leave a directory on the machine, so a tmpfs is used.
	if err := do("tmpfs", "tmpfs", "/mnt", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV,
		"mode=0755"); err != nil {
		return err
	}

	for source, target := range binds {
		below, err := filepath.Rel("/run", target)
		if err != nil {
			return err
		}
		if err := Bind(source, filepath.Join("/mnt", below)); err != nil {
			return err
		}
	}

	return do("move", "/mnt", "/run", "", unix.MS_MOVE, "")
}

// Sysfs mounts a sysfs for this process's network namespace, and keeps the control groups mounted.
func Sysfs() error {
	const aside = "/run/devcluster.cgroup"
	if err := os.Mkdir(aside, 0o700); err != nil {
		return err
	}
	if err := do("bind", "/sys/fs/cgroup", aside, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := do("sysfs", "sysfs", "/sys", "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
		""); err != nil {
		return err
	}
	if err := do("bind", aside, "/sys/fs/cgroup", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	if err := unix.Unmount(aside, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("mount: unmount %s: %w", aside, err)
	}

	return os.Remove(aside)
}

// machineSettings are the kernel settings that a kubelet sets for the whole machine, with the
// values that it wants (k8s.io/component-helpers/node/util/sysctl).
var machineSettings = [...][2]string{
	{"vm/overcommit_memory", "1"},
	{"vm/panic_on_oom", "0"},
	{"kernel/panic", "10"},
	{"kernel/panic_on_oops", "1"},
	{"kernel/keys/root_maxkeys", "1000000"},
	{"kernel/keys/root_maxbytes", "25000000"},
}

// ShieldSettings mounts plain files, kept in dir, over the kernel settings that a kubelet would
// change for the whole machine. Call it after Proc.
func ShieldSettings(dir string) error {
	for _, s := range machineSettings {
		if err := shield(dir, filepath.Join("/proc/sys", s[0]), s[1]); err != nil {
			return err
		}
	}
	return nil
}

// BootID gives the node its own boot id, because the kernel's is the machine's and does not change
// when a node restarts. Only the node's own /proc shows it, not the proc that a runtime mounts in a
// container.
func BootID(dir, id string) error { return shield(dir, "/proc/sys/kernel/random/boot_id", id) }

// HideControllers removes unmounted controllers of cgroup v1 from /proc/cgroups, because CRI-O
// would use them.
func HideControllers(dir string) error {
	text, err := os.ReadFile("/proc/cgroups")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}

	mounted := mountedControllers(string(text))
	if mounted == "" { // cgroup version 2
		return nil
	}

	return shield(dir, "/proc/cgroups", mounted)
}

// mountedControllers returns the lines of /proc/cgroups (cgroups(7): name, hierarchy, number,
// enabled) for controllers with a hierarchy, or "" if there are none.
func mountedControllers(cgroups string) string {
	var kept []string
	for line := range strings.Lines(cgroups) {
		fields := strings.Fields(line)
		if len(fields) == 4 && !strings.HasPrefix(line, "#") && fields[1] != "0" {
			kept = append(kept, strings.TrimSpace(line))
		}
	}

	if kept == nil {
		return ""
	}

	return "#subsys_name\thierarchy\tnum_cgroups\tenabled\n" + strings.Join(kept, "\n")
}

func shield(dir, setting, value string) error {
	if _, err := os.Stat(setting); errors.Is(err, fs.ErrNotExist) {
		return nil
	}

	file := filepath.Join(dir, filepath.Base(setting))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
		return err
	}

	return do("shield", file, setting, "", unix.MS_BIND, "")
}

func do(what, source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount: %s %s on %s: %w", what, source, target, err)
	}
	return nil
}
