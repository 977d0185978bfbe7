// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/conformance/faults"
	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/initramfs"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

const module = "github.com/opiproject/xpu-device-plugin"

// packages are QEMU, the guest's kernel, the tools that build a module for it, and the programs of
// the guest's shell.
var packages = []string{
	"qemu-system-x86", "seabios", "linux-image-amd64", "kmod",
	"linux-headers-amd64", "make", "dash", "coreutils", "sed", "grep", "gawk", "findutils",
	"diffutils",
	"bash", "busybox-static", "iproute2", "ethtool", "pciutils", "tcpdump",
}

// tools are programs of the shell; busybox provides all others.
var tools = []string{
	"/usr/bin/bash", "/usr/bin/busybox", "/usr/bin/ip", "/usr/sbin/bridge", "/usr/sbin/devlink",
	"/usr/sbin/ethtool",
	"/usr/bin/lspci", "/usr/bin/tcpdump",
}

// makeImage writes the file system with which the guest starts, with all that was built for the
// guest. cluster is nil if the guest needs no API server.
func makeImage(
	ctx context.Context, o options, root debian.Root, g guest, cluster *kubeapitest.Cluster,
	file string,
) error {
	a := initramfs.New()
	p := plan.Plan{Guest: g.nic, VFs: g.vfs, Shell: o.shell, API: cluster != nil}

	if cluster != nil {
		g.modules = append(slices.Clone(g.modules), plan.HostDriver)
		if err := addKubeconfigs(a, cluster); err != nil {
			return err
		}
	}

	if err := addModules(ctx, o, root, g, a, &p); err != nil {
		return err
	}
	if err := addPrograms(o, root, g, a); err != nil {
		return err
	}
	if err := addPackaged(ctx, o, g, a); err != nil {
		return err
	}
	if err := addFiles(g, a); err != nil {
		return err
	}

	for _, s := range g.suites {
		if !o.shell {
			args := []string{path.Join(home, s.binary()), "-test.v", "-test.run=" + s.run}
			if s.soaks && o.soak > 0 {
				args = append(args, "-soak="+o.soak.String())
			}

			if s.lives {
				args = append(args, fmt.Sprintf("-lives=%d", o.lives),
					fmt.Sprintf("-seed=%d", o.seed))
			}

			if s.personalities {
				args = append(args, "-personalities="+o.personalities)
			}

			args = append(args, "-test.timeout="+s.limit.String())
			p.Commands = append(p.Commands, plan.Command{Name: s.name, Dir: home, Args: args})
		}
	}

	if o.shell {
		if err := addTools(a, root); err != nil {
			return err
		}
	}

	content, err := json.MarshalIndent(p, "", "  ")
	if err != nil {
		return err
	}

	a.File(plan.Path, content, 0o644)
	return write(a, file)
}

// home is the guest's directory of test binaries.
const home = "/root"

// testDir and programDir are the directories, below the output directory, of built binaries.
const testDir, programDir = "tests", "programs"

// build builds process 1, the test binaries and the programs that they run. It builds programs with
// the flags of the Makefile.
func build(ctx context.Context, o options, g guest) error {
	const strip = "-s -w"
	for dir, arguments := range map[string][]string{
		programDir: append([]string{"build", "-tags", "grpcnotrace", "-ldflags", strip, "-o"},
			g.programPackages()...),
		testDir: append([]string{"test", "-c", "-ldflags", strip, "-o"}, g.testPackages()...),
	} {
		dir = filepath.Join(o.output, dir)
		// Old binaries are removed, so that they are not run by hand.
		if err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o755)); err != nil {
			return err
		}

		out := slices.Index(arguments, "-o") + 1
		if err := goCommand(ctx, slices.Insert(arguments, out, dir+"/")...); err != nil {
			return err
		}
	}

	if !g.needSeeded() {
		return nil
	}

	return buildSeeded(ctx, filepath.Join(o.output, programDir, path.Base(plan.SeededBridge)))
}

// buildSeeded builds an opi-bridge that has any of the faults that show in a guest.
func buildSeeded(ctx context.Context, program string) (err error) {
	dir, err := os.MkdirTemp("", "seeded")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	all := slices.DeleteFunc(faults.All(), func(f faults.Fault) bool { return !f.IsVLANAware() })
	overlay, alone, err := faults.Seed(".", dir, all)
	if err != nil {
		return err
	}
	if len(alone) > 0 {
		return fmt.Errorf("fault %q: needs a program of its own, which no guest gets", alone[0].Name)
	}

	return goCommand(ctx, "build", "-ldflags", "-s -w", "-overlay", overlay, "-o", program,
		"./cmd/opi-bridge")
}

