// SPDX-License-Identifier: Apache-2.0

// Package netdevwire makes wires of the conformance test of Linux netdevs: see
// [conformance.Wire].
package netdevwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Wire is a netdev of the caller's network namespace. It implements [conformance.Wire].
type Wire struct {
	socket, index int
	heard         chan []byte
	stop          chan struct{}
	close         func() error
	ended         sync.WaitGroup
}

// maxHeard is how many frames a wire keeps that nobody has taken yet.
const maxHeard = 1024

// Open opens the wire of a netdev. It needs CAP_NET_RAW. The netdev must be up for frames to pass.
func Open(netdev string) (*Wire, error) {
	itf, err := net.InterfaceByName(netdev)
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", netdev, err)
	}
	socket, err := openSocket(itf.Index)
	if err != nil {
		return nil, fmt.Errorf("netdev %s: %w", netdev, err)
	}

	w := &Wire{
		socket: socket, index: itf.Index,
		heard: make(chan []byte, maxHeard), stop: make(chan struct{}),
	}
	w.close = sync.OnceValue(func() error {
		close(w.stop)
		w.ended.Wait()
		return unix.Close(socket)
	})
	w.ended.Go(w.read)

	return w, nil
}

func openSocket(index int) (socket int, err error) {
	const all = unix.ETH_P_ALL>>8 | unix.ETH_P_ALL<<8&0xffff // in network byte order
	// A socket without a protocol hears nothing until it is bound to the netdev.
	socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}

	err = errors.Join(
		unix.SetsockoptInt(socket, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1),
		unix.SetsockoptTimeval(socket, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
			&unix.Timeval{Usec: (50 * time.Millisecond).Microseconds()}),
		unix.Bind(socket, &unix.SockaddrLinklayer{Protocol: all, Ifindex: index}),
	)
	if err != nil {
		_ = unix.Close(socket)
		return -1, err
	}

	return socket, nil
}

// Send sends an Ethernet frame.
func (w *Wire) Send(frame []byte) error {
	return whileFull(time.Second, func() error {
		return unix.Sendto(w.socket, frame, 0, &unix.SockaddrLinklayer{Ifindex: w.index, Halen: 6})
	})
}

// whileFull sends again until the limit while the kernel drops the frame because a queue is full
// (ENOBUFS in packet(7)), as queues of a busy host are now and then.
func whileFull(limit time.Duration, send func() error) error {
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		err := send()
		if !errors.Is(err, unix.ENOBUFS) || time.Since(begin) >= limit {
			return err
		}
	}
}

// Frames has the frames that arrive at the netdev.
func (w *Wire) Frames() <-chan []byte { return w.heard }

// Close closes the wire.
func (w *Wire) Close() error { return w.close() }

// read reads frames until the wire is closed. It goes on while the netdev is down.
func (w *Wire) read() {
	frame, control := make([]byte, 1<<16), make([]byte, 256)
	for {
		select {
		case <-w.stop:
			return
		default:
		}

		n, c, _, from, err := unix.Recvmsg(w.socket, frame, control, 0)
		sender, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok || sender.Pkttype == unix.PACKET_OUTGOING {
			continue
		}

		select {
		case w.heard <- withTag(frame[:n], control[:c]):
		default:
		}
	}
}

// withTag returns a copy of a frame with its VLAN tag, which the kernel takes out of the frame and
// says beside it (struct tpacket_auxdata of packet(7)).
func withTag(frame, control []byte) []byte {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return append([]byte(nil), frame...)
	}

	for _, m := range messages {
		const statusAt, tagAt, typeAt, size = 0, 16, 18, 20
		if m.Header.Level != unix.SOL_PACKET || m.Header.Type != unix.PACKET_AUXDATA ||
			len(m.Data) < size || len(frame) < 12 {
			continue
		}

		status := binary.NativeEndian.Uint32(m.Data[statusAt:])
		if status&unix.TP_STATUS_VLAN_VALID == 0 {
			continue
		}
		etherType := uint16(unix.ETH_P_8021Q)
		if status&unix.TP_STATUS_VLAN_TPID_VALID != 0 {
			etherType = binary.NativeEndian.Uint16(m.Data[typeAt:])
		}

		tagged := append([]byte(nil), frame[:12]...)
		tagged = binary.BigEndian.AppendUint16(tagged, etherType)
		tagged = binary.BigEndian.AppendUint16(tagged, binary.NativeEndian.Uint16(m.Data[tagAt:]))
		return append(tagged, frame[12:]...)
	}

	return append([]byte(nil), frame...)
}
