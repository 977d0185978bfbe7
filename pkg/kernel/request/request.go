// SPDX-License-Identifier: Apache-2.0

// Package request sends netlink requests for which the netlink library has no function, and reads
// answers that are larger than the library reads.
package request

import (
	"errors"
	"sync/atomic"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// SkipStatistics is RTEXT_FILTER_SKIP_STATS of include/uapi/linux/rtnetlink.h. It leaves out
// counters, because they make up most of a list, and the counters of many VFs do not fit in an
// answer.
const SkipStatistics = 1 << 3

// Send sends a message with flags (NLM_F_*), and returns the bodies of the kernel's answers.
// Answers above 16 MiB are an error: see [ErrTooLarge]. If the error is nl.ErrDumpInterrupted, the
// returned list may lack objects.
func Send(
	socket *nl.SocketHandle, message, flags int, header nl.NetlinkRequestData,
	attributes ...*nl.RtAttr,
) ([][]byte, error) {
	req := Message{
		Type: message, Flags: flags, Header: header, Attributes: attributes,
	}.request(socket)

	socket.Socket.Lock()
	defer socket.Socket.Unlock()
	return execute(socket.Socket, req)
}

// Message is one of the messages that [SendAll] sends.
type Message struct {
	Type, Flags int // RTM_*, NLM_F_*
	Header      nl.NetlinkRequestData
	Attributes  []*nl.RtAttr
}

// GenericHeader is the header of a generic netlink message (struct genlmsghdr of
// include/uapi/linux/genetlink.h): a command, its version and two reserved bytes, which are zero.
//
// [nl.Genlmsg] is no substitute. It has no room for the reserved bytes and sends whatever follows
// it in memory, but the kernel refuses newer commands unless the reserved bytes are zero.
type GenericHeader struct{ Command, Version uint8 }

// Len implements [nl.NetlinkRequestData]. It returns the length in bytes.
func (GenericHeader) Len() int { return nl.SizeofGenlmsg }

// Serialize implements [nl.NetlinkRequestData].
func (h GenericHeader) Serialize() []byte { return []byte{h.Command, h.Version, 0, 0} }

func (m Message) request(socket *nl.SocketHandle) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(m.Type, m.Flags)
	req.Seq = atomic.AddUint32(&socket.Seq, 1)
	req.AddData(m.Header)
	for _, a := range m.Attributes {
		req.AddData(a)
	}
	return req
}

// Consistent lists objects of the kernel. It repeats the list if the kernel reports that objects
// changed meanwhile, because an interrupted list may lack objects that exist. It returns the last
// error after 10 tries.
func Consistent[T any](list func() ([]T, error)) ([]T, error) {
	const tries = 10
	for try := 1; ; try++ {
		all, err := list()
		again := errors.Is(err, nl.ErrDumpInterrupted) || errors.Is(err, unix.EINTR)
		if !again || try == tries {
			return all, err
		}
	}
}
