// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// inScratch calls do with the path of a new network namespace, which ends with the call. The
// namespace belongs to a thread, so that a killed process leaves nothing mounted.
func inScratch(ctx context.Context, do func(ctx context.Context, path string) error) error {
	path, made, done := "", make(chan error, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", unix.Getpid(), unix.Gettid())
		made <- err
		<-done
	}()

	defer close(done)

	if err := <-made; err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}

	return do(ctx, path)
}
