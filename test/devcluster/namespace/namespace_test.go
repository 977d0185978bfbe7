// SPDX-License-Identifier: Apache-2.0

package namespace

import (
	"errors"
	"fmt"
	"io"
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
		if got := networkOfCommand(t, other.Process.Pid); got != want {
			t.Errorf("the command is in %s, want %s", got, want)
		}
	}

	if now := network(t, os.Getpid()); now != own {
		t.Errorf("the process's first thread is in %s, was in %s", now, own)
	}
}

// networkOfCommand runs a command in the namespaces of process pid and returns its network namespace.
// The command runs until its standard input is closed, because a process that has ended is in no
// namespace. It is always waited for, because a PID namespace does not end before its last process
// is reaped.
func networkOfCommand(t *testing.T, pid int) string {
	t.Helper()
	var input io.Closer
	cmd, err := Start(pid, []string{"cat"}, nil, os.Getenv("PATH"), func(cmd *exec.Cmd) {
		var err error
		if input, err = cmd.StdinPipe(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(input.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	}()

	return network(t, cmd.Process.Pid)
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
