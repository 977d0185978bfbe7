// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// pfPort asks the netdevs of PFs about their VFs, and orders what they enforce. A [conn] does so by
// rtnetlink.
type pfPort interface {
	askPF(name string, vf int) (pfReport, error)
	orderVF(index, vf int, change vfChange) error
}

// pfReport is what a PF's netdev says of itself and of one VF, in one RTM_NEWLINK.
type pfReport struct {
	index       int    // ifindex of the netdev
	flags       uint32 // IFF_* of linux/if.h
	bus, parent string // of the device that the netdev belongs to: "pci", "0000:3b:00.0"
	vfs         int    // how many VFs the device has (IFLA_NUM_VF)
	// operations says that the driver can tell what it enforces for VFs (ndo_get_vf_config):
	// IFLA_VFINFO_LIST is there.
	operations bool
	others     bool     // the netdev says something of other VFs
	vf         *VFState // nil if the netdev says nothing of the VF
}

// silent says that the driver could tell about the VF, which exists, and does not. The kernel
// leaves a VF out without an error if the driver fails (rtnl_fill_vfinfo in net/core/rtnetlink.c).
func (r pfReport) silent(vf int) bool { return r.operations && r.vf == nil && vf < r.vfs }

// askPF asks without the statistics, with which the answer of a PF with some 200 VFs would not fit
// in an attribute's 64 KiB.
func (c *conn) askPF(name string, vf int) (pfReport, error) {
	mask := number(unix.IFLA_EXT_MASK, nl.RTEXT_FILTER_VF|request.SkipStatistics)
	message, err := c.ask(0, text(unix.IFLA_IFNAME, name), mask)
	if err != nil {
		return pfReport{}, err
	}

	header := nl.DeserializeIfInfomsg(message)

	report := parsePF(message[unix.SizeofIfInfomsg:], vf)
	report.index, report.flags = int(header.Index), header.Flags
	return report, nil
}

// parsePF reads the attributes of a PF's RTM_NEWLINK.
func parsePF(attributes []byte, vf int) (report pfReport) {
	attrs, _ := attribute.Parse(attributes) // what comes after a malformed one is not told
	report.parent = attrs.Text(unix.IFLA_PARENT_DEV_NAME)
	report.bus = attrs.Text(unix.IFLA_PARENT_DEV_BUS_NAME)
	if number := uint32s(attrs[unix.IFLA_NUM_VF]); len(number) > 0 {
		report.vfs = int(number[0])
	}

	list, told := attrs[unix.IFLA_VFINFO_LIST]
	report.operations = told
	for _, info := range attribute.All(list) {
		switch index, state := parseVFInfo(info); index {
		case vf:
			report.vf = state
		case -1:
		default:
			report.others = true
		}
	}

	return report
}

// orderVF sends one message about a VF to the PF's netdev with the index.
func (c *conn) orderVF(index, vf int, change vfChange) error {
	pf, to := reference(index), change.to
	switch change.field {
	case vfMAC:
		return c.LinkSetVfHardwareAddr(pf, vf, to.MAC.HardwareAddr())
	case vfTag:
		if to.tagsAD() {
			return c.LinkSetVfVlanQosProto(pf, vf, to.VLAN, to.QoS, unix.ETH_P_8021AD)
		}
		// The older message, which more drivers know.
		return c.LinkSetVfVlanQos(pf, vf, to.VLAN, to.QoS)
	case vfRates:
		return c.LinkSetVfRate(pf, vf, to.MinTxRate, to.MaxTxRate)
	case vfSpoofCheck:
		return c.LinkSetVfSpoofchk(pf, vf, *to.SpoofCheck)
	case vfTrust:
		return c.LinkSetVfTrust(pf, vf, *to.Trust)
	case vfLinkState:
		return c.LinkSetVfState(pf, vf, linkStateNumber(to.LinkState))
	}

	return fmt.Errorf("VF field %d: must be one of the known fields", change.field)
}

// errSilent says that a PF tells nothing about a VF that exists. It may tell later.
var errSilent = errors.New("tells nothing about the VF, whose state is unknown")

