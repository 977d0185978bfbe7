// SPDX-License-Identifier: Apache-2.0

// Package process starts and ends the processes of a PID namespace from its PID 1.
//
// PID 1 inherits every orphan of its namespace and must reap it; os/exec would race with that for
// the exit status of its own children. So one Table waits for all of them, and every child is
// started through it.
package process

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Table starts processes and reaps all children of this process, its own and inherited ones. Make
// one per process. It is safe for concurrent use.
type Table struct {
	mu       sync.Mutex
	children map[int]*Process
}

// Process is a child of this process.
type Process struct {
	Name string
	PID  int

	table *Table
	done  chan struct{}
	// status is written before done is closed.
	status syscall.WaitStatus
}

// NewTable starts reaping; it ends with ctx.
func NewTable(ctx context.Context) *Table {
	t := &Table{children: map[int]*Process{}}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGCHLD)

	go func() {
		defer signal.Stop(signals)
		for {
			t.reap()
			select {
			case <-ctx.Done():
				return
			case <-signals:
			}
		}
	}()

	return t
}

// Start starts cmd, whose Wait must not be called. Output goes where cmd says: it must be files,
// because a pipe would need Wait.
func (t *Table) Start(name string, cmd *exec.Cmd) (*Process, error) {
	// The lock is held until the child is known, so that reap cannot miss one that ends at once.
	t.mu.Lock()
	defer t.mu.Unlock()

	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}

	p := &Process{Name: name, PID: cmd.Process.Pid, table: t, done: make(chan struct{})}
	t.children[p.PID] = p
	if err := cmd.Process.Release(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}

	return p, nil
}

// Run starts cmd, waits for its end and returns an error unless it exited with 0. When ctx ends the
// process is killed.
func (t *Table) Run(ctx context.Context, name string, cmd *exec.Cmd) error {
	p, err := t.Start(name, cmd)
	if err != nil {
		return err
	}

	select {
	case <-p.Done():
	case <-ctx.Done():
		p.Signal(syscall.SIGKILL)
		<-p.Done()
		return fmt.Errorf("%s: %w", name, context.Cause(ctx))
	}

	if p.status.ExitStatus() != 0 {
		return p.Err()
	}

	return nil
}

func (t *Table) reap() {
	t.mu.Lock()
	defer t.mu.Unlock()

	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}

		if p := t.children[pid]; p != nil {
			delete(t.children, pid)
			p.status = status
			close(p.done)
		}
	}
}

// Done is closed when the process has ended and is reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running tells whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Err says how the process ended; nil while it runs.
func (p *Process) Err() error {
	if p.Running() {
		return nil
	}
	if p.status.Signaled() {
		return fmt.Errorf("%s: killed by %s", p.Name, unix.SignalName(p.status.Signal()))
	}
	return fmt.Errorf("%s: exited with %d", p.Name, p.status.ExitStatus())
}

// Signal sends a signal unless the process has ended.
func (p *Process) Signal(s syscall.Signal) {
	// Under the lock nothing is reaped, and the number of a process that is not reaped is no
	// other's.
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	if p.Running() {
		// It fails for a process that has ended and waits to be reaped: what was wanted.
		_ = syscall.Kill(p.PID, s)
	}
}

// Stop ends the process: with SIGTERM and, after grace, with SIGKILL. It returns when the process
// is gone.
func (p *Process) Stop(grace time.Duration) {
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
		return
	case <-time.After(grace):
	}
	p.Signal(syscall.SIGKILL)
	<-p.done
}
