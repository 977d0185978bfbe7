// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"net"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Card is a PF with one VF, and the driver of the VF's netdev. Its fields define how it behaves.
type Card struct {
	Address      string  // of the PF's device
	VF           VFState // what the PF enforces
	NoOperations bool    // the PF's driver has no operations for VFs
	Others       bool    // the PF also reports another VF
	NoVFs        bool
	Down         bool // the PF is down
	// Silent is the number of requests for which the PF leaves out the VF, or -1 for all requests.
	Silent int
	// Refuse and Drop are called for each order to the PF, with its words, such as "trust on".
	// TakeMAC is called for each MAC of the netdev. They decide whether the card refuses, drops or
	// accepts the order.
	Refuse  func(order string) error
	Drop    func(order string) bool
	TakeMAC func(mac function.MAC, enforced VFState) error
	Forced  bool // the netdev always gets the MAC that the PF enforces (qede)
	// InfiniBand says that the PF is one, whose VF has GUIDs.
	InfiniBand bool
	MTU        func(mtu int) error // called for each MTU of the netdev
	// ResetTime is how long the VF is busy after the PF accepted an order. The PF leaves out the VF
	// during this time, unless it is Talkative.
	ResetTime time.Duration
	Talkative bool

	mutex  sync.Mutex
	until  time.Time // the end of the time in which the VF is busy
	orders []string
}

// Orders returns the orders that the PF accepted since the last call.
func (c *Card) Orders() []string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	orders := c.orders
	c.orders = nil
	return orders
}

// Enforced returns what the PF enforces now.
func (c *Card) Enforced() VFState {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.VF
}

func (c *Card) isBusy() bool { return time.Now().Before(c.until) }

func (c *Card) askPF(_ string, vf int) (pfReport, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	r := pfReport{index: 1, bus: "pci", parent: c.Address, operations: !c.NoOperations,
		others: c.Others, vfs: vf + 1}
	if c.NoVFs {
		r.vfs = 0
	}
	if r.linkType = unix.ARPHRD_ETHER; c.InfiniBand {
		r.linkType = unix.ARPHRD_INFINIBAND
	}

	if !c.Down {
		r.flags = unix.IFF_UP | unix.IFF_LOWER_UP
	}

	switch {
	case c.NoOperations, c.NoVFs, c.isBusy() && !c.Talkative:
	case c.Silent == 0:
		r.vf = new(c.VF)
	case c.Silent > 0:
		c.Silent--
	}

	return r, nil
}

func (c *Card) orderVF(_, _ int, change vfChange) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	if c.isBusy() {
		return unix.EAGAIN
	}

	if c.Refuse != nil {
		if err := c.Refuse(change.what); err != nil {
			return err
		}
	}

	c.orders = append(c.orders, change.what)
	c.until = time.Now().Add(c.ResetTime)
	if c.Drop != nil && c.Drop(change.what) {
		return nil
	}

	c.VF = change.apply(c.VF)
	return nil
}

// apply returns the state after the change.
func (c vfChange) apply(s VFState) VFState {
	to := c.to
	switch c.field {
	case vfMAC:
		s.MAC = to.MAC
	case vfTag:
		s.VLAN, s.QoS, s.Proto = to.VLAN, to.QoS, to.Proto
	case vfRates:
		s.MinTxRate, s.MaxTxRate = to.MinTxRate, to.MaxTxRate
	case vfSpoofCheck:
		s.SpoofCheck = to.SpoofCheck
	case vfTrust:
		s.Trust = to.Trust
	case vfLinkState:
		s.LinkState = to.LinkState
	case vfNodeGUID:
		s.NodeGUID = to.NodeGUID
	case vfPortGUID:
		s.PortGUID = to.PortGUID
	}

	return s
}

// set is the driver of the VF's netdev. As in the kernel, the netdev moves even if the driver
// refuses the MAC.
func (c *Card) set(conn *conn, index int, flags, mask uint32, attributes ...*nl.RtAttr) error {
	value := func(kind uint16) []byte {
		for _, a := range attributes {
			if a != nil && a.Type == kind {
				return a.Data
			}
		}
		return nil
	}

	if err := c.refused(flags, mask, value); err != nil {
		if value(unix.IFLA_NET_NS_FD) != nil {
			move := slices.DeleteFunc(slices.Clone(attributes), func(a *nl.RtAttr) bool {
				return a == nil || a.Type != unix.IFLA_NET_NS_FD && a.Type != unix.IFLA_NEW_IFINDEX
			})
			_ = conn.set(index, 0, 0, move...)
		}
		return err
	}

	err := conn.set(index, flags, mask, attributes...)
	if mac := c.Enforced().MAC; c.Forced && !isZero(mac) && mask != 0 {
		_ = conn.set(index, 0, 0, hardwareAddr(unix.IFLA_ADDRESS, mac))
	}

	return err
}

func (c *Card) refused(flags, mask uint32, value func(uint16) []byte) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	mac, mtu := value(unix.IFLA_ADDRESS), value(unix.IFLA_MTU)
	switch {
	case mac != nil && c.isBusy():
		return unix.EAGAIN
	case flags&mask&unix.IFF_UP != 0 && c.isBusy():
		return unix.EBUSY
	case mac != nil && c.TakeMAC != nil:
		return c.TakeMAC(macOf(net.HardwareAddr(mac)), c.VF)
	case mtu != nil && c.MTU != nil:
		return c.MTU(int(nl.NativeEndian().Uint32(mtu)))
	}

	return nil
}

// Play connects the engine to the card, with the limits for waiting.
func (e *Engine) Play(c *Card, busyTime, settleTime time.Duration) {
	e.pfs, e.set, e.busyTime, e.settleTime = c, c.set, busyTime, settleTime
}
