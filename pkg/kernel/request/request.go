// Package request asks the kernel by netlink what the netlink library has no function for.
package request

import (
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// SkipStatistics is RTEXT_FILTER_SKIP_STATS: counters cost most of a list, and those of many VFs do not fit in an answer.
const SkipStatistics = 1 << 3

// Send sends a message of a protocol (NETLINK_*) with flags (NLM_F_*), and returns the bodies of the kernel's answers.
func Send(
	socket *nl.SocketHandle, protocol, message, flags int, header nl.NetlinkRequestData, attributes ...*nl.RtAttr,
) ([][]byte, error) {
	req := nl.NewNetlinkRequest(message, flags)
	req.Sockets = map[int]*nl.SocketHandle{protocol: socket}
	req.AddData(header)
	for _, a := range attributes {
		req.AddData(a)
	}
	return req.Execute(protocol, 0)
}

// Consistent lists objects of the kernel, and lists them again if the kernel says that they changed meanwhile: an interrupted
// list may lack objects that exist. It returns the last error after 10 tries.
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
