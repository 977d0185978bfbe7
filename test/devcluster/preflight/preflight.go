// SPDX-License-Identifier: Apache-2.0

// Package preflight checks in advance whether a machine can build and run a development cluster,
// and reports each problem in one line.
package preflight

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/devcluster/cgroup"
)

// Required disk space in bytes. A build also fills the Go caches; a cluster stores images and logs.
const (
	buildSpace = 6 << 30
	runSpace   = 1 << 30
)

// controllers are required by the kubelet.
var controllers = [...]string{"cpu", "cpuset", "memory", "pids"}

// Build checks the requirements for building the artifacts into cache.
func Build(cache string) error {
	return errors.Join(
		command("go", "install Go, see https://go.dev/doc/install"),
		command("apt-get", "a Debian or Ubuntu machine is needed for the container runtime"),
		command("dpkg", "a Debian or Ubuntu machine is needed for the container runtime"),
		space(cache, buildSpace),
	)
}

// Run checks the requirements for running a cluster with its state in stateRoot, with or without
// kube-proxy.
func Run(stateRoot string, kubeProxy bool) error {
	var nft error
	if kubeProxy {
		nft = command("nft", "install the package nftables: kube-proxy calls it")
	}

	return errors.Join(
		nft,
		root(os.Geteuid()),
		command("mount", "install the package mount: the kubelet calls it"),
		command("umount", "install the package mount: the kubelet calls it"),
		groups("/sys/fs/cgroup", "/proc/cgroups"),
		overlay("/proc/filesystems"),
		space(stateRoot, runSpace),
	)
}

func root(uid int) error {
	if uid != 0 {
		return fmt.Errorf("user: running as UID %d, but namespaces, mounts and control groups "+
			"need root", uid)
	}
	return nil
}

func command(name, remedy string) error {
	if _, err := exec.LookPath(name); err != nil {
		return fmt.Errorf("command %s: not found in PATH: %s", name, remedy)
	}
	return nil
}

func space(dir string, need uint64) error {
	existing := dir
	for {
		if _, err := os.Stat(existing); err == nil || existing == filepath.Dir(existing) {
			break
		}
		existing = filepath.Dir(existing)
	}

	var fs unix.Statfs_t
	if err := unix.Statfs(existing, &fs); err != nil {
		return fmt.Errorf("disk space: %s: %w", existing, err)
	}
	if free := fs.Bavail * uint64(fs.Bsize); free < need {
		return fmt.Errorf("disk space: %s has %.1f GiB free, %d GiB are needed", existing,
			float64(free)/(1<<30), need>>30)
	}

	return nil
}

func overlay(filesystems string) error {
	content, err := os.ReadFile(filesystems)
	if err != nil {
		return fmt.Errorf("overlay file system: %w", err)
	}

	for line := range strings.Lines(string(content)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[len(fields)-1] == "overlay" {
			return nil
		}
	}

	return errors.New("overlay file system: the kernel has none: run modprobe overlay")
}

// groups checks that the kubelet's controllers are usable: below root under version 2, in their own
// hierarchies under version 1.
func groups(root, table string) error {
	if cgroup.Unified(root) {
		content, err := os.ReadFile(filepath.Join(root, "cgroup.controllers"))
		if err != nil {
			return fmt.Errorf("control groups: %w", err)
		}
		return missing(strings.Fields(string(content)))
	}

	f, err := os.Open(table)
	if err != nil {
		return fmt.Errorf("control groups: %w", err)
	}
	defer f.Close()

	mounted, err := enabled(f)
	if err != nil {
		return fmt.Errorf("control groups: %s: %w", table, err)
	}

	mounted = slices.DeleteFunc(mounted, func(name string) bool {
		_, err := os.Stat(filepath.Join(root, name))
		return err != nil
	})

	return missing(mounted)
}

func missing(have []string) error {
	for _, c := range controllers {
		if !slices.Contains(have, c) {
			return fmt.Errorf("control groups: controller %s is not available under "+
				"/sys/fs/cgroup, which the kubelet needs", c)
		}
	}
	return nil
}

// enabled returns the names of enabled controllers in /proc/cgroups, whose columns are name,
// hierarchy, groups and enabled.
func enabled(r io.Reader) ([]string, error) {
	var names []string
	scanner := bufio.NewScanner(r)
	for scanner.Scan() {
		fields := strings.Fields(scanner.Text())
		if len(fields) == 4 && fields[3] == "1" {
			names = append(names, fields[0])
		}
	}

	return names, scanner.Err()
}
