// SPDX-License-Identifier: Apache-2.0

package card

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

const pf0, pf1 pci.Address = "0000:3b:00.0", "0000:5e:00.0"

// node is a node whose cards answer as the test says.
type node struct {
	t       *testing.T
	cards   *Cards
	wake    chan struct{}
	changed int

	mutex     sync.Mutex
	functions []function.Function
	serials   map[pci.Address]func() (string, error)
	macs      map[string]function.MAC
	asked     []string
}

// begin returns a node whose Cards run. The caller must be in a bubble of synctest.
func begin(t *testing.T) *node {
	n := &node{t: t, wake: make(chan struct{}), serials: map[pci.Address]func() (string, error){},
		macs: map[string]function.MAC{}}
	n.set(pf0, "mlx5_core", "ens3f0")

	n.cards = New(Options{
		Functions: func() []function.Function {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			return slices.Clone(n.functions)
		},
		Card: func(pf pci.Address) (function.Card, error) {
			n.mutex.Lock()
			answer := n.serials[pf]
			n.asked = append(n.asked, string(pf))
			n.mutex.Unlock()
			if answer == nil {
				return function.Card{}, nil
			}

			serial, err := answer()
			return function.Card{Serial: serial}, err
		},
		PermanentMAC: func(netdev string) (function.MAC, error) {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			n.asked = append(n.asked, netdev)
			return n.macs[netdev], nil
		},
		Changed: func() {
			n.mutex.Lock()
			defer n.mutex.Unlock()
			n.changed++
		},
		Log: logr.Discard(),
	})

	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)

	go func() { _ = n.cards.Run(ctx, n.wake) }()
	return n
}

// set gives the node one PF, and a VF, which must not be asked.
func (n *node) set(pf pci.Address, driver, netdev string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.functions = []function.Function{
		{ID: function.ID{Address: pf}, Kind: function.PF, PF: pf, Driver: driver, Netdev: netdev},
		{ID: function.ID{Address: "0000:3b:00.2"}, Kind: function.VF, PF: pf, Driver: driver,
			Netdev: netdev + "v0"},
	}
}

// answer sets what the PF's card answers from now on.
func (n *node) answer(pf pci.Address, serial string, err error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.serials[pf], n.asked = func() (string, error) { return serial, err }, nil
}

func (n *node) hasMAC(netdev string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.macs[netdev] = "02:00:00:00:00:01"
}

// look makes the Cards look, and checks what they ask and what they then know about pf0.
func (n *node) look(what string, want function.Card, asked string) {
	n.t.Helper()
	n.mutex.Lock()
	n.asked = nil
	n.mutex.Unlock()
	n.wake <- struct{}{}
	synctest.Wait()
	n.check(what, want, asked)
}

func (n *node) check(what string, want function.Card, asked string) {
	n.t.Helper()
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if got := n.cards.Of(pf0); got != want || strings.Join(n.asked, " ") != asked {
		n.t.Errorf("%s: %+v, asked %v; want %+v, %s", what, got, n.asked, want, asked)
	}
}

// TestCards checks that card and kernel are asked once, and again only when the answer may differ.
func TestCards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := begin(t)
		synctest.Wait()
		n.check("nobody knows", function.Card{}, "0000:3b:00.0 ens3f0")
		n.answer(pf0, "MT2334XZ0LTK", nil)
		n.hasMAC("ens3f0")
		n.look("nothing changed", function.Card{}, "")
		known := function.Card{Serial: "MT2334XZ0LTK", MAC: "02:00:00:00:00:01"}
		n.set(pf0, "mlx5_core_2", "ens3f0")
		n.look("another driver", known, "0000:3b:00.0 ens3f0")
		n.set(pf0, "mlx5_core_2", "")
		n.look("the netdev is in a pod", known, "")
		n.set(pf0, "mlx5_core_2", "ens3f9")
		n.look("renamed", known, "0000:3b:00.0 ens3f9")
		n.set(pf0, "", "")
		n.answer(pf0, "", nil)
		n.look("no driver", known, "0000:3b:00.0")
		if n.changed != 2 { // the first answer, although it says nothing, and the serial number
			t.Errorf("got %d changes, want 2", n.changed)
		}

		n.set(pf1, "mlx5_core", "ens4f0")
		n.look("gone", function.Card{}, "0000:5e:00.0 ens4f0")
		n.set(pf0, "mlx5_core", "ens3f0")
		n.answer(pf0, "MT2440AB1234", nil)
		n.look("another card in the slot",
			function.Card{Serial: "MT2440AB1234", MAC: "02:00:00:00:00:01"}, "0000:3b:00.0 ens3f0")
	})
}

// TestSlowCards checks that a card that hangs does not delay others, that a card that fails is
// asked again, and that the answer of a card that was removed meanwhile is ignored.
func TestSlowCards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := begin(t)
		synctest.Wait()
		hung, busy := make(chan struct{}), errors.New("busy")
		n.mutex.Lock()
		n.serials[pf1] = func() (string, error) { <-hung; return "late", nil }
		n.mutex.Unlock()
		n.set(pf1, "mlx5_core", "ens4f0")
		n.look("one hangs", function.Card{}, "0000:5e:00.0")
		n.answer(pf0, "", busy)
		n.hasMAC("ens3f0")
		n.set(pf0, "mlx5_core", "ens3f0")
		n.look("one is busy", function.Card{MAC: "02:00:00:00:00:01"}, "0000:3b:00.0 ens3f0")
		n.answer(pf0, "MT2334XZ0LTK", nil)
		time.Sleep(2 * firstRetry)
		n.check("it is not any more",
			function.Card{Serial: "MT2334XZ0LTK", MAC: "02:00:00:00:00:01"}, "0000:3b:00.0 ens3f0")
		close(hung)
		synctest.Wait()
		if got := n.cards.Of(pf1); got != (function.Card{}) {
			t.Errorf("a card that went has %+v", got)
		}
	})
}

// TestNetdevGone covers a netdev that was removed before the request.
func TestNetdevGone(t *testing.T) {
	if mac, err := permanentMAC("gone"); mac != "" || err != nil {
		t.Errorf("MAC address %q, %v", mac, err)
	}
}
