// SPDX-License-Identifier: Apache-2.0

// Guestinit is process 1 of a test guest. It mounts the usual file systems, loads kernel modules,
// makes VFs, runs the commands of its plan and ends the machine with their exit status. Commands
// write to the second serial port, to which the kernel does not write.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

const pciDevices = "/sys/bus/pci/devices"

// patience bounds each wait for the kernel or a card.
const patience = 20 * time.Second

func main() {
	status := 1
	output, err := start()
	if err == nil {
		status, err = run(output)
	}

	if err != nil {
		fmt.Println("guestinit:", err) // on the console, because there may be no other output
		if output != nil {
			fmt.Fprintln(output, "guestinit:", err)
		}
	}

	end(output, min(status, plan.MaxStatus))
}

// start makes the machine usable and returns the file for output.
func start() (*os.File, error) {
	for _, m := range []struct{ source, target, kind string }{
		{"proc", "/proc", "proc"},
		{"sysfs", "/sys", "sysfs"},
		{"devtmpfs", "/dev", "devtmpfs"},
		{"tmpfs", "/run", "tmpfs"},
		{"tmpfs", "/tmp", "tmpfs"},
		{"debugfs", "/sys/kernel/debug", "debugfs"},
		{"cgroup2", "/sys/fs/cgroup", "cgroup2"},
	} {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return nil, err
		}
		if err := unix.Mount(m.source, m.target, m.kind, 0, ""); err != nil {
			return nil, fmt.Errorf("mount %s: %w", m.target, err)
		}
	}

	for name, value := range map[string]string{
		"PATH": "/usr/sbin:/usr/bin", "PS1": "guest:\\w# ", "HOME": "/root", "TMPDIR": "/tmp",
	} {
		if err := os.Setenv(name, value); err != nil {
			return nil, err
		}
	}

	return os.OpenFile("/dev/ttyS1", os.O_WRONLY|unix.O_NOCTTY, 0)
}

func run(output *os.File) (status int, err error) {
	p, err := read()
	if err != nil {
		return 1, err
	}
	if err := os.Setenv(plan.GuestVariable, p.Guest); err != nil {
		return 1, err
	}

	var release unix.Utsname
	if err := unix.Uname(&release); err != nil {
		return 1, err
	}

	tell(output, plan.Event{Kind: plan.Ready, Name: unix.ByteSliceToString(release.Release[:])})
	for _, module := range p.Modules {
		if err := load(module); err != nil {
			return 1, fmt.Errorf("load %s: %w", module.File, err)
		}
	}

	if p.API {
		if err := wayToHost(); err != nil {
			return 1, err
		}
	}

	if err := networks(p.VFs); err != nil {
		return 1, err
	}
	if p.Shell {
		return shell(), nil
	}

	return runAll(output, p)
}

// runAll runs the commands. A command that leaves something behind has failed, and its traces are
// removed, so that they do not make the next command fail.
func runAll(output *os.File, p plan.Plan) (status int, err error) {
	var before state
	for _, c := range p.Commands {
		if before == nil {
			if before, err = settled(); err != nil {
				return 1, err
			}
		}

		tell(output, plan.Event{Kind: plan.Begin, Name: c.Name})
		this := command(output, c)
		left, err := leftBehind(before)
		if err == nil && len(left) > 0 {
			fmt.Fprintf(output, "guestinit: what %s left behind:\n  %s\n", c.Name,
				strings.Join(left, "\n  "))
			_ = unix.Kill(-1, unix.SIGKILL) // all processes but this one
			err, before = networks(p.VFs), nil
			this = max(this, 1)
		}

		tell(output, plan.Event{Kind: plan.End, Status: this, Name: c.Name})
		if err != nil {
			return 1, err
		}

		status = max(status, this)
	}

	return status, nil
}

func read() (plan.Plan, error) {
	content, err := os.ReadFile(plan.Path)
	if err != nil {
		return plan.Plan{}, err
	}

	var p plan.Plan
	if err := json.Unmarshal(content, &p); err != nil {
		return plan.Plan{}, fmt.Errorf("%s: %w", plan.Path, err)
	}
	return p, nil
}

func load(module plan.Module) error {
	file, err := os.Open(filepath.Join(plan.Modules, module.File))
	if err != nil {
		return err
	}
	defer file.Close()

	flags := 0
	if filepath.Ext(module.File) != ".ko" {
		flags = unix.MODULE_INIT_COMPRESSED_FILE
	}
	if err := unix.FinitModule(int(file.Fd()), module.Options, flags); err != nil &&
		!errors.Is(err, unix.EEXIST) {
		return err
	}

	return nil
}

