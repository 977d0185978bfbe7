// SPDX-License-Identifier: Apache-2.0

package netns

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// TestType is the EtherType of the frames of a [Traffic], which IEEE 802 reserves for experiments.
const TestType = 0x88b5

// Traffic is frames that one netdev sends to another, one frame each millisecond.
type Traffic struct {
	sender, receiver int // packet sockets
	stop             chan struct{}
	done             errgroup.Group
	sent, received   int
}

// End is one end of a [Traffic].
type End struct {
	NetNS  *Namespace
	Netdev string
	MAC    net.HardwareAddr // may differ from the netdev's address
}

// Send sends frames from one end to the other until Stop. Both netdevs must be up.
func Send(from, to End) (_ *Traffic, err error) {
	t := &Traffic{stop: make(chan struct{}), sender: -1, receiver: -1}
	defer func() {
		if err != nil {
			t.close()
		}
	}()

	var index int
	if t.sender, index, err = from.open(); err != nil {
		return nil, err
	}
	if t.receiver, _, err = to.open(); err != nil {
		return nil, err
	}
	// The timeout is longer than any delay of a frame.
	if err := unix.SetsockoptTimeval(t.receiver, unix.SOL_SOCKET, unix.SO_RCVTIMEO,
		&unix.Timeval{Sec: 1}); err != nil {
		return nil, err
	}

	frame := slices.Concat(to.MAC, from.MAC, []byte{TestType >> 8, TestType & 0xff},
		make([]byte, 46))
	t.done.Go(func() error { return t.send(index, frame) })
	t.done.Go(t.receive)

	return t, nil
}

// open opens a packet socket for the traffic's frames.
func (e End) open() (socket, index int, err error) {
	link, err := e.NetNS.Handle().LinkByName(e.Netdev)
	if err != nil {
		return -1, 0, fmt.Errorf("netdev %s: %w", e.Netdev, err)
	}

	err = e.NetNS.Do(func() (err error) {
		socket, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return -1, 0, err
	}

	const networkOrder = TestType>>8 | TestType<<8&0xffff
	err = unix.Bind(socket,
		&unix.SockaddrLinklayer{Protocol: networkOrder, Ifindex: link.Attrs().Index})
	return socket, link.Attrs().Index, err
}

func (t *Traffic) send(index int, frame []byte) error {
	for tick := time.NewTicker(time.Millisecond); ; t.sent++ {
		select {
		case <-t.stop:
			return nil
		case <-tick.C:
		}
		if err := unix.Sendto(t.sender, frame,
			0, &unix.SockaddrLinklayer{Ifindex: index, Halen: 6}); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
}

func (t *Traffic) receive() error {
	for buffer := make([]byte, 100); ; {
		switch _, err := unix.Read(t.receiver, buffer); {
		case err == nil:
			t.received++
		case errors.Is(err, unix.EAGAIN):
			select {
			case <-t.stop:
				return nil
			default: // all frames are lost at this time
			}
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("receive: %w", err)
		}
	}
}

// Stop ends the traffic, and returns the numbers of sent and lost frames.
func (t *Traffic) Stop() (sent, lost int, err error) {
	close(t.stop)
	err = t.done.Wait()
	t.close()
	return t.sent, t.sent - t.received, err
}

func (t *Traffic) close() {
	for _, socket := range []int{t.sender, t.receiver} {
		if socket >= 0 {
			_ = unix.Close(socket)
		}
	}
}
