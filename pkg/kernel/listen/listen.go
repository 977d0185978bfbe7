// SPDX-License-Identifier: Apache-2.0

// Package listen waits for netlink messages about changes in the kernel. It uses a message only as
// a sign that something changed, so that a lost message does no harm. It does not use the netlink
// library, which parses every message and ends a subscription when messages were lost.
package listen

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Source is a set of netlink multicast groups.
type Source struct {
	Name     string // for logs: "rtnetlink"
	Protocol int    // NETLINK_* of include/uapi/linux/netlink.h
	// Groups returns the numbers of the multicast groups. A generic netlink family has other
	// numbers after each boot. The error matches EOPNOTSUPP if the kernel has no such groups.
	Groups func(ns netns.NsHandle) ([]uint32, error)
	// Matters reports whether a message is of interest. The message begins with its netlink header.
	// Matters must not keep the message. If Matters is nil, all messages are of interest.
	Matters func(message []byte) bool
}

// Links is the source of changes of netdevs.
var Links = Source{
	Name: "rtnetlink", Protocol: unix.NETLINK_ROUTE, Groups: Groups(unix.RTNLGRP_LINK),
}

// Groups returns a function for [Source.Groups] that returns fixed numbers.
func Groups(numbers ...uint32) func(netns.NsHandle) ([]uint32, error) {
	return func(netns.NsHandle) ([]uint32, error) { return numbers, nil }
}

const (
	// receiveBuffer is the size in bytes of the socket's queue. The kernel drops messages that
	// exceed it.
	receiveBuffer            = 1 << 20
	firstRetry, slowestRetry = 100 * time.Millisecond, 30 * time.Second
)

// Follow listens in the network namespace at the path, or in the namespace of the process if the
// path is "". It returns when ctx ends, or early if the kernel does not have the source. After any
// other failure it logs the error and tries again.
//
// Follow calls changed when it begins to listen, after every message that matters, and after
// messages were lost. changed must return quickly, because messages queue up meanwhile.
func (s Source) Follow(ctx context.Context, netNS string, changed func(), log logr.Logger) {
	log = log.WithValues("source", s.Name)
	s.follow(ctx, func(ctx context.Context) error {
		return s.listen(ctx, netNS, changed, log)
	}, log)
}

func (s Source) follow(ctx context.Context, listen func(context.Context) error, log logr.Logger) {
	loop.Retry(ctx, firstRetry, slowestRetry, func(ctx context.Context) error {
		err := listen(ctx)
		if errors.Is(err, unix.EOPNOTSUPP) {
			log.V(1).Info("The kernel tells nothing of this", "reason", err.Error())
			return nil
		}
		return err
	}, func(err error, pause time.Duration) {
		log.Error(err, "The kernel's messages are not heard for now", "retry", pause.String())
	})
}

// listen receives messages until ctx ends or the socket fails.
func (s Source) listen(ctx context.Context, netNS string, changed func(), log logr.Logger) error {
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

	changed() // for changes before the socket was open
	buf := make([]byte, os.Getpagesize())
	for {
		message, err := receive(conn, buf)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			log.V(1).Info("Messages were lost, looking at everything again")
			changed()
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		case s.Matters == nil || s.Matters(message):
			changed()
		}
	}
}

// receive returns the start of the kernel's next message. It ignores messages of other senders.
func receive(conn syscall.RawConn, buf []byte) ([]byte, error) {
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

func (s Source) open(netNS string) (*os.File, error) {
	ns, err := namespace.Open(netNS)
	if err != nil {
		return nil, err
	}
	defer ns.Close()

	groups, err := s.Groups(ns)
	if err != nil {
		return nil, err
	}

	var fd int
	err = namespace.Do(ns, func() (err error) {
		fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
			s.Protocol)
		return err
	})

	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}

	socket := os.NewFile(uintptr(fd), s.Name)
	// Without CAP_NET_ADMIN the buffer keeps its default size.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		socket.Close()
		return nil, fmt.Errorf("bind: %w", err)
	}

	for _, group := range groups {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP,
			int(group)); err != nil {
			socket.Close()
			return nil, fmt.Errorf("join multicast group %d: %w", group, err)
		}
	}

	return socket, nil
}
