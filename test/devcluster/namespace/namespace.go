// SPDX-License-Identifier: Apache-2.0

// Package namespace runs a command inside the namespaces of another process, as nsenter(1) does.
package namespace

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// kinds are entered in this order: the mount namespace last, because after it /proc is another one.
var kinds = [...]struct {
	name string
	flag int
}{
	{"pid", unix.CLONE_NEWPID},
	{"uts", unix.CLONE_NEWUTS},
	{"ipc", unix.CLONE_NEWIPC},
	{"net", unix.CLONE_NEWNET},
	{"mnt", unix.CLONE_NEWNS},
}

// The main goroutine keeps the process's first thread: that one would not end with a goroutine
// locked to it, and stay in the other namespaces, where /proc/self is then.
func init() { runtime.LockOSThread() }

// Start starts the command named by args in all namespaces of process pid. The program is looked up
// there, by the variable PATH of environment. prepare may set the rest of the command.
func Start(
	pid int, args, environment []string, path string, prepare func(*exec.Cmd),
) (*exec.Cmd, error) {
	type result struct {
		cmd *exec.Cmd
		err error
	}

	done := make(chan result)
	go func() {
		// This thread stays in the other namespaces, so it is not unlocked: it ends with the
		// goroutine.
		runtime.LockOSThread()
		cmd, err := start(pid, args, environment, path, prepare)
		done <- result{cmd, err}
	}()

	r := <-done
	return r.cmd, r.err
}

func start(
	pid int, args, environment []string, path string, prepare func(*exec.Cmd),
) (*exec.Cmd, error) {
	if err := enter(pid); err != nil {
		return nil, err
	}
	if err := os.Setenv("PATH", path); err != nil {
		return nil, err
	}

	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(environment, "PATH="+path)
	prepare(cmd)

	return cmd, cmd.Start()
}

func enter(pid int) error {
	var files [len(kinds)]*os.File
	for i, kind := range kinds {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, kind.name))
		if err != nil {
			return fmt.Errorf("namespaces of process %d: %w", pid, err)
		}
		defer f.Close()
		files[i] = f
	}

	// A mount namespace cannot be entered by a thread that shares its working directory with
	// others.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("namespaces of process %d: %w", pid, err)
	}

	for i, kind := range kinds {
		if err := unix.Setns(int(files[i].Fd()), kind.flag); err != nil {
			return fmt.Errorf("%s namespace of process %d: %w", kind.name, pid, err)
		}
	}

	return nil
}
