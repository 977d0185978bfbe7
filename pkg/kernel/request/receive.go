// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

const (
	// largestAnswer is the size in bytes of the largest datagram that is read. A pod that may
	// configure its network can make the kernel's description of a netdev arbitrarily large, for
	// example with macvlan sources.
	largestAnswer = 16 << 20
	// largestPart is the size in bytes of the parts in which the kernel sends a list to a socket
	// that has read with a buffer of this size. Otherwise the parts have 4 KiB (netlink_dump and
	// netlink_recvmsg of net/netlink/af_netlink.c).
	largestPart = 32 << 10
	// patience is how long to wait for the kernel's answer, which is mostly there as soon as the
	// request was sent.
	patience = 10 * time.Second
)

// ErrTooLarge says that the kernel's answer exceeds the limit of 16 MiB.
var ErrTooLarge = fmt.Errorf("answer is larger than %d bytes", largestAnswer)

// execute sends a request and returns the bodies of the answers. It replaces the function of the
// netlink library, which reads at most 64 KiB at once and fails for larger answers.
func execute(socket *nl.NetlinkSocket, request *nl.NetlinkRequest) ([][]byte, error) {
	defer runtime.KeepAlive(socket) // the socket's finalizer closes the file descriptor

	pid, err := socket.GetPid()
	if err != nil {
		return nil, err
	}
	if err := socket.Send(request); err != nil {
		return nil, err
	}

	room := 0
	if request.Flags&unix.NLM_F_DUMP == unix.NLM_F_DUMP {
		room = largestPart
	}

	e := exchange{sequence: request.Seq, pid: pid}
	for !e.done {
		datagram, err := receive(socket.GetFd(), room, largestAnswer)
		if err == nil {
			err = e.read(datagram)
		}
		if err != nil {
			return nil, err
		}
	}

	if e.interrupted {
		return e.bodies, nl.ErrDumpInterrupted
	}

	return e.bodies, nil
}

// exchange is a request and its answers.
type exchange struct {
	sequence, pid uint32
	bodies        [][]byte
	interrupted   bool // objects changed while the kernel listed them
	done          bool
}

// read collects the messages of a datagram that answer the request. It ignores other messages,
// which answer an earlier request whose caller did not wait for them.
func (e *exchange) read(datagram []byte) error {
	messages, err := syscall.ParseNetlinkMessage(datagram)
	if err != nil {
		return fmt.Errorf("netlink message: %w", err)
	}

	for _, m := range messages {
		if m.Header.Seq != e.sequence || m.Header.Pid != e.pid || e.done {
			continue
		}

		e.interrupted = e.interrupted || m.Header.Flags&unix.NLM_F_DUMP_INTR != 0
		switch m.Header.Type {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			e.done = true
			if err := errorOf(m); err != nil {
				return err
			}
		default:
			e.bodies = append(e.bodies, m.Data)
			e.done = m.Header.Flags&unix.NLM_F_MULTI == 0
		}
	}

	return nil
}

// errorOf returns the error of an NLMSG_ERROR or NLMSG_DONE, or nil for an acknowledgement. With
// NETLINK_EXT_ACK the error contains the kernel's message.
func errorOf(m syscall.NetlinkMessage) error {
	if len(m.Data) < 4 {
		return nil // an NLMSG_DONE without a status
	}

	number := int32(binary.NativeEndian.Uint32(m.Data))
	if number == 0 {
		return nil
	}

	err := error(syscall.Errno(-number))
	if m.Header.Flags&unix.NLM_F_ACK_TLVS == 0 {
		return err
	}

	rest := m.Data[4:]
	if m.Header.Type == unix.NLMSG_ERROR { // the request or its header comes first
		if len(rest) < unix.NLMSG_HDRLEN {
			return err
		}

		echoed := int(binary.NativeEndian.Uint32(rest))
		if m.Header.Flags&unix.NLM_F_CAPPED != 0 {
			echoed = unix.NLMSG_HDRLEN
		}

		padded := (echoed + unix.NLMSG_ALIGNTO - 1) &^ (unix.NLMSG_ALIGNTO - 1)
		if padded < 0 || padded > len(rest) {
			return err
		}

		rest = rest[padded:]
	}

	words, _ := attribute.Parse(rest)
	if text := words.Text(nl.NLMSGERR_ATTR_MSG); text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}

	return err
}

// receive returns the next datagram of the kernel. It reads with a buffer of room bytes or more. It
// drops a datagram that is larger than limit bytes, and returns [ErrTooLarge].
func receive(fd, room, limit int) ([]byte, error) {
	deadline := time.Now().Add(patience)
	for {
		size, _, err := unix.Recvfrom(fd, nil, unix.MSG_PEEK|unix.MSG_TRUNC|unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			if err := await(fd, deadline); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, err
		}

		buffer := make([]byte, min(max(size, room), limit))
		n, from, err := unix.Recvfrom(fd, buffer, unix.MSG_DONTWAIT)
		if err != nil {
			return nil, err
		}
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != nl.PidKernel {
			continue // any process may send to a netlink socket
		}
		if size > limit {
			return nil, fmt.Errorf("%w: it has %d", ErrTooLarge, size)
		}

		return buffer[:n], nil
	}
}

// await returns when the socket has a datagram, or with an error after the deadline.
func await(fd int, deadline time.Time) error {
	left := time.Until(deadline)
	if left <= 0 {
		return fmt.Errorf("no answer within %s: %w", patience, unix.EAGAIN)
	}

	_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}},
		int(left.Milliseconds())+1)
	if errors.Is(err, unix.EINTR) {
		return nil
	}

	return err
}