// addPrograms adds the built programs.
func addPrograms(o options, root debian.Root, g guest, a *initramfs.Archive) error {
	tests, programs := filepath.Join(o.output, testDir), filepath.Join(o.output, programDir)
	if err := a.Program("/init", filepath.Join(programs, "guestinit"), string(root)); err != nil {
		return err
	}

	for _, p := range g.programPackages() {
		name := path.Base(p)
		if name == "guestinit" {
			continue
		}
		if err := a.Program(path.Join(plan.Programs, name), filepath.Join(programs, name),
			string(root)); err != nil {
			return err
		}
	}

	if g.needSeeded() {
		if err := a.Program(plan.SeededBridge,
			filepath.Join(programs, path.Base(plan.SeededBridge)), string(root)); err != nil {
			return err
		}
	}

	for _, p := range g.testPackages() {
		name := path.Base(p) + ".test"
		if err := a.Program(path.Join(home, name), filepath.Join(tests, name),
			string(root)); err != nil {
			return err
		}
	}

	return nil
}

// addPackaged adds the programs of Debian packages that suites of the guest need. It unpacks the
// packages into a directory of their own.
func addPackaged(ctx context.Context, o options, g guest, a *initramfs.Archive) error {
	for _, s := range g.suites {
		if len(s.debian.packages) == 0 {
			continue
		}
		root, err := o.release().Unpack(ctx, o.cache, s.debian.packages...)
		if err != nil {
			return err
		}
		for _, program := range s.debian.programs {
			if err := a.Program(program, root.Path(program), string(root)); err != nil {
				return err
			}
		}
		for _, file := range s.debian.files {
			if err := addFile(a, file, root.Path(file)); err != nil {
				return err
			}
		}
	}
	return nil
}

// addFiles adds the project's files that suites of the guest read.
func addFiles(g guest, a *initramfs.Archive) error {
	for _, s := range g.suites {
		for _, file := range s.files {
			if err := addFile(a, path.Join(home, file), file); err != nil {
				return err
			}
		}
	}
	return nil
}

func addFile(a *initramfs.Archive, name, file string) error {
	content, err := os.ReadFile(file)
	if err == nil {
		a.File(name, content, 0o644)
	}
	return err
}

// addModules adds the kernel modules of the guest, and builds those that Debian does not build: the
// kernel's and the project's own.
func addModules(
	ctx context.Context, o options, root debian.Root, g guest, a *initramfs.Archive, p *plan.Plan,
) error {
	release, err := root.Kernel()
	if err != nil {
		return err
	}
	if p.Modules, err = a.Modules(root.Path("/usr/lib/modules/"+release),
		g.modules...); err != nil {
		return err
	}
	for _, s := range g.suites {
		if s.unbuilt.name == "" {
			continue
		}
		if err := addUnbuilt(ctx, o, root, s.unbuilt, a, p); err != nil {
			return err
		}
	}
	if g.own == "" {
		return nil
	}

	return addBuilt(ctx, o, root, filepath.Join("test/qemu", g.own),
		plan.Module{File: g.own + ".ko", Options: g.options}, a, p)
}

// addUnbuilt builds a module from the kernel's source, which is a Debian package, and adds it. Source
// and kernel have the same version but for its last number if one was unpacked later.
func addUnbuilt(
	ctx context.Context, o options, root debian.Root, u unbuilt, a *initramfs.Archive, p *plan.Plan,
) error {
	release, err := root.Kernel()
	if err != nil {
		return err
	}
	numbers := strings.SplitN(release, ".", 3)
	source := "linux-source-" + strings.Join(numbers[:min(2, len(numbers))], ".")

	unpacked, err := o.release().Unpack(ctx, o.cache, source, "xz-utils")
	if err != nil {
		return err
	}
	dir, err := unpacked.Extract(ctx, "/usr/src/"+source+".tar.xz", path.Join(source, u.folder))
	if err != nil {
		return err
	}

	return addBuilt(ctx, o, root, dir, plan.Module{File: u.name + ".ko"}, a, p, u.setting)
}

// addBuilt builds a module and adds it, to be loaded after those that were added before.
func addBuilt(
	ctx context.Context, o options, root debian.Root, sources string, m plan.Module,
	a *initramfs.Archive, p *plan.Plan, settings ...string,
) error {
	file := filepath.Join(o.output, m.File)
	name := strings.TrimSuffix(m.File, ".ko")
	if err := root.BuildModule(ctx, sources, name, file, settings...); err != nil {
		return err
	}
	if err := addFile(a, filepath.Join(plan.Modules, m.File), file); err != nil {
		return err
	}

	p.Modules = append(p.Modules, m)
	return nil
}

func addTools(a *initramfs.Archive, root debian.Root) error {
	for _, tool := range tools {
		if err := a.Program(tool, root.Path(tool), string(root)); err != nil {
			return err
		}
	}
	return nil
}

func write(a *initramfs.Archive, file string) error {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = a.WriteTo(out)
	return errors.Join(err, out.Close())
}

func goCommand(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	output, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, bytes.TrimSpace(output))
	}
	return nil
}
