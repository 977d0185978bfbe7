// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Leader identifies the supervisor of a cluster, PID 1 of its PID namespace, uniquely even if its
// PID is reused.
type Leader struct {
	PID    int    `json:"pid"`    // in the machine's PID namespace
	Start  uint64 `json:"start"`  // clock ticks since boot (proc_pid_stat(5), starttime)
	BootID string `json:"bootID"` // /proc/sys/kernel/random/boot_id
}

// NewLeader returns the identity of a running process.
func NewLeader(pid int) (Leader, error) {
	start, err := startTime(pid)
	if err != nil {
		return Leader{}, err
	}

	boot, err := bootID()
	if err != nil {
		return Leader{}, err
	}
	return Leader{PID: pid, Start: start, BootID: boot}, nil
}

// Alive reports whether the process is running.
func (l Leader) Alive() bool {
	fd, err := l.open()
	if err != nil {
		return false
	}
	unix.Close(fd)
	return true
}

// errGone is returned for a process that has ended.
var errGone = errors.New("process has ended")

// Kill kills the process, upon which the kernel kills every process of its PID namespace. It
// returns when all have ended.
func (l Leader) Kill(ctx context.Context) error {
	fd, err := l.open()
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)

	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil &&
		!errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", l.PID, err)
	}

	// A pidfd becomes readable when its process ends. PID 1 ends after the rest of its namespace.
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("process %d does not end: %w", l.PID, err)
		}

		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("process %d: %w", l.PID, err)
		}
		if n > 0 {
			return nil
		}
	}
}

// open returns a pidfd of the process, or errGone. It checks the identity after it has the pidfd,
// so that the pidfd cannot belong to another process.
func (l Leader) open() (int, error) {
	if l.PID <= 1 {
		return 0, errGone
	}

	boot, err := bootID()
	if err != nil {
		return 0, err
	}
	if boot != l.BootID {
		return 0, errGone
	}

	fd, err := unix.PidfdOpen(l.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return 0, errGone
	}
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", l.PID, err)
	}

	start, err := startTime(l.PID)
	if err != nil || start != l.Start {
		unix.Close(fd)
		return 0, errGone
	}

	return fd, nil
}

func bootID() (string, error) {
	content, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(content)), err
}

func startTime(pid int) (uint64, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}

	start, dead, err := parseStat(string(content))
	if err != nil {
		return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	if dead {
		return 0, errGone
	}

	return start, nil
}

// parseStat parses the fields of proc_pid_stat(5) that identify a process. The second field, the
// program's name in parentheses, may contain any characters, including spaces and parentheses.
func parseStat(stat string) (start uint64, dead bool, err error) {
	_, rest, ok := cutLast(stat, ")")
	fields := strings.Fields(rest)
	const state, startTime = 3, 22 // numbered from 1, like in the manual page
	if !ok || len(fields) <= startTime-3 {
		return 0, false, fmt.Errorf("unexpected content %q", stat)
	}

	start, err = strconv.ParseUint(fields[startTime-3], 10, 64)
	if err != nil {
		return 0, false, err
	}

	return start, fields[state-3] == "Z" || fields[state-3] == "X", nil
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}
