// SPDX-License-Identifier: Apache-2.0

package request

import (
	"encoding/binary"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// answer returns a message of the kernel that answers request 7 of port 4711.
func answer(kind, flags uint16, body []byte) []byte {
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, flags)
	m = binary.NativeEndian.AppendUint32(m, 7)
	m = binary.NativeEndian.AppendUint32(m, 4711)
	m = append(m, body...)
	for len(m)%unix.NLMSG_ALIGNTO != 0 {
		m = append(m, 0)
	}
	return m
}

// refusal returns the body of an NLMSG_ERROR: the error number, the header of the request, and the
// kernel's message.
func refusal(number int32, words string) []byte {
	body := binary.NativeEndian.AppendUint32(nil, uint32(-number))
	body = binary.NativeEndian.AppendUint32(body, unix.NLMSG_HDRLEN)
	body = append(body, make([]byte, unix.NLMSG_HDRLEN-4)...)
	return append(body, nl.NewRtAttr(nl.NLMSGERR_ATTR_MSG, nl.ZeroTerminated(words)).Serialize()...)
}

func TestRead(t *testing.T) {
	const tlvs = unix.NLM_F_ACK_TLVS | unix.NLM_F_CAPPED
	for name, test := range map[string]struct {
		datagram []byte
		bodies   int
		done     bool
		err      error
		says     string
	}{
		"one answer": {
			datagram: answer(unix.RTM_NEWLINK, 0, make([]byte, 16)), bodies: 1, done: true,
		},
		"part": {
			datagram: answer(unix.RTM_NEWLINK, unix.NLM_F_MULTI, make([]byte, 16)), bodies: 1,
		},
		"end":  {datagram: answer(unix.NLMSG_DONE, unix.NLM_F_MULTI, nil), done: true},
		"done": {datagram: answer(unix.NLMSG_ERROR, 0, make([]byte, 20)), done: true},
		"refused": {datagram: answer(unix.NLMSG_ERROR, tlvs, refusal(22, "no")), done: true,
			err: unix.EINVAL, says: "no"},
		"failed list": {datagram: answer(unix.NLMSG_DONE, unix.NLM_F_MULTI, refusal(105, "")[:4]),
			done: true, err: unix.ENOBUFS},
		"cut": {datagram: answer(unix.NLMSG_ERROR, tlvs, refusal(22, "no")[:6]),
			done: true, err: unix.EINVAL},
		"not a message": {datagram: make([]byte, 20), err: syscall.EINVAL},
	} {
		t.Run(name, func(t *testing.T) {
			e := exchange{sequence: 7, pid: 4711}
			err := e.read(test.datagram)
			if len(e.bodies) != test.bodies || e.done != test.done || !errors.Is(err, test.err) {
				t.Errorf("%d bodies, done %t, error %v", len(e.bodies), e.done, err)
			}
			if err != nil && !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %v, want one with %q", err, test.says)
			}

			other := exchange{sequence: 8, pid: 4711}
			if _ = other.read(test.datagram); len(other.bodies) > 0 || other.done {
				t.Error("it is taken for the answer to another request")
			}
		})
	}
}

func FuzzRead(f *testing.F) {
	f.Add(answer(unix.NLMSG_ERROR, unix.NLM_F_ACK_TLVS, refusal(22, "no")))
	f.Add(answer(unix.RTM_NEWLINK, unix.NLM_F_MULTI, make([]byte, 16)))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		e := exchange{sequence: 7, pid: 4711}
		if err := e.read(datagram); err == nil && len(e.bodies) > len(datagram)/unix.NLMSG_HDRLEN {
			t.Errorf("%d bodies in %d bytes", len(e.bodies), len(datagram))
		}
	})
}

// TestTooLarge checks that a datagram above the limit is dropped with an error, and that the next
// one is read.
func TestTooLarge(t *testing.T) {
	socket, err := nl.Subscribe(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()

	ask := func() {
		request := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
		header := nl.NewIfInfomsg(unix.AF_UNSPEC)
		header.Index = 1
		request.AddData(header)
		if err := socket.Send(request); err != nil {
			t.Fatal(err)
		}
	}

	ask()
	ask()
	if _, err := receive(socket.GetFd(), 0, 100); !errors.Is(err, ErrTooLarge) {
		t.Errorf("error %v, want %v", err, ErrTooLarge)
	}
	datagram, err := receive(socket.GetFd(), 0, largestAnswer)
	if err != nil || len(datagram) < 200 {
		t.Errorf("%d bytes, %v", len(datagram), err)
	}
}
