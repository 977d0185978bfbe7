// SPDX-License-Identifier: Apache-2.0

// Package listen hears by netlink that the kernel changed something, and takes only this fact from
// a message: a loss is harmless. Netlink libraries do not fit: they parse messages, and end a
// subscription, or poll, when messages were lost.
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

// Source is what to listen to.
type Source struct {
	Name     string // for logs: "rtnetlink"
	Protocol int    // NETLINK_* of linux/netlink.h
	// Groups returns the numbers of the multicast groups, which in generic netlink depend on the
	// boot; EOPNOTSUPP for none.
	Groups func(ns netns.NsHandle) ([]uint32, error)
	// Matters says whether a message, which begins with its header, matters; nil is all. It must
	// not keep the message.
	Matters func(message []byte) bool
}

// Links are the changes of netdevs.
var Links = Source{
	Name: "rtnetlink", Protocol: unix.NETLINK_ROUTE, Groups: Groups(unix.RTNLGRP_LINK),
}

// Groups returns fixed numbers.
func Groups(numbers ...uint32) func(netns.NsHandle) ([]uint32, error) {
	return func(netns.NsHandle) ([]uint32, error) { return numbers, nil }
}

const (
	// bytes of messages that may wait for the listener; the kernel drops more
	receiveBuffer            = 1 << 20
	firstRetry, slowestRetry = 100 * time.Millisecond, 30 * time.Second
)

// Follow listens in the network namespace at the path, "" for the process's own, until ctx ends,
// and again after every failure. It calls changed when it begins to listen, for every message that
// matters, and when messages were lost. It returns early only if the kernel does not have the
// source. changed must not take long.
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

// listen works until ctx ends or the socket fails.
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

	changed() // for what changed while nobody listened
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

// receive returns the start of the kernel's next message, and ignores messages of other senders.
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
	// Without CAP_NET_ADMIN the buffer stays as it is.
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
