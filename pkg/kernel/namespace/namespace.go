// SPDX-License-Identifier: Apache-2.0

// Package namespace works in network namespaces that are named by paths.
package namespace

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Open opens the network namespace at a path, which the caller closes. For "" it returns
// [netns.None]: the process's own.
func Open(path string) (netns.NsHandle, error) {
	if path == "" {
		return netns.None(), nil
	}
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return netns.None(), fmt.Errorf("network namespace %s: %w", path, err)
	}
	return ns, nil
}

// Do calls f on a thread in the namespace, for what depends on the thread's namespace: where a
// socket is opened, or whose sysctls /proc shows. The caller's thread does for the process's own
// namespace, because every thread is in it that a goroutine of a Do has not locked.
func Do(ns netns.NsHandle, f func() error) error {
	if !ns.IsOpen() || IsAt(ns, "/proc/thread-self/ns/net") {
		return f()
	}
	return onThread(ns, f)
}

// IsAt says whether the path is one of the open namespace. A path that cannot be looked at is not.
func IsAt(ns netns.NsHandle, path string) bool {
	var open, at unix.Stat_t
	err := errors.Join(unix.Fstat(int(ns), &open), unix.Stat(path, &at))
	return err == nil && open.Dev == at.Dev && open.Ino == at.Ino
}

// onThread calls f on a thread that it sends to the namespace and back. A thread that cannot leave
// the namespace again is not used any more.
func onThread(ns netns.NsHandle, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		own, err := netns.Get()
		if err == nil {
			defer own.Close()
			err = netns.Set(ns)
		}

		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("enter network namespace: %w", err)
			return
		}

		err = f()
		if netns.Set(own) == nil {
			runtime.UnlockOSThread() // else the thread ends with this goroutine
		}

		done <- err
	}()

	return <-done
}

// New makes a network namespace that has no name, which ends when the caller closes it.
func New() (ns netns.NsHandle, err error) {
	here, err := netns.GetFromPath("/proc/self/ns/net")
	if err != nil {
		return netns.None(), err
	}
	defer here.Close()

	err = onThread(here, func() error {
		// the thread is in the new namespace then, and leaves it
		if ns, err = netns.New(); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		return nil
	})

	return ns, err
}
