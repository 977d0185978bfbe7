package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// xpuNS is the xPU's network namespace.
type xpuNS struct {
	path  string
	close func() error
}

// openXPU returns the namespace at the path, which it makes and binds to the path if nothing is there; a namespace
// without a file if path is "". close takes away what was made.
func openXPU(path string) (xpuNS, error) {
	if path != "" {
		ns, err := netns.GetFromPath(path)
		if err == nil {
			return xpuNS{path, func() error { return nil }}, ns.Close()
		}
		if !errors.Is(err, os.ErrNotExist) {
			return xpuNS{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	ns, err := newNetNS()
	if err != nil {
		return xpuNS{}, err
	}
	own := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), int(ns))
	if path == "" {
		return xpuNS{own, ns.Close}, nil
	}
	defer ns.Close()
	if err := pin(own, path); err != nil {
		return xpuNS{}, fmt.Errorf("%s: %w", path, err)
	}
	return xpuNS{path, func() error { return unpin(path) }}, nil
}

func pin(from, path string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path, nil, 0o400); err != nil {
		return err
	}
	if err := unix.Mount(from, path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("bind: %w", err), os.Remove(path))
	}
	return nil
}

func unpin(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	return os.Remove(path)
}

// newNetNS makes a network namespace with its loopback up, without entering it.
func newNetNS() (netns.NsHandle, error) {
	type result struct {
		ns  netns.NsHandle
		err error
	}
	done := make(chan result)
	go func() {
		// The thread is in the new namespace afterwards and ends with this goroutine, because it stays locked.
		runtime.LockOSThread()
		ns, err := netns.New()
		done <- result{ns, err}
	}()
	r := <-done
	if r.err != nil {
		return netns.None(), r.err
	}
	if err := loopbackUp(r.ns); err != nil {
		return netns.None(), errors.Join(err, r.ns.Close())
	}
	return r.ns, nil
}

func loopbackUp(ns netns.NsHandle) error {
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer handle.Close()
	lo, err := handle.LinkByName("lo")
	if err != nil {
		return err
	}
	return handle.LinkSetUp(lo)
}
