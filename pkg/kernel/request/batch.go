// SPDX-License-Identifier: Apache-2.0

package request

import (
	"context"
	"errors"
	"runtime"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// batchSize is the number of messages in one datagram. The acknowledgements of all of them must fit
// in the socket's receive buffer.
const batchSize = 64

// SendAll makes the kernel carry out changes one after the other, with fewer system calls than
// [Send]. It returns one error for each message, or nil for a message that the kernel carried out.
// The kernel continues after a refused message. If ctx ends, the messages that were not sent get
// the error of ctx.
func SendAll(ctx context.Context, socket *nl.SocketHandle, messages []Message) []error {
	results := make([]error, len(messages))
	for start := 0; start < len(messages); start += batchSize {
		end := min(start+batchSize, len(messages))
		err := ctx.Err()
		if err == nil {
			err = sendPart(socket, messages[start:end], results[start:end])
		}
		for i := start; i < end && err != nil; i++ {
			results[i] = err
		}
	}

	return results
}

// sendPart sends messages in one datagram and stores the kernel's answers in results. An error that
// it returns concerns all messages.
func sendPart(socket *nl.SocketHandle, messages []Message, results []error) error {
	defer runtime.KeepAlive(socket.Socket) // the socket's finalizer closes the file descriptor
	socket.Socket.Lock()
	defer socket.Socket.Unlock()

	pid, err := socket.Socket.GetPid()
	if err != nil {
		return err
	}

	var datagram []byte
	exchanges := make([]exchange, len(messages))
	for i, m := range messages {
		m.Flags |= unix.NLM_F_ACK
		request := m.request(socket)
		exchanges[i] = exchange{sequence: request.Seq, pid: pid}
		datagram = append(datagram, request.Serialize()...)
		for len(datagram)%unix.NLMSG_ALIGNTO != 0 {
			datagram = append(datagram, 0)
		}
	}

	to := &unix.SockaddrNetlink{Family: unix.AF_NETLINK}
	if err := unix.Sendto(socket.Socket.GetFd(), datagram, 0, to); err != nil {
		return err
	}

	for i := range exchanges {
		if results[i], err = exchanges[i].finish(socket.Socket); err != nil {
			return err
		}
	}

	return nil
}

// finish waits for the acknowledgement of a message. refused is the error with which the kernel
// answered. err is set if the kernel's answer could not be received.
func (e *exchange) finish(socket *nl.NetlinkSocket) (refused, err error) {
	for !e.done {
		datagram, err := receive(socket.GetFd(), 0, largestAnswer)
		if err != nil {
			return nil, err
		}
		if refused = e.read(datagram); refused != nil && !e.done {
			return nil, errors.Join(errors.New("acknowledgement"), refused)
		}
	}
	return refused, nil
}
