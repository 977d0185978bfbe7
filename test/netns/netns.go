// SPDX-License-Identifier: Apache-2.0

// Package netns gives tests their own network namespaces, so that they use the kernel's real
// netlink without touching the machine. It is for tests only and needs CAP_SYS_ADMIN and
// CAP_NET_ADMIN.
package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/needs"
)

// Namespace is a network namespace that lives until its test ends. Only its loopback interface is
// up. Its methods may be called concurrently.
type Namespace struct {
	path   string
	ns     vnetns.NsHandle
	handle *netlink.Handle
}

// New makes a network namespace and removes it when the test ends. If the process may not make
// namespaces, New skips the test with the reason.
func New(t testing.TB) *Namespace {
	t.Helper()
	needs.Root(t, "to make a network namespace")

	n, err := Make(filepath.Join(t.TempDir(), "netns"))
	if errors.Is(err, unix.EPERM) {
		t.Skipf("may not make a network namespace here (CAP_SYS_ADMIN is needed): %v", err)
	}

	if err != nil {
		t.Fatal(err)
	}

	// The cleanup is registered after TempDir, so it runs before the directory is removed.
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})

	return n
}

// Current returns the network namespace of the process, which outlives the test. No other goroutine
// may be in [Namespace.Do] meanwhile, because it may be on the process's main thread.
func Current(t testing.TB) *Namespace {
	t.Helper()
	n := &Namespace{path: "/proc/self/ns/net"}
	var err error
	if n.ns, err = vnetns.GetFromPath(n.path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.ns.Close() })

	if n.handle, err = netlink.NewHandleAt(n.ns, unix.NETLINK_ROUTE); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.handle.Close() })

	return n
}

// Make makes a network namespace and binds it to a new file at path. The caller must call Close.
func Make(path string) (_ *Namespace, err error) {
	n := &Namespace{path: path, ns: vnetns.None()}
	if err := create(path); err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}

	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()

	if n.ns, err = vnetns.GetFromPath(path); err != nil {
		return nil, fmt.Errorf("network namespace %s: %w", path, err)
	}
	if n.handle, err = netlink.NewHandleAt(n.ns, unix.NETLINK_ROUTE); err != nil {
		return nil, fmt.Errorf("network namespace %s: netlink: %w", path, err)
	}

	lo, err := n.handle.LinkByName("lo")
	if err == nil {
		err = n.handle.LinkSetUp(lo)
	}
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: lo: %w", path, err)
	}

	return n, nil
}

// Close releases the namespace. It ends when no process, socket or file holds it.
func (n *Namespace) Close() error {
	if n.handle != nil {
		_ = n.handle.Close()
	}

	if n.ns.IsOpen() {
		_ = n.ns.Close()
	}

	// MNT_DETACH also succeeds while the mount is in use.
	if err := n.Unmount(); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("network namespace: %w", err)
	}

	return nil
}

// create makes a network namespace and binds it to path, as container runtimes do. The thread
// returns to its former namespace. Abandoning the thread is not enough: a thread ends with its
// locked goroutine, but the process's first thread does not, and would keep the new namespace, and
// the netdevs in it, until the process ends.
func create(path string) (err error) {
	if err := os.WriteFile(path, nil, 0o400); err != nil {
		return err
	}

	runtime.LockOSThread()
	old, err := vnetns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("current network namespace: %w", err)
	}
	defer old.Close()

	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("unshare: %w", err)
	}

	defer func() {
		if back := vnetns.Set(old); back != nil {
			// The goroutine stays locked to the thread, so that no other goroutine ever runs on it.
			err = errors.Join(err, fmt.Errorf("leave the new network namespace: %w", back))
			return
		}
		runtime.UnlockOSThread()
	}()

	own := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
	if err := unix.Mount(own, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", path, err)
	}

	return nil
}

// Path returns the file to which the namespace is bound. A runtime passes it to a CNI plugin as
// CNI_NETNS.
func (n *Namespace) Path() string { return n.path }

// Handle returns a netlink handle that works in the namespace from every thread. It is closed when
// the test ends.
func (n *Namespace) Handle() *netlink.Handle { return n.handle }

// Fd returns a file descriptor of the namespace, valid until the test ends. It is for
// [netlink.Handle.LinkSetNsFd], [netlink.NsFd] and the like.
func (n *Namespace) Fd() int { return int(n.ns) }

// Do runs f in the namespace, on the caller's goroutine (so f may call t.Fatal), and returns its
// error. The sockets that f opens stay in the namespace, and the processes that f starts run there.
// The goroutines that f starts do not. Calls may be nested.
func (n *Namespace) Do(f func() error) error { return do(n.ns, n.path, f) }

// In does the same as [Namespace.Do] for the namespace that is bound to path.
func In(path string, f func() error) error {
	ns, err := vnetns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", path, err)
	}
	defer ns.Close()
	return do(ns, path, f)
}

func do(ns vnetns.NsHandle, path string, f func() error) (err error) {
	runtime.LockOSThread()
	old, err := vnetns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("current network namespace: %w", err)
	}
	defer old.Close()

	if err := vnetns.Set(ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}

	defer func() {
		if back := vnetns.Set(old); back != nil {
			// The goroutine stays locked to the thread, so that no other goroutine ever runs on it.
			err = errors.Join(err, fmt.Errorf("leave network namespace %s: %w", path, back))
			return
		}
		runtime.UnlockOSThread()
	}()

	return f()
}

// Unmount removes Path, as a runtime does when a pod ends. The namespace itself exists as long as
// this Namespace, a process or a socket holds it; [Namespace.Do] and [Namespace.Handle] still work.
// A second call returns an error that is os.ErrNotExist.
func (n *Namespace) Unmount() error {
	if err := unix.Unmount(n.path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
		return &os.PathError{Op: "unmount", Path: n.path, Err: err}
	}
	return os.Remove(n.path)
}

// Connect joins two namespaces by a veth pair. One end, aName, is in a, and the other end, bName,
// is in b; both are up. a and b may be the same namespace. Names have at most 15 bytes.
func Connect(t testing.TB, a *Namespace, aName string, b *Namespace, bName string) {
	t.Helper()
	ConnectQueues(t, a, aName, b, bName, 0)
}

// ConnectQueues does the same as [Connect], with this number of queues at both ends and in both
// directions; 0 leaves the number to the kernel.
func ConnectQueues(
	t testing.TB, a *Namespace, aName string, b *Namespace, bName string, queues int,
) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.NumTxQueues, attrs.NumRxQueues = aName, queues, queues
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: bName, PeerNamespace: netlink.NsFd(b.Fd())}
	if err := a.handle.LinkAdd(veth); err != nil {
		t.Fatalf("veth %s - %s: %v", aName, bName, err)
	}

	for _, end := range []struct {
		n    *Namespace
		name string
	}{{a, aName}, {b, bName}} {
		link, err := end.n.handle.LinkByName(end.name)
		if err != nil {
			t.Fatalf("veth %s - %s: %s: %v", aName, bName, end.name, err)
		}
		if err := end.n.handle.LinkSetUp(link); err != nil {
			t.Fatalf("veth %s - %s: %s up: %v", aName, bName, end.name, err)
		}
	}
}
