// SPDX-License-Identifier: Apache-2.0

// Package links reads netdevs by rtnetlink in network namespaces that a pod may have configured.
//
// Such a pod can give a netdev hundreds of long altnames, or give a macvlan thousands of source
// addresses. The kernel's description of the netdev then exceeds the buffer of the netlink library.
// It may even be malformed, because an attribute has a length of 16 bits, which wraps. This package
// reads all other netdevs regardless.
package links

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
)

// ErrNotFound says that there is no such netdev.
var ErrNotFound = errors.New("no such netdev")

// Reader reads netdevs of any size. It does not request VF information: see
// [request.SkipStatistics]. Several goroutines may use it at once.
type Reader struct{ socket *nl.SocketHandle }

// OpenReader returns a reader for a network namespace, or for the namespace of the calling thread if
// ns is [netns.None]. The caller closes the reader.
func OpenReader(ns netns.NsHandle) (*Reader, error) {
	socket, err := nl.SubscribeAt(ns, netns.None(), unix.NETLINK_ROUTE) // joins no multicast group
	if err != nil {
		return nil, err
	}

	_ = socket.SetExtAck(true) // errors carry the kernel's message, if there is one
	return &Reader{socket: &nl.SocketHandle{Socket: socket}}, nil
}

// Close closes the reader's socket.
func (r *Reader) Close() { r.socket.Close() }

// Socket returns the socket for messages that [netlink.Handle] cannot send: see [request.Send].
func (r *Reader) Socket() *nl.SocketHandle { return r.socket }

// Library returns a handle of the netlink library for a network namespace, or for the namespace of
// the calling thread if ns is [netns.None]. The handle does not request VF information. The caller
// closes it.
func Library(ns netns.NsHandle) (*netlink.Handle, error) {
	// Without an explicit family the library also opens XFRM, which not every kernel has loaded.
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err == nil {
		handle.DisableVFInfoCollection()
	}
	return handle, err
}

// Handle is a handle of the netlink library whose methods that read netdevs are those of a
// [Reader]. Several goroutines may use it at once.
type Handle struct {
	*Reader
	library
}

// library is a struct of its own, because its methods are then one level deeper than those of
// [Reader], which Go prefers for this reason.
type library struct{ *netlink.Handle }

// Open returns a handle for a network namespace, or for the namespace of the calling thread if ns
// is [netns.None]. The caller closes the handle.
func Open(ns netns.NsHandle) (*Handle, error) {
	handle, err := Library(ns)
	if err != nil {
		return nil, err
	}

	reader, err := OpenReader(ns)
	if err != nil {
		handle.Close()
		return nil, err
	}

	return &Handle{Reader: reader, library: library{handle}}, nil
}

// Close closes the handle's sockets.
func (h *Handle) Close() {
	h.library.Close()
	h.Reader.Close()
}

// All returns the bodies of the RTM_NEWLINK messages of all netdevs.
//
// If the description of a netdev is too large for a list, All asks for each netdev alone. It leaves
// out a netdev that the kernel cannot describe at all. If the error is [nl.ErrDumpInterrupted], the
// returned list may lack netdevs.
func (r *Reader) All() ([][]byte, error) {
	messages, err := request.Send(r.socket, unix.RTM_GETLINK, unix.NLM_F_DUMP,
		nl.NewIfInfomsg(unix.AF_UNSPEC), noStatistics())
	if tooLarge(err) {
		return r.each()
	}
	return messages, err
}

// LinkList returns the netdevs of [Reader.All]. If the error is [nl.ErrDumpInterrupted], the
// returned list may lack netdevs.
func (r *Reader) LinkList() ([]netlink.Link, error) {
	messages, err := r.All()
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) {
		return nil, err
	}

	list := make([]netlink.Link, 0, len(messages))
	for _, message := range messages {
		link, parseErr := Parse(message)
		if parseErr != nil {
			return nil, parseErr
		}
		list = append(list, link)
	}

	return list, err
}

// tooLarge reports whether the answer did not fit in the buffer of the kernel or of this program.
func tooLarge(err error) bool {
	return errors.Is(err, request.ErrTooLarge) || errors.Is(err, unix.ENOBUFS) ||
		errors.Is(err, unix.EMSGSIZE)
}

// each asks for each netdev alone. It takes the indexes from the list of statistics, which contains
// all netdevs and nothing of variable size.
func (r *Reader) each() (messages [][]byte, err error) {
	// The header is struct if_stats_msg of include/uapi/linux/if_link.h: family, padding, ifindex,
	// and a mask in which bit 0 is IFLA_STATS_LINK_64.
	const size, indexAt, maskAt = 12, 4, 8
	header := make(raw, size)
	binary.NativeEndian.PutUint32(header[maskAt:], 1)
	statistics, listErr := request.Send(r.socket, unix.RTM_GETSTATS, unix.NLM_F_DUMP, header)
	if listErr != nil && !errors.Is(listErr, nl.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list statistics: %w", listErr)
	}

	for _, s := range statistics {
		if len(s) < size {
			return nil, fmt.Errorf("statistics of %d bytes, want at least %d", len(s), size)
		}

		message, err := r.Ask(int(int32(binary.NativeEndian.Uint32(s[indexAt:]))), noStatistics())
		switch {
		case err == nil:
			messages = append(messages, message)
		case !tooLarge(err) && !errors.Is(err, unix.ENODEV):
			return nil, err
		}
	}

	return messages, listErr
}

