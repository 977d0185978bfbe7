// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// packet is what pods send each other: JSON, and zeros up to the size.
type packet struct {
	Run    string    `json:"run"`
	Kind   string    `json:"kind"`
	Number int       `json:"number,omitempty"` // of the question
	From   wire.Peer `json:"from"`

	length int // of the payload in bytes; of a received packet
	at     time.Time
}

// Kinds of packets.
const (
	question = "question"
	answer   = "answer"
	call     = "call"
)

// encode returns a payload of at least that many bytes.
func (p packet) encode(length int) ([]byte, error) {
	text, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	if missing := length - len(text); missing > 0 {
		text = append(text, make([]byte, missing)...)
	}
	return text, nil
}

// maxPayload is more than the largest MTU of an XPUNetwork, 9216 bytes.
const maxPayload = 10 << 10

// receive answers questions and passes on answers until the socket is closed.
func (p *probe) receive(e *endpoint) {
	buffer := make([]byte, maxPayload)
	for {
		n, from, err := e.socket.ReadFromUDPAddrPort(buffer)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			continue // such as an ICMP error for an earlier packet
		}

		got := packet{length: n, at: time.Now()}
		decoder := json.NewDecoder(bytes.NewReader(buffer[:n]))
		if err := decoder.Decode(&got); err == nil && got.Run == p.Run && got.From != p.Self {
			p.take(e, from, got)
		}
	}
}

// take handles a packet of another pod of the test.
func (p *probe) take(e *endpoint, from netip.AddrPort, got packet) {
	p.note(got, !e.all.Is4())
	p.mutex.Lock()
	waiting := p.answers[got.Number]
	p.mutex.Unlock()

	switch got.Kind {
	case question:
		reply := packet{Run: p.Run, Kind: answer, Number: got.Number, From: p.Self}
		if payload, err := reply.encode(got.length); err == nil {
			_, _ = e.socket.WriteToUDPAddrPort(payload, from) // the other pod asks again
		}
	case answer:
		select {
		case waiting <- got:
		default: // nobody waits, or it has an answer
		}
	}
}

// note notes a packet of another network, and a call of the pod's own network.
func (p *probe) note(got packet, v6 bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if network := got.From.Network; network != p.Self.Network {
		if _, known := p.heard[network]; !known && len(p.heard) < wire.MaxHeard {
			p.heard[network] = got.From
		}
		return
	}

	if _, known := p.called[v6]; !known && got.Kind == call {
		p.called[v6] = got.From
	}
}

// ask sends a question until it is answered, or until ctx ends.
func (p *probe) ask(ctx context.Context, q wire.Question) wire.Answer {
	p.mutex.Lock()
	p.last++
	number, answered := p.last, make(chan packet, 1)
	p.answers[number] = answered
	p.mutex.Unlock()

	defer func() {
		p.mutex.Lock()
		delete(p.answers, number)
		p.mutex.Unlock()
	}()

	e := p.v6
	if q.Address.Is4() {
		e = p.v4
	}
	payload, err := packet{Run: p.Run, Kind: question, Number: number, From: p.Self}.encode(
		q.Size - e.headers)
	if err != nil {
		return wire.Answer{Error: err.Error()}
	}
	if q.Size > 0 && len(payload) > q.Size-e.headers {
		return wire.Answer{Error: fmt.Sprintf("a packet of %d bytes is too small", q.Size)}
	}

	return e.repeat(ctx, q.Address, payload, answered)
}

// repeat sends a payload again and again until an answer of the same length comes. A route may come
// meanwhile.
func (e *endpoint) repeat(
	ctx context.Context, to netip.Addr, payload []byte, answered <-chan packet,
) wire.Answer {
	isSent := false
	for {
		sent := time.Now()
		_, err := e.socket.WriteToUDPAddrPort(payload, netip.AddrPortFrom(to, port))
		if err != nil && !isUnreachable(err) {
			return wire.Answer{Error: err.Error()}
		}
		isSent = isSent || err == nil

		select {
		case <-ctx.Done():
			return wire.Answer{Silent: isSent, Unsent: !isSent}
		case got := <-answered:
			if got.length != len(payload) {
				return wire.Answer{From: &got.From, Error: fmt.Sprintf(
					"a packet with %d bytes of UDP was answered with %d", len(payload), got.length)}
			}
			return wire.Answer{From: &got.From, Took: got.at.Sub(sent)}
		case <-time.After(interval):
		}
	}
}

// isUnreachable reports whether an error means that no packet was sent to the address: the neighbor
// did not answer earlier, or no route leads there.
func isUnreachable(err error) bool {
	return errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH)
}

// calls is how often a pod calls, because a packet may get lost.
const calls = 3

// call sends packets to all pods of the segment, in the families of which the interface has an
// address. It returns when ctx ends, so that calls of other pods are heard meanwhile.
func (p *probe) call(ctx context.Context) error {
	payload, err := packet{Run: p.Run, Kind: call, From: p.Self}.encode(0)
	if err != nil {
		return err
	}

	for range calls {
		for _, e := range []*endpoint{p.v4, p.v6} {
			if !slices.ContainsFunc(p.addresses, func(a netip.Prefix) bool {
				return a.Addr().Is4() == e.all.Is4()
			}) {
				continue
			}
			to := netip.AddrPortFrom(e.all, port)
			if _, err := e.socket.WriteToUDPAddrPort(payload, to); err != nil {
				return fmt.Errorf("call all pods of the segment: %w", err)
			}
		}
		loop.Sleep(ctx, interval)
	}

	<-ctx.Done()
	return nil
}
