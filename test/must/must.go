// SPDX-License-Identifier: Apache-2.0

// Package must ends a test where what it builds upon fails.
package must

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Succeed ends the test if there is an error.
func Succeed(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// patience is how long a test waits for what should come soon. A machine may have other work.
const patience = time.Minute

// Eventually waits until the condition holds, and ends the test if that is not soon.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true,
		func(context.Context) (bool, error) { return condition(), nil })
	if err != nil {
		t.Fatalf("%s: not within %s: %v", what, patience, err)
	}
}

// EventuallySucceed waits until the check returns no error, and ends the test with its last error
// if that is not soon.
func EventuallySucceed(t testing.TB, what string, check func() error) {
	t.Helper()
	// Helpers of a cleanup wait, too, when the context of the test has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	defer cancel()

	if err := Retry(ctx, check); err != nil {
		t.Fatalf("%s: not within %s: %v", what, patience, err)
	}
}

// Retry repeats the check until it returns no error. If ctx ends, it returns the last error.
func Retry(ctx context.Context, check func() error) (last error) {
	_ = wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true,
		func(context.Context) (bool, error) {
			last = check()
			return last == nil, nil
		})
	return last
}

// Run runs something until stop is called, or else until the test ends. It must then return without
// an error.
func Run(t testing.TB, run func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()

	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
	})

	t.Cleanup(stop)
	return stop
}

// SocketDir makes a directory that is removed when the test ends. Its name is short enough for
// sockets in it, whose paths may have 107 bytes only (unix(7)); [testing.T.TempDir] gives longer ones.
func SocketDir(t testing.TB) string {
	t.Helper()
	return dir(t, "")
}

// MemoryDir makes a directory on a file system in memory, as sysfs is; on disk where there is no
// /dev/shm. It is removed when the test ends.
func MemoryDir(t testing.TB) string {
	t.Helper()
	if _, err := os.Stat("/dev/shm"); err != nil {
		return t.TempDir()
	}
	return dir(t, "/dev/shm")
}

func dir(t testing.TB, parent string) string {
	t.Helper()
	dir, err := os.MkdirTemp(parent, "xpu")
	Succeed(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // what ends with the test may still write
	return dir
}
