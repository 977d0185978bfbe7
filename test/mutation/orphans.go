// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// adoptOrphans makes this process the parent of the programs that killed tests leave behind.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the parent of orphans: %w", err)
	}
	return nil
}

// endOrphans kills all children of this process and waits for their end. No command of this process
// may be running.
func endOrphans() error {
	for {
		children, err := childrenOf(os.Getpid())
		if len(children) == 0 || err != nil {
			return err
		}

		for _, pid := range children {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
			if _, err := unix.Wait4(pid, nil, 0, nil); err != nil && !errors.Is(err, unix.ECHILD) {
				return fmt.Errorf("wait for %d: %w", pid, err)
			}
		}
	}
}

// childrenOf returns the processes whose parent a process is. The fields of /proc/PID/stat are in
// proc_pid_stat(5): the parent is the second one after the name, which is in parentheses.
func childrenOf(parent int) (children []int, err error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}

		_, rest, _ := strings.Cut(string(text[strings.LastIndexByte(string(text), ')')+1:]), " ")
		fields := strings.Fields(rest)
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil || len(fields) < 2 {
			continue
		}
		if fields[1] == strconv.Itoa(parent) {
			children = append(children, pid)
		}
	}

	return children, err
}
