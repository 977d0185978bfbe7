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

// kinds lists the namespaces in the order of entering. The mount namespace comes last, because
// /proc changes with it.
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

// The main goroutine is locked to the process's first thread. That thread does not end with a
// goroutine, so another goroutine on it would leave it in the other namespaces, where /proc/self
// would then be.
func init() { runtime.LockOSThread() }

// Start starts the command named by args in all namespaces of process pid. The program is looked up
// there, in the PATH of environment. prepare may set further fields of the command.
func Start(
	pid int, args, environment []string, path string, prepare func(*exec.Cmd),
) (*exec.Cmd, error) {
	type result struct {
		cmd *exec.Cmd
		err error
	}

	done := make(chan result)
	go func() {
		// The thread is not unlocked, so that it ends with the goroutine instead of being reused in
		// the other namespaces.
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

	// A thread that shares its working directory with others cannot enter a mount namespace.
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
