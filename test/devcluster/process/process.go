// SPDX-License-Identifier: Apache-2.0

// Package process starts and ends the processes of a PID namespace from its PID 1.
//
// PID 1 inherits every orphan of its namespace and must reap it. os/exec would compete with that
// for the exit status of its own children. So one Table waits for all children, and every child is
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

// Table starts processes and reaps all children of this process, started and inherited ones. A
// process must have only one Table. It is safe for concurrent use.
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

// NewTable returns a Table that reaps children until ctx ends.
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

// Start starts cmd. The caller must not call its Wait. The output of cmd must go to files, because
// a pipe would need Wait.
func (t *Table) Start(name string, cmd *exec.Cmd) (*Process, error) {
	// The lock is held until the child is registered, so that reap cannot miss a child that ends at
	// once.
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

// Run starts cmd, waits for its end, and returns an error unless it exits with 0. When ctx ends,
// the process is killed.
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

// Done returns a channel that is closed when the process has ended and has been reaped.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the process is running.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Err returns how the process ended, or nil while it runs.
func (p *Process) Err() error {
	if p.Running() {
		return nil
	}
	if p.status.Signaled() {
		return fmt.Errorf("%s: killed by %s", p.Name, unix.SignalName(p.status.Signal()))
	}
	return fmt.Errorf("%s: exited with %d", p.Name, p.status.ExitStatus())
}

// Signal sends a signal if the process is running.
func (p *Process) Signal(s syscall.Signal) {
	// Under the lock nothing is reaped, so the PID cannot be reused.
	p.table.mu.Lock()
	defer p.table.mu.Unlock()
	if p.Running() {
		// It fails for a zombie, which has ended anyway.
		_ = syscall.Kill(p.PID, s)
	}
}

// Stop ends the process with SIGTERM, and after grace with SIGKILL. It returns when the process has
// ended.
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
