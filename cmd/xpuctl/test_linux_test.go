// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWithoutReader: a test goes on to delete what it has made when its terminal is closed, and
// when the reader of its output is gone.
func TestWithoutReader(t *testing.T) {
	ctx, stop := withoutReader(t.Context())
	defer stop()

	if err := writeToClosedPipe(t); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("writing into a closed pipe: %v, want EPIPE", err)
	}

	must.Succeed(t, syscall.Kill(os.Getpid(), syscall.SIGHUP))
	<-ctx.Done()
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