// report asks a PF, and refuses the answer of a netdev that belongs to another device: names of
// netdevs can be changed at any time, and the order that follows goes to the index in the report.
func (e *Engine) report(pf *PF) (pfReport, error) {
	r, err := e.pfs.askPF(pf.Name, pf.VF)
	if err != nil {
		return r, fmt.Errorf("PF %s: %w", pf, err)
	}

	other := pf.Address != "" && r.parent != pf.Address
	if other && (r.bus == "pci" || r.operations) {
		return r, fmt.Errorf("PF %s: netdev %s belongs to device %s by now: it was renamed "+
			"meanwhile",
			pf, pf.Name, r.parent)
	}

	return r, nil
}

// known asks a PF for a VF that it told about before, and waits while it says nothing: drivers
// leave a VF out while they reset it. vf is nil in the report only if the PF says that it does not
// have this VF any more.
func (e *Engine) known(ctx context.Context, p patience, pf *PF) (r pfReport, err error) {
	silence := func(err error) bool { return errors.Is(err, errSilent) }
	err = p.retry(ctx, silence, func() error {
		if r, err = e.report(pf); err != nil {
			return err
		}

		switch told := r.operations && !r.silent(pf.VF); {
		case told:
			return nil
		case r.flags&unix.IFF_UP == 0:
			return fmt.Errorf("PF %s, VF %d: %w; %w", pf, pf.VF, errSilent, errDown)
		}

		return fmt.Errorf("PF %s, VF %d: %w", pf, pf.VF, errSilent)
	})

	return r, err
}

// baseline asks a PF for a VF that no attachment has changed yet, and waits if it says nothing. vf
// is nil in the report if the driver has no operations for VFs. It is also nil if the driver says
// nothing of any VF, as mlx5_core does for good where the PF has no eswitch, and the interface can
// do without the PF: the PF stays untouched then.
func (e *Engine) baseline(ctx context.Context, pf *PF, want function.Interface) (pfReport, error) {
	configured := want.VF != nil && *want.VF != function.VFConfig{}
	needed := configured || want.MAC != "" && want.Userspace
	r, err := e.report(pf)
	switch {
	case err != nil:
		return r, err
	case r.operations && pf.VF >= r.vfs:
		return r, fmt.Errorf("PF %s: has %d VFs, and VF %d is not among them", pf, r.vfs, pf.VF)
	case !r.silent(pf.VF), !r.others && !needed && want.MAC == "":
		return r, nil
	case r.others || needed:
		return e.known(ctx, e.patient(ctx), pf)
	}

	later, err := e.known(ctx, patienceFor(atMostHalf(ctx, e.settleTime)), pf)
	if errors.Is(err, errSilent) && ctx.Err() == nil {
		return r, nil
	}

	return later, err
}

// patience is until when one call of the Engine waits for drivers that are busy.
type patience struct {
	end   time.Time
	whole time.Duration // how long it is, for messages
}

// patient returns the patience of a call: at most half of the caller's time, because the rest is
// for undoing and for telling why. A container runtime gives an NRI plugin 2 s, and then starts the
// pod without it.
func (e *Engine) patient(ctx context.Context) patience {
	return patienceFor(atMostHalf(ctx, e.busyTime))
}

func patienceFor(whole time.Duration) patience { return patience{time.Now().Add(whole), whole} }

// atMost is a shorter patience, which ends with p.
func (p patience) atMost(wait time.Duration) patience {
	return patienceFor(max(0, min(wait, time.Until(p.end))))
}

func atMostHalf(ctx context.Context, wait time.Duration) time.Duration {
	if end, limited := ctx.Deadline(); limited {
		return min(wait, time.Until(end)/2)
	}
	return wait
}

// retry calls try until its error is none to wait for, with growing pauses. It ends with the
// patience or ctx, and then returns the last error and says so.
func (p patience) retry(ctx context.Context, passes func(error) bool, try func() error) error {
	pauses := loop.Backoff(2*time.Millisecond, 200*time.Millisecond)
	for {
		err := try()
		if err == nil || !passes(err) {
			return err
		}

		left := time.Until(p.end)
		if left <= 0 {
			return fmt.Errorf("%w (after waiting for %s)", err, p.whole.Round(time.Millisecond))
		}
		if !loop.Sleep(ctx, min(pauses.Step(), left)) {
			return fmt.Errorf("%w: %w", err, context.Cause(ctx))
		}
	}
}

