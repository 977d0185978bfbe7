// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestStart(t *testing.T) {
	if testing.Short() || os.Geteuid() != 0 {
		t.Skip("needs root to make namespaces")
	}

	other := exec.Command("sleep", "60")
	other.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWNS,
	}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})

	own, want := network(t, os.Getpid()), network(t, other.Process.Pid)
	for range 20 {
		cmd, err := Start(other.Process.Pid, []string{"sleep", "0.01"}, nil, os.Getenv("PATH"),
			func(*exec.Cmd) {})
		if err != nil {
			t.Fatal(err)
		}
		if got := network(t, cmd.Process.Pid); got != want {
			t.Errorf("the command is in %s, want %s", got, want)
		}
		if err := cmd.Wait(); err != nil {
			t.Fatal(err)
		}
	}

	if now := network(t, os.Getpid()); now != own {
		t.Errorf("the process's first thread is in %s, was in %s", now, own)
	}
}

// network returns the network namespace of a process's first thread.
func network(t *testing.T, pid int) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	return name
}
