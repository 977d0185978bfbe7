// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWithoutReader: a test goes on to delete what it has made when its terminal is closed, and
// when the reader of its output is gone. Under nohup(1), which ignores SIGHUP, the test goes on whole.
func TestWithoutReader(t *testing.T) {
	isIgnored := signal.Ignored(syscall.SIGHUP)
	ctx, stop := withoutReader(t.Context())
	defer stop()

	if err := writeToClosedPipe(t); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("writing into a closed pipe: %v, want EPIPE", err)
	}

	must.Succeed(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	if !isIgnored {
		<-ctx.Done()
	} else if ctx.Err() != nil {
		t.Error("the test is ended by a signal that is ignored")
	}
}

// writeToClosedPipe writes to the standard output while it is a pipe that nobody reads.
func writeToClosedPipe(t *testing.T) error {
	t.Helper()
	reader, writer, err := os.Pipe()
	must.Succeed(t, err)
	must.Succeed(t, reader.Close())
	was, err := unix.Dup(unix.Stdout)
	must.Succeed(t, err)

	must.Succeed(t, unix.Dup3(int(writer.Fd()), unix.Stdout, 0))
	_, written := fmt.Fprintln(os.Stdout, "ok")
	must.Succeed(t, unix.Dup3(was, unix.Stdout, 0))
	must.Succeed(t, errors.Join(unix.Close(was), writer.Close()))
	return written
}
