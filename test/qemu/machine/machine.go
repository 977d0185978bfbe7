// SPDX-License-Identifier: Apache-2.0

// Package machine runs a guest under QEMU: a PC with emulated igb cards, each with an SR-IOV PF,
// and without a network to the outside. The processor is emulated too, so that the guest runs the
// same on every machine.
package machine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Machine describes a guest before it runs.
type Machine struct {
	Root      debian.Root // QEMU, firmware and kernel
	Initramfs string      // path
	Cards     int         // number of igb cards, all on one wire
	MemoryMiB int
	// Processors is 1 except for a guest with many VFs. With two processors, one boot in a hundred
	// was seen to hang. With one, the last of 56 VFs could not be set up (ENOSPC), probably because
	// a processor has some 200 interrupt vectors.
	Processors int
	// Forward is a command that is run for each connection of the guest to plan.APIAddress, with
	// the connection as standard input and output. If it is empty, the guest has no NIC for that.
	Forward []string
	// Console is the file to which the kernel's messages are written. If it is "", they go to the
	// terminal.
	Console string
	// Boot bounds the time until process 1 of the guest runs, and Silence the time from each event
	// to the next. There is no bound for the whole guest, because its work and the machine's load
	// differ.
	Boot, Silence time.Duration
}

// Errors of a guest that does not end by itself.
var (
	ErrNoBoot = errors.New("the guest did not boot")
	ErrHangs  = errors.New("the guest hangs")
)

// Run runs the guest and returns its exit status. It passes each line of the commands' output, and
// of the events, to line. If the guest does not end by itself, the error has its last output.
func (m Machine) Run(ctx context.Context, line func(string)) (status int, err error) {
	command, err := m.command()
	if err != nil {
		return 0, err
	}

	c, err := newControl(m.Cards)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.close()) }()

	command = append(command, c.args()...)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	w := &watch{line: line, last: "nothing"}
	w.late = time.AfterFunc(m.Boot, func() {
		cancel(fmt.Errorf("%w within %s", ErrNoBoot, m.Boot))
	})
	w.listen = func() *time.Timer {
		return time.AfterFunc(m.Silence, func() {
			cancel(fmt.Errorf("%w: no event for %s", ErrHangs, m.Silence))
		})
	}
	defer func() { w.late.Stop() }()

	said, err := m.run(ctx, command, w)
	if cause := context.Cause(ctx); cause != nil {
		return 0, fmt.Errorf("%w: the last that it told of is %q%s", cause, w.last, m.messages())
	}

	var code int
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil {
		return 0, err
	}

	status, ok := plan.Status(code)
	if !ok {
		return 0, fmt.Errorf("QEMU ended with status %d, not by the guest: the last that it told "+
			"of is %q%s\n%s",
			code, w.last, m.messages(), said)
	}

	return status, nil
}

// run runs QEMU with the guest's second serial port as standard output, and returns QEMU's own
// messages. QEMU does not outlive this process, because the kernel kills QEMU with the thread that
// started it. Therefore this thread must not end before QEMU.
func (m Machine) run(ctx context.Context, command []string, w *watch) (said string, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "QEMU_MODULE_DIR="+m.Root.Path("/usr/lib/x86_64-linux-gnu/qemu"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 10 * time.Second // for processes of Forward, which share its standard error
	if m.Console == "" {
		w.late.Stop() // a person watches
		cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
		err := cmd.Run()
		return stderr.String(), err
	}

	output, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}

	err = w.read(output)
	err = errors.Join(cmd.Wait(), err)
	return stderr.String(), err
}

// messages returns the last messages of the kernel.
func (m Machine) messages() string {
	content, err := os.ReadFile(m.Console)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(content)), "\n")
	return fmt.Sprintf("\nEnd of %s:\n%s", m.Console,
		strings.Join(lines[max(0, len(lines)-20):], "\n"))
}

// watch passes on the output of a guest.
type watch struct {
	line   func(string)
	late   *time.Timer        // fires if the guest does not boot or hangs
	listen func() *time.Timer // starts the time until the next event
	last   string
}

// heard notes an event.
func (w *watch) heard(e plan.Event) {
	w.late.Stop()
	w.late = w.listen()
	w.last = strings.TrimSpace(fmt.Sprintf("%s %s", e.Kind, e.Name))
}