// wayToHost sets up the NIC to the host, whose driver is loaded by now. The NIC gets its own name
// first, so that the names of other netdevs do not depend on it.
func wayToHost() error {
	found, err := await(filepath.Join("/sys/bus/virtio/drivers", plan.HostDriver, "virtio*/net/*"))
	if err != nil {
		return err
	}

	link, err := netlink.LinkByName(filepath.Base(found))
	if err != nil {
		return err
	}

	address, err := netlink.ParseAddr(plan.GuestAddress)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetName(link, plan.HostNetdev); err != nil {
		return fmt.Errorf("name netdev %s %s: %w", link.Attrs().Name, plan.HostNetdev, err)
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return fmt.Errorf("netdev %s: address %s: %w", plan.HostNetdev, address, err)
	}

	return up(plan.HostNetdev)
}

// networks sets lo and the PFs up, and makes VFs for each PF that has another number of VFs.
func networks(vfs int) error {
	pfs, err := filepath.Glob(filepath.Join(pciDevices, "*/sriov_numvfs"))
	if err != nil {
		return err
	}
	if err := up("lo"); err != nil {
		return err
	}

	for _, numVFs := range pfs {
		pf := filepath.Dir(numVFs)
		name, err := await(filepath.Join(pf, "net/*"))
		if err != nil {
			return err
		}
		if err := up(filepath.Base(name)); err != nil {
			return err
		}
		if err := makeVFs(pf, vfs); err != nil {
			return fmt.Errorf("PF %s: %w", filepath.Base(pf), err)
		}
	}

	return nil
}

func makeVFs(pf string, vfs int) error {
	file := filepath.Join(pf, "sriov_numvfs")
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}

	has := strings.TrimSpace(string(content))
	want := strconv.Itoa(vfs)
	if has == want {
		return nil
	}

	if has != "0" { // the kernel refuses a change from one number to another
		if err := os.WriteFile(file, []byte("0"), 0); err != nil {
			return err
		}
	}

	if err := os.WriteFile(file, []byte(want), 0); err != nil {
		return err
	}

	for i := range vfs {
		if _, err := await(filepath.Join(pf, fmt.Sprintf("virtfn%d/net/*", i))); err != nil {
			return err
		}
	}

	return nil
}

// await waits for the first match of a pattern, because drivers make netdevs after the device
// exists.
func await(pattern string) (string, error) {
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return "", err
		}
		if len(found) > 0 {
			return found[0], nil
		}
		if time.Now().After(end) {
			return "", fmt.Errorf("%s: none within %s: %w", pattern, patience, fs.ErrNotExist)
		}
	}
}

func up(netdev string) error {
	link, err := netlink.LinkByName(netdev)
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	if err != nil {
		return fmt.Errorf("netdev %s: %w", netdev, err)
	}
	return nil
}

func command(output *os.File, c plan.Command) (status int) {
	cmd := exec.Command(c.Args[0], c.Args[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = c.Dir, output, output
	return statusOf(output, cmd.Run())
}

// shell runs a shell on the console, with job control, and with busybox for every program that is
// missing.
func shell() (status int) {
	const busybox = "/usr/bin/busybox"
	// busybox returns an error for programs that exist already
	_ = exec.Command(busybox, "--install", "-s", "/usr/bin").Run()
	cmd := exec.Command(busybox, "setsid", "-c", "/usr/bin/bash", "--norc")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Dir = "/root"
	return statusOf(os.Stdout, cmd.Run())
}

// statusOf returns a program's exit status, as a shell reports it.
func statusOf(output *os.File, err error) int {
	if err == nil {
		return 0
	}

	fmt.Fprintln(output, err)
	exit, exited := errors.AsType[*exec.ExitError](err)
	if !exited {
		return 127
	}
	if code := exit.ExitCode(); code > 0 {
		return code
	}

	return 1 // the program was killed by a signal
}

func tell(output *os.File, e plan.Event) {
	e.Uptime = uptime()
	fmt.Fprintln(output, e)
}

func uptime() time.Duration {
	content, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0
	}

	seconds, _, _ := strings.Cut(string(content), " ")
	value, err := strconv.ParseFloat(seconds, 64)
	if err != nil {
		return 0
	}

	return time.Duration(value * float64(time.Second))
}

// end ends the machine. It first waits until the serial ports have sent all output, because QEMU
// exits at once.
func end(output *os.File, status int) {
	if output != nil {
		tell(output, plan.Event{Kind: plan.Exit, Status: status})
		_ = unix.IoctlSetInt(int(output.Fd()), unix.TCSBRK, 1) // tcdrain(3)
	}

	_ = unix.IoctlSetInt(int(os.Stdout.Fd()), unix.TCSBRK, 1)
	if port, err := os.OpenFile("/dev/port", os.O_WRONLY, 0); err == nil {
		_, _ = port.WriteAt([]byte{byte(status + plan.Offset)}, plan.Port)
	}
	// reached only on a machine without that port
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}
