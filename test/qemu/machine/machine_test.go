// SPDX-License-Identifier: Apache-2.0

package machine_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opiproject/xpu-device-plugin/test/qemu/debian"
	"github.com/opiproject/xpu-device-plugin/test/qemu/machine"
)

// fake returns a machine whose QEMU is a shell script, in the place of the dynamic linker that runs
// QEMU.
func fake(t *testing.T, script string) machine.Machine {
	t.Helper()
	root := debian.Root(t.TempDir())
	for name, content := range map[string]string{
		"/boot/vmlinuz-6.12.1-amd64":                     "",
		"/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2": "#!/bin/sh\n" + script,
	} {
		if err := os.MkdirAll(filepath.Dir(root.Path(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root.Path(name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}

	console := filepath.Join(t.TempDir(), "console.log")
	if err := os.WriteFile(console, []byte("a kernel's last words\n"), 0o644); err != nil {
		t.Fatal(err)
	}

	return machine.Machine{
		Root: root, Initramfs: "image", Cards: 2, MemoryMiB: 512, Processors: 1,
		Console: console, Boot: time.Minute, Silence: time.Minute,
	}
}

func TestRun(t *testing.T) {
	const short = 50 * time.Millisecond
	for _, test := range []struct {
		name        string
		script      string
		boot, quiet time.Duration // 0 means a minute
		status      int
		err         []string // texts that the error must contain
		is          error
	}{
		{name: "success", script: "echo '@@ ready 0 1 6.12'; exit 33"},
		{name: "guest's status", script: "echo '@@ exit 7 1 '; exit 47", status: 7},
		{name: "QEMU fails", script: "echo no such device >&2; exit 1",
			err: []string{"status 1, not by the guest", "no such device", "a kernel's last words"}},
		{name: "power off", script: "echo '@@ begin 0 1 link'; exit 0",
			err: []string{"status 0, not by the guest", "begin link"}},
		{name: "no boot", script: "echo no event; exec sleep 60", boot: short,
			is:  machine.ErrNoBoot,
			err: []string{"did not boot within 50ms", "nothing", "a kernel's last words"}},
		{name: "hangs", script: "echo '@@ ready 0 1 6.12'; echo '@@ begin 0 1 link'; exec sleep 60",
			quiet: 2 * time.Second,
			is:    machine.ErrHangs, err: []string{"no event for 2s", "begin link"}},
		{name: "works for longer than it may be silent",
			script: "for i in 1 2 3 4 5 6; do echo \"@@ end 0 $i\"; sleep 0.5; done; exit 33",
			quiet:  2 * time.Second},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m := fake(t, test.script)
			if test.boot > 0 {
				m.Boot = test.boot
			}

			if test.quiet > 0 {
				m.Silence = test.quiet
			}

			status, err := m.Run(t.Context(), func(string) {})
			if len(test.err) == 0 {
				if err != nil || status != test.status {
					t.Fatalf("status %d, %v; want %d", status, err, test.status)
				}
				return
			}

			for _, part := range test.err {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("error %v, want one with %q", err, part)
				}
			}

			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %v is not %q", err, test.is)
			}
		})
	}
}

func TestRunIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := fake(t, "echo '@@ ready 0 1 6.12'; exec sleep 60").Run(ctx, func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// TestCommandLine checks the devices of the guest.
func TestCommandLine(t *testing.T) {
	m := fake(t, `printf '%s\n' "$@"; exit 33`)
	m.Forward = []string{"/a path/it's,here", "pipe"}
	var args []string
	if _, err := m.Run(t.Context(), func(arg string) { args = append(args, arg) }); err != nil {
		t.Fatal(err)
	}

	for _, want := range []string{
		m.Root.Path("/usr/bin/qemu-system-x86_64"), m.Root.Path("/boot/vmlinuz-6.12.1-amd64"),
		"tcg,thread=multi",
		"igb,bus=slot1,id=card1,mac=52:54:00:aa:00:02,netdev=wire1,romfile=", "file:" + m.Console,
		`user,id=host,ipv6=off,restrict=on,guestfwd=tcp:10.0.2.100:6443-cmd:'/a path/it'\''s,,here' 'pipe'`,
	} {
		if !slices.Contains(args, want) {
			t.Errorf("no argument %q in %q", want, args)
		}
	}
}
