// SPDX-License-Identifier: Apache-2.0

// Package namespace opens and enters network namespaces that are named by paths.
package namespace

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Open opens the network namespace at a path. The caller closes it. For the path "" Open returns
// [netns.None], which stands for the namespace of the process.
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

// Do calls f on a thread that is in the network namespace. It is for actions that depend on the
// namespace of the thread, such as opening a socket or reading sysctls in /proc.
//
// If the calling thread is in the namespace already, or ns is [netns.None], f runs on the calling
// thread. Go threads are in the namespace of the process, except for those that Do has locked.
func Do(ns netns.NsHandle, f func() error) error {
	if !ns.IsOpen() || IsAt(ns, "/proc/thread-self/ns/net") {
		return f()
	}
	return onThread(ns, f)
}

// IsAt reports whether the path refers to the open namespace. It returns false if the path cannot
// be read.
func IsAt(ns netns.NsHandle, path string) bool {
	var open, at unix.Stat_t
	err := errors.Join(unix.Fstat(int(ns), &open), unix.Stat(path, &at))
	return err == nil && open.Dev == at.Dev && open.Ino == at.Ino
}

// onThread calls f on a thread that it moves to the namespace and back. A thread that cannot leave
// the namespace again stays locked to its goroutine, so that no other goroutine runs on it.
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
			runtime.UnlockOSThread() // otherwise the thread ends with this goroutine
		}

		done <- err
	}()

	return <-done
}

// New makes a network namespace without a name. The namespace ends when the caller closes it.
func New() (ns netns.NsHandle, err error) {
	here, err := netns.GetFromPath("/proc/self/ns/net")
	if err != nil {
		return netns.None(), err
	}
	defer here.Close()

	err = onThread(here, func() error {
		// netns.New moves the thread to the new namespace. onThread moves it back.
		if ns, err = netns.New(); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		return nil
	})

	return ns, err
}