// busy says whether a driver refuses a change only for a while: see quirk "busy after a change".
func busy(err error) bool { return quirk.Busy(err) }

// changeVF sends one change to a PF, and again while its driver is busy.
func (e *Engine) changeVF(ctx context.Context, p patience, pf *PF, index int, c vfChange) error {
	e.trace("PF " + pf.Name + ": " + c.what)
	err := p.retry(ctx, busy, func() error { return e.pfs.orderVF(index, pf.VF, c) })
	if err == nil {
		return nil
	}
	err = e.gated(pf, c, err)
	return fmt.Errorf("%s: PF %s refuses %s for VF %d: %w", c.fields, pf, c.what, pf.VF, err)
}

var (
	// errNoCarrier is returned for a refusal of a PF without a carrier, which may accept it when it
	// has one.
	errNoCarrier = errors.New("it has no carrier, without which some drivers refuse it")
	// errDown is returned for a refusal of a PF that the administrator has set down, or has not set
	// up yet.
	errDown = errors.New("the PF is administratively down, and some drivers want it up: set it up")
)

// gated adds to a refusal what the PF lacks that some drivers want.
func (e *Engine) gated(pf *PF, c vfChange, refusal error) error {
	if quirk.NotSupported(refusal) {
		return refusal
	}

	r, err := e.report(pf)
	switch {
	case err != nil:
	case r.flags&unix.IFF_UP == 0:
		return fmt.Errorf("%w; %w", refusal, errDown)
	case c.field == vfRates && r.flags&unix.IFF_LOWER_UP == 0:
		return fmt.Errorf("%w; %w", refusal, errNoCarrier)
	}

	return refusal
}

// order makes a PF enforce what to says, stops at the first refusal, and reads back. It waits for
// the carrier of the PF where that may be the reason: a card has none for some seconds after it
// made VFs or was brought up.
func (e *Engine) order(ctx context.Context, p patience, pf *PF, from, to VFState) error {
	changes := vfChanges(from, to)
	if len(changes) == 0 {
		return nil
	}

	r, err := e.report(pf)
	if err != nil {
		return err
	}

	for _, c := range changes {
		err := e.changeVF(ctx, p, pf, r.index, c)
		if errors.Is(err, errNoCarrier) && e.awaitCarrier(ctx, r.index) {
			err = e.changeVF(ctx, p, pf, r.index, c)
		}
		if err != nil {
			return err
		}
	}

	return e.readBack(ctx, p, pf, changes)
}

// errDropped says that a PF tells another value than the one that its driver accepted.
var errDropped = errors.New("the driver accepted it, and enforces something else")

// readBack returns an error if the PF does not tell what it accepted. Some drivers drop a value
// without an error, and some take it a moment later.
func (e *Engine) readBack(ctx context.Context, p patience, pf *PF, changes []vfChange) error {
	late := p.atMost(e.settleTime)
	dropped := func(err error) bool { return errors.Is(err, errDropped) }
	return late.retry(ctx, dropped, func() error {
		r, err := e.known(ctx, p, pf)
		if err != nil {
			return err
		}
		if r.vf == nil {
			return fmt.Errorf("PF %s: does not have VF %d any more", pf, pf.VF)
		}

		for _, c := range changes {
			if told := c.told(*r.vf); told != "" {
				return fmt.Errorf("%s: PF %s tells %s for VF %d, and not %s: %w",
					c.fields, pf, told, pf.VF, c.what, errDropped)
			}
		}

		return nil
	})
}

// awaitCarrier waits until the PF with the index has a carrier, and says whether it has one. It
// does not wait for a PF that is down.
func (e *Engine) awaitCarrier(ctx context.Context, index int) bool {
	l, err := e.host.at(index)
	if err != nil || l == nil || !l.Up {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, atMostHalf(ctx, quirk.CarrierPatience))
	defer cancel()
	return e.host.awaitCarrier(ctx, index) == nil
}
