// SPDX-License-Identifier: Apache-2.0

// Package probe is the program in the pods of "xpuctl test". It tells how the pod's interface is,
// answers the packets of other pods of the test, and sends them packets when it gets an order. It
// needs no privileges.
package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/connectivity/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
)

// Options of [Run].
type Options struct {
	// Run is the identity of the test. Packets of other tests are ignored.
	Run string
	// Self is the pod and its network.
	Self wire.Peer
	// Interface is the name of the interface under test.
	Interface string
	// Orders is the directory in which the kubelet keeps [wire.OrderFile].
	Orders string
	// Reports gets each [wire.Report] as a line of JSON.
	Reports io.Writer
}

// Run reports the interface, and then carries out orders until ctx ends.
func Run(ctx context.Context, o Options) error {
	found, err := look(o.Interface)
	if err != nil {
		return errors.Join(err, o.report(wire.Report{Error: err.Error()}))
	}

	p := &probe{Options: o, addresses: found.Addresses, answers: map[int]chan packet{},
		heard: map[string]wire.Peer{}, called: map[bool]wire.Peer{}}
	stop, err := p.open(ctx)
	if err != nil {
		return errors.Join(err, o.report(wire.Report{Interface: found, Error: err.Error()}))
	}
	defer stop()

	if err := o.report(wire.Report{Interface: found}); err != nil {
		return err
	}
	return p.follow(ctx)
}

func (o Options) report(r wire.Report) error { return json.NewEncoder(o.Reports).Encode(r) }

// look returns an interface of this network namespace.
func look(name string) (wire.Interface, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return wire.Interface{}, fmt.Errorf("interface %s: %w", name, err)
	}
	addresses, err := link.Addrs()
	if err != nil {
		return wire.Interface{}, fmt.Errorf("addresses of interface %s: %w", name, err)
	}

	found := wire.Interface{Name: link.Name, MAC: link.HardwareAddr.String(), MTU: link.MTU,
		Up: link.Flags&net.FlagUp != 0}
	for _, a := range addresses {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			return wire.Interface{}, fmt.Errorf("address of interface %s: %w", name, err)
		}
		if !prefix.Addr().IsLinkLocalUnicast() {
			found.Addresses = append(found.Addresses, prefix)
		}
	}

	return found, nil
}

type probe struct {
	Options
	v4, v6    *endpoint
	addresses []netip.Prefix

	mutex   sync.Mutex
	last    int                  // number of the last question
	answers map[int]chan packet  // for questions without answer, by number
	heard   map[string]wire.Peer // by the other network; at most wire.MaxHeard
	called  map[bool]wire.Peer   // of the same network, by whether it is IPv6
}

// endpoint is a socket of a family.
type endpoint struct {
	family
	socket *net.UDPConn
}

// open opens the sockets and receives packets until stop is called.
func (p *probe) open(ctx context.Context) (stop func(), err error) {
	var receivers sync.WaitGroup
	stop = func() {
		for _, e := range []*endpoint{p.v4, p.v6} {
			if e != nil {
				_ = e.socket.Close()
			}
		}
		receivers.Wait()
	}

	for i, target := range []**endpoint{&p.v4, &p.v6} {
		f := families()[i]
		socket, err := f.listen(ctx, p.Interface)
		if err != nil {
			stop()
			return nil, err
		}

		*target = &endpoint{f, socket}
		receivers.Go(func() { p.receive(*target) })
	}

	return stop, nil
}

// follow carries out the orders that come.
func (p *probe) follow(ctx context.Context) error {
	changes := make(chan struct{}, 1)
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() { ended <- watchdir.Notify(ctx, p.Orders, changes) }()

	for done := 0; ; {
		select {
		case err := <-ended:
			return err
		case <-changes:
		}

		order, err := readOrder(filepath.Join(p.Orders, wire.OrderFile))
		if err != nil {
			return errors.Join(err, p.report(wire.Report{Error: err.Error()}))
		}
		if order.Number <= done {
			continue
		}

		done = order.Number
		if err := p.report(p.carryOut(ctx, order)); err != nil {
			return err
		}
	}
}

// readOrder returns the zero order if there is none yet.
func readOrder(path string) (order wire.Order, err error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(text) == 0 {
		return order, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &order)
	}
	if err == nil && len(order.Questions) > wire.MaxQuestions {
		err = fmt.Errorf("%d questions are more than %d", len(order.Questions), wire.MaxQuestions)
	}
	if err != nil {
		return wire.Order{}, fmt.Errorf("order: %w", err)
	}
	return order, nil
}

// carryOut asks all questions at once, because each may take as long as the order's patience.
func (p *probe) carryOut(ctx context.Context, order wire.Order) wire.Report {
	report := wire.Report{Order: order.Number, Answers: make([]wire.Answer, len(order.Questions))}
	waiting, cancel := context.WithTimeout(ctx, order.Patience)
	defer cancel()

	var all sync.WaitGroup
	for i, q := range order.Questions {
		all.Go(func() { report.Answers[i] = p.ask(waiting, q) })
	}
	if order.Call {
		all.Go(func() {
			if err := p.call(waiting); err != nil {
				report.Error = err.Error()
			}
		})
	}
	all.Wait()

	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, peer := range p.heard {
		report.Heard = append(report.Heard, peer)
	}
	for v6, peer := range p.called {
		report.Called = append(report.Called, wire.Call{From: peer, IPv6: v6})
	}
	return report
}

// interval is the time between two packets of a question. A neighbor that does not answer ARP or
// Neighbor Discovery is asked once a second by the kernel, so that more packets would not help.
const interval = 250 * time.Millisecond
