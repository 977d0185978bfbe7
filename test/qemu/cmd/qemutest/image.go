package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/initramfs"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

const module = "github.com/opiproject/xpu-device-plugin"

// packages are QEMU, the guest's kernel, what builds a module for it, and what a person needs in its shell.
var packages = []string{
	"qemu-system-x86", "seabios", "linux-image-amd64", "kmod",
	"linux-headers-amd64", "make", "dash", "coreutils", "sed", "grep", "gawk", "findutils", "diffutils",
	"bash", "busybox-static", "iproute2", "ethtool", "pciutils", "tcpdump",
}

// tools are what the shell has; busybox stands in for all others.
var tools = []string{
	"/usr/bin/bash", "/usr/bin/busybox", "/usr/bin/ip", "/usr/sbin/bridge", "/usr/sbin/devlink", "/usr/sbin/ethtool",
	"/usr/bin/lspci", "/usr/bin/tcpdump",
}

// makeImage builds what runs in the guest, and writes the file system that it starts with.
func makeImage(ctx context.Context, o options, root debian.Root, g guest, file string) error {
	a := initramfs.New()
	p := plan.Plan{Guest: g.name, VFs: o.vfs, Shell: o.shell}
	if err := addModules(ctx, o, root, g, a, &p); err != nil {
		return err
	}
	guestinit := filepath.Join(o.output, "guestinit")
	err := goCommand(ctx, "build", "-ldflags", "-s -w", "-o", guestinit, module+"/test/qemu/cmd/guestinit")
	if err != nil {
		return err
	}
	if err := a.Program("/init", guestinit, string(root)); err != nil {
		return err
	}
	for _, s := range g.suites {
		built := filepath.Join(o.output, s.name+".test")
		if err := goCommand(ctx, "test", "-c", "-ldflags", "-s -w", "-o", built, module+"/"+s.path); err != nil {
			return err
		}
		program := "/root/" + s.name + ".test"
		if err := a.Program(program, built, string(root)); err != nil {
			return err
		}
		if !o.shell {
			p.Commands = append(p.Commands, plan.Command{Name: s.name, Dir: "/root", Args: []string{
				program, "-test.v", "-test.run=" + s.run, "-test.timeout=" + s.limit.String(),
			}})
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

// addModules adds the kernel modules of the guest, and builds those that are the project's own.
func addModules(
	ctx context.Context, o options, root debian.Root, g guest, a *initramfs.Archive, p *plan.Plan,
) error {
	release, err := root.Kernel()
	if err != nil {
		return err
	}
	if p.Modules, err = a.Modules(root.Path("/usr/lib/modules/"+release), g.modules...); err != nil {
		return err
	}
	if g.own == "" {
		return nil
	}
	file := filepath.Join(o.output, g.own+".ko")
	if err := root.BuildModule(ctx, filepath.Join("test/qemu", g.own), g.own, file); err != nil {
		return err
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	a.File(filepath.Join(plan.Modules, g.own+".ko"), content, 0o644)
	p.Modules = append(p.Modules, plan.Module{File: g.own + ".ko", Options: g.options})
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
