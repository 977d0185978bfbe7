package inventory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// source is a netlink multicast group that tells of changes. Only the fact that something changed is taken from it,
// so that losing messages costs nothing but a scan. That is also why these are plain sockets: netlink libraries parse,
// and end a subscription or poll where the kernel says that messages were lost.
type source struct {
	name     string
	protocol int
	group    uint32 // bit mask
	matters  func(message []byte) bool
}

var sources = []source{
	{"rtnetlink", unix.NETLINK_ROUTE, 1 << (unix.RTNLGRP_LINK - 1), func([]byte) bool { return true }},
	// Group 1 has the kernel's own uevents, group 2 what udev makes of them (lib/kobject_uevent.c).
	{"uevent", unix.NETLINK_KOBJECT_UEVENT, 1, ueventMatters},
	{"routes", unix.NETLINK_ROUTE, 1<<(unix.RTNLGRP_IPV4_ROUTE-1) | 1<<(unix.RTNLGRP_IPV6_ROUTE-1), routeMatters},
}

// receiveBuffer holds the messages that come during a scan, in bytes. More are only counted as lost.
const receiveBuffer = 1 << 20

// ueventMatters says whether a uevent, "add@/devices/..\0ACTION=add\0..\0SUBSYSTEM=pci\0..", is about something that a
// Function is made of.
func ueventMatters(message []byte) bool {
	for variable := range bytes.SplitSeq(message, []byte{0}) {
		if subsystem, ok := bytes.CutPrefix(variable, []byte("SUBSYSTEM=")); ok {
			switch string(subsystem) {
			case "pci", "net", "virtio", "auxiliary", "infiniband", "vdpa":
				return true
			}
			return false
		}
	}
	return false
}

// listen calls wake for every message that matters, and whenever messages may have been lost, until ctx ends.
func (s source) listen(ctx context.Context, netNS string, wake func(), log logr.Logger) {
	log = log.WithValues("source", s.name)
	backoff := wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.1, Steps: 9, Cap: 30 * time.Second}
	delays := backoff.DelayFunc()
	for ctx.Err() == nil {
		begin := time.Now()
		err := s.subscribe(ctx, netNS, wake, log)
		if ctx.Err() != nil {
			return
		}
		if time.Since(begin) > backoff.Cap {
			delays = backoff.DelayFunc()
		}
		delay := delays()
		log.Error(err, "Not told of changes of devices for now", "retry", delay.String())
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// subscribe works until ctx ends or the socket fails.
func (s source) subscribe(ctx context.Context, netNS string, wake func(), log logr.Logger) error {
	socket, err := s.open(netNS)
	if err != nil {
		return err
	}
	defer socket.Close()
	defer context.AfterFunc(ctx, func() { _ = socket.SetReadDeadline(time.Unix(1, 0)) })()
	conn, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	wake() // for what changed while there was no subscription
	buf := make([]byte, os.Getpagesize())
	for {
		message, err := receive(conn, buf)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			log.V(1).Info("Messages lost, looking at everything again")
			wake()
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case s.matters(message):
			wake()
		}
	}
}

// rawConn is [syscall.RawConn] as far as it is needed.
type rawConn interface {
	Read(func(fd uintptr) bool) error
}

// receive returns the start of the kernel's next message; those of other senders are passed over.
func receive(conn rawConn, buf []byte) ([]byte, error) {
	for {
		var n int
		var from unix.Sockaddr
		var failure error
		err := conn.Read(func(fd uintptr) bool {
			n, from, failure = unix.Recvfrom(int(fd), buf, 0)
			return !errors.Is(failure, unix.EAGAIN)
		})
		if err := errors.Join(err, failure); err != nil && !errors.Is(err, unix.EINTR) {
			return nil, err
		}
		if kernel, ok := from.(*unix.SockaddrNetlink); ok && kernel.Pid == 0 {
			return buf[:n], nil
		}
	}
}

func (s source) open(netNS string) (*os.File, error) {
	var fd int
	err := inNamespace(netNS, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, s.protocol)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	socket := os.NewFile(uintptr(fd), s.name)
	// Without CAP_NET_ADMIN the buffer stays as it is.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: s.group}); err != nil {
		socket.Close()
		return nil, fmt.Errorf("bind: %w", err)
	}
	return socket, nil
}

// inNamespace calls f in a network namespace, which sockets that it opens stay in. "" is the process's own.
func inNamespace(path string, f func() error) (err error) {
	if path == "" {
		return f()
	}
	there, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("network namespace %s: %w", path, err)
	}
	defer there.Close()
	// The thread goes back: one that is given up ends with its goroutine, but not if it is the process's first.
	runtime.LockOSThread()
	own, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("own network namespace: %w", err)
	}
	defer own.Close()
	if err := netns.Set(there); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace %s: %w", path, err)
	}
	defer func() {
		if back := netns.Set(own); back != nil {
			// The goroutine stays locked to the thread, so that no other goroutine ever runs on it.
			err = errors.Join(err, fmt.Errorf("leave network namespace %s: %w", path, back))
			return
		}
		runtime.UnlockOSThread()
	}()
	return f()
}