func (w *watch) read(from io.Reader) error {
	reader := bufio.NewReader(from)
	for {
		text, err := reader.ReadString('\n')
		if text = strings.TrimRight(text, "\r\n"); text != "" {
			if e, ok := plan.ParseEvent(text); ok {
				w.heard(e)
			}
			w.line(text)
		}

		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (m Machine) command() ([]string, error) {
	release, err := m.Root.Kernel()
	if err != nil {
		return nil, err
	}

	// panic=-1 with -no-reboot ends QEMU at once. PCI devices keep the kernel's names eth0, eth1,
	// ...
	kernel := "console=ttyS0 panic=-1 net.ifnames=0 mitigations=off intel_iommu=on quiet"
	if khz := timestampKHz("/proc/cpuinfo"); khz > 0 {
		// Under load the guest would measure a wrong rate.
		kernel += fmt.Sprintf(" tsc_early_khz=%d", khz)
	}

	args := []string{
		"-L", m.Root.Path("/usr/share/qemu"), "-L", m.Root.Path("/usr/share/seabios"),
		"-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max",
		"-smp", strconv.Itoa(m.Processors), "-m", strconv.Itoa(m.MemoryMiB),
		"-object", fmt.Sprintf("memory-backend-ram,id=memory0,size=%dM", m.MemoryMiB-farMiB),
		"-object", fmt.Sprintf("memory-backend-ram,id=memory1,size=%dM", farMiB),
		"-numa", fmt.Sprintf("node,nodeid=0,cpus=0-%d,memdev=memory0", m.Processors-1),
		"-numa", "node,nodeid=1,memdev=memory1",
		"-nodefaults", "-display", "none", "-vga", "none", "-no-reboot",
		"-device", fmt.Sprintf("isa-debug-exit,iobase=%#x,iosize=1", plan.Port),
		"-device", "intel-iommu,intremap=off",
		"-kernel", m.Root.Path("/boot/vmlinuz-" + release), "-initrd", m.Initramfs,
		"-append", kernel,
	}

	if m.Console == "" {
		args = append(args, "-serial", "mon:stdio", "-serial", "null")
	} else {
		args = append(args, "-serial", "file:"+m.Console, "-serial", "stdio")
	}

	args = append(args, m.cards()...)
	return m.Root.Command("/usr/bin/qemu-system-x86_64", append(args, m.forward()...)...), nil
}

// farMiB is the memory of the second NUMA node, which has no processor, in MiB.
const farMiB = 128

// cards returns igb cards, each in a slot of its own, so that its PF is the only function of its
// bus. The first card is 0000:01:00.0. If there are several, the last card is 0000:21:00.0, at a
// root complex of NUMA node 1.
func (m Machine) cards() []string {
	args := []string{"-device", "pxb-pcie,id=far,bus_nr=32,bus=pcie.0,numa_node=1"}
	for i := range m.Cards {
		bus := "pcie.0"
		if i > 0 && i == m.Cards-1 {
			bus = "far"
		}

		properties := card(i)
		device := properties["driver"]
		for _, name := range slices.Sorted(maps.Keys(properties)) {
			if name != "driver" {
				device += "," + name + "=" + properties[name]
			}
		}

		args = append(args,
			"-device", fmt.Sprintf("pcie-root-port,bus=%s,id=slot%d,chassis=%d,slot=%d", bus,
				i, i+1, i+1),
			"-netdev", fmt.Sprintf("hubport,hubid=0,id=wire%d", i), "-device", device,
		)
	}

	return args
}

// card returns the properties of a card's device.
func card(i int) map[string]string {
	return map[string]string{
		"driver": "igb", "id": fmt.Sprintf("card%d", i), "bus": fmt.Sprintf("slot%d", i),
		"netdev": fmt.Sprintf("wire%d", i),
		"mac":    fmt.Sprintf("52:54:00:aa:00:%02x", i+1), "romfile": "",
	}
}

// forward returns the NIC that leads to plan.APIAddress and nowhere else. A command for each
// connection, as with -cmd here, keeps connections apart; other kinds of guestfwd have one for all.
func (m Machine) forward() []string {
	if len(m.Forward) == 0 {
		return nil
	}

	var command []string
	for _, word := range m.Forward {
		// QEMU parses the text as an option, where a comma is written twice. Then GLib parses it as
		// a shell does.
		word = strings.ReplaceAll(word, ",", ",,")
		command = append(command, "'"+strings.ReplaceAll(word, "'", `'\''`)+"'")
	}

	way := fmt.Sprintf("guestfwd=tcp:%s-cmd:%s", plan.APIAddress, strings.Join(command, " "))
	return []string{
		"-netdev", "user,id=host,ipv6=off,restrict=on," + way,
		"-device", "virtio-net-pci,bus=pcie.0,netdev=host,romfile=",
	}
}

// timestampKHz returns the rate of this machine's time stamp counter, which a guest sees, or 0 if
// it is unknown.
func timestampKHz(cpuinfo string) int {
	content, err := os.ReadFile(filepath.Clean(cpuinfo))
	if err != nil {
		return 0
	}

	for line := range strings.Lines(string(content)) {
		name, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "bogomips" {
			continue
		}

		// Each tick has two loops: arch/x86/kernel/cpu/proc.c and init_tsc of
		// arch/x86/kernel/tsc.c.
		bogomips, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return 0
		}

		return int(bogomips / 2 * 1000)
	}

	return 0
}