// raw is a header of a netlink message.
type raw []byte

func (r raw) Len() int          { return len(r) }
func (r raw) Serialize() []byte { return r }

func noStatistics() *nl.RtAttr {
	return nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(request.SkipStatistics))
}

// Ask returns the body of the RTM_NEWLINK for the netdev with the index. If index is 0, the
// attributes name the netdev.
func (r *Reader) Ask(index int, attributes ...*nl.RtAttr) ([]byte, error) {
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	answers, err := request.Send(r.socket, unix.RTM_GETLINK, 0, header, attributes...)
	if err != nil {
		return nil, err
	}
	if len(answers) != 1 || len(answers[0]) < unix.SizeofIfInfomsg {
		return nil, errors.New("link: the kernel's answer is too short")
	}

	return answers[0], nil
}

// LinkByIndex returns the netdev with the index. The error matches [ErrNotFound] if there is no
// such netdev.
func (r *Reader) LinkByIndex(index int) (netlink.Link, error) {
	return r.link(fmt.Sprintf("index %d", index), index)
}

// LinkByName returns the netdev that has the name or altname. The error matches [ErrNotFound] if
// there is no such netdev.
func (r *Reader) LinkByName(name string) (netlink.Link, error) {
	return r.link(name, 0, nl.NewRtAttr(unix.IFLA_ALT_IFNAME, nl.ZeroTerminated(name)))
}

func (r *Reader) link(what string, index int, attributes ...*nl.RtAttr) (netlink.Link, error) {
	message, err := r.Ask(index, append(attributes, noStatistics())...)
	switch {
	case errors.Is(err, unix.ENODEV):
		return nil, fmt.Errorf("%s: %w", what, ErrNotFound)
	case err != nil:
		return nil, err
	}
	return Parse(message)
}

// Parse reads the body of an RTM_NEWLINK or RTM_DELLINK. It leaves out attributes that may be
// forged: see [Attributes].
func Parse(message []byte) (netlink.Link, error) {
	kept, err := trim(message)
	if err != nil {
		return nil, err
	}

	link, err := netlink.LinkDeserialize(nil, kept)
	if err != nil {
		return nil, fmt.Errorf("link: %w", err)
	}
	return link, nil
}

// Attributes returns the trustworthy attributes of the body of an RTM_NEWLINK.
//
// In a description of 64 KiB or more, the length of IFLA_LINKINFO may have wrapped, and what seems
// to follow it may be bytes that a pod chose. Attributes then returns only the attributes before
// IFLA_LINKINFO, and IFLA_LINKINFO with nothing but the kind. It returns all attributes of hardware
// and of veths, because their IFLA_LINKINFO has nothing of variable size.
func Attributes(message []byte) (attribute.Set, error) {
	kept, err := trim(message)
	if err != nil {
		return nil, err
	}
	return attribute.Parse(kept[unix.SizeofIfInfomsg:])
}

// plain are the kinds of netdevs whose IFLA_LINKINFO is small. Hardware has no kind.
var plain = []string{"", "veth"}

// trim returns the message without attributes that may be forged: see [Attributes].
func trim(message []byte) ([]byte, error) {
	if len(message) < unix.SizeofIfInfomsg {
		return nil, fmt.Errorf("link of %d bytes, want at least %d", len(message),
			unix.SizeofIfInfomsg)
	}
	if len(message) <= math.MaxUint16 {
		return message, nil
	}

	kept := slices.Clone(message[:unix.SizeofIfInfomsg])
	for kind, value := range attribute.All(message[unix.SizeofIfInfomsg:]) {
		if kind != unix.IFLA_LINKINFO {
			kept = append(kept, nl.NewRtAttr(int(kind), value).Serialize()...)
			continue
		}

		// The kernel writes IFLA_INFO_KIND first (rtnl_link_info_fill of net/core/rtnetlink.c).
		name := kindOf(value)
		if slices.Contains(plain, name) {
			return message, nil
		}

		info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
		info.AddRtAttr(nl.IFLA_INFO_KIND, nl.ZeroTerminated(name))

		return append(kept, info.Serialize()...), nil
	}

	return message, nil
}

// kindOf returns IFLA_INFO_KIND if it is the first attribute, or "".
func kindOf(info []byte) string {
	for kind, value := range attribute.All(info) {
		if kind == nl.IFLA_INFO_KIND {
			return attribute.Set{kind: value}.Text(kind)
		}
		break
	}
	return ""
}
