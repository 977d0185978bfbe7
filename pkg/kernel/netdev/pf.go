// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/request"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// pfPort reads and changes what PFs enforce for their VFs. A [conn] does this by rtnetlink, and
// tests use a fake.
type pfPort interface {
	askPF(name string, vf int) (pfReport, error)
	orderVF(index, vf int, change vfChange) error
}

// pfReport is what the netdev of a PF reports about itself and about one VF, in one RTM_NEWLINK.
type pfReport struct {
	index       int    // ifindex of the netdev
	flags       uint32 // IFF_* of include/uapi/linux/if.h
	bus, parent string // device of the netdev, such as "pci" and "0000:3b:00.0"
	vfs         int    // number of VFs of the device (IFLA_NUM_VF)
	// operations reports whether the driver implements ndo_get_vf_config, so that the answer
	// contains IFLA_VFINFO_LIST.
	operations bool
	others     bool     // the report contains other VFs
	vf         *VFState // nil if the report lacks the VF
	linkType   uint16   // ARPHRD_* of include/uapi/linux/if_arp.h
}

// silent reports whether the driver leaves out a VF that exists. If the driver fails to report a
// VF, the kernel leaves the VF out without an error (rtnl_fill_vfinfo of net/core/rtnetlink.c).
func (r pfReport) silent(vf int) bool { return r.operations && r.vf == nil && vf < r.vfs }

func (r pfReport) infiniBand() bool { return r.linkType == unix.ARPHRD_INFINIBAND }

// askPF reads a PF and one of its VFs. It leaves out statistics, because with them the answer of a
// PF with about 200 VFs would exceed the 64 KiB of an attribute.
func (c *conn) askPF(name string, vf int) (pfReport, error) {
	mask := number(unix.IFLA_EXT_MASK, nl.RTEXT_FILTER_VF|request.SkipStatistics)
	message, err := c.ask(0, text(unix.IFLA_IFNAME, name), mask)
	if err != nil {
		return pfReport{}, err
	}

	header := nl.DeserializeIfInfomsg(message)

	report := parsePF(message[unix.SizeofIfInfomsg:], vf)
	report.index, report.flags = int(header.Index), header.Flags
	report.linkType = header.Type
	if report.infiniBand() && report.vf != nil {
		// It is the beginning of the PF's own hardware address (ipoib_get_vf_config of
		// drivers/infiniband/ulp/ipoib/ipoib_main.c).
		report.vf.MAC = ""
	}

	return report, nil
}

// parsePF reads the attributes of a PF's RTM_NEWLINK.
func parsePF(attributes []byte, vf int) (report pfReport) {
	attrs, _ := attribute.Parse(attributes) // what follows a malformed attribute is ignored
	report.parent = attrs.Text(unix.IFLA_PARENT_DEV_NAME)
	report.bus = attrs.Text(unix.IFLA_PARENT_DEV_BUS_NAME)
	if number := uint32s(attrs[unix.IFLA_NUM_VF]); len(number) > 0 {
		report.vfs = int(number[0])
	}

	list, found := attrs[unix.IFLA_VFINFO_LIST]
	report.operations = found
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

// orderVF sends one change of a VF to the PF's netdev with the index.
func (c *conn) orderVF(index, vf int, change vfChange) error {
	return c.library(func(h *netlink.Handle) error { return sendVF(h, index, vf, change) })
}

func sendVF(h *netlink.Handle, index, vf int, change vfChange) error {
	pf, to := reference(index), change.to
	switch change.field {
	case vfMAC:
		return h.LinkSetVfHardwareAddr(pf, vf, to.MAC.HardwareAddr())
	case vfTag:
		if to.tagsAD() {
			return h.LinkSetVfVlanQosProto(pf, vf, to.VLAN, to.QoS, unix.ETH_P_8021AD)
		}
		// This older message suffices for 802.1Q, and more drivers support it.
		return h.LinkSetVfVlanQos(pf, vf, to.VLAN, to.QoS)
	case vfRates:
		return h.LinkSetVfRate(pf, vf, to.MinTxRate, to.MaxTxRate)
	case vfSpoofCheck:
		return h.LinkSetVfSpoofchk(pf, vf, *to.SpoofCheck)
	case vfTrust:
		return h.LinkSetVfTrust(pf, vf, *to.Trust)
	case vfLinkState:
		return h.LinkSetVfState(pf, vf, linkStateNumber(to.LinkState))
	case vfNodeGUID:
		return h.LinkSetVfGUID(pf, vf, to.NodeGUID.HardwareAddr(), nl.IFLA_VF_IB_NODE_GUID)
	case vfPortGUID:
		return h.LinkSetVfGUID(pf, vf, to.PortGUID.HardwareAddr(), nl.IFLA_VF_IB_PORT_GUID)
	}

	return fmt.Errorf("VF field %d: must be one of the known fields", change.field)
}

// errSilent says that a PF does not report a VF that exists. It may report the VF later.
var errSilent = errors.New("tells nothing about the VF, whose state is unknown")

// report reads a PF. It returns an error if the netdev belongs to another device, because netdevs
// can be renamed at any time. Orders that follow go to the index in the report.
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

// ReportedVF returns what a PF reports about a VF now. It returns nil if the PF does not report the
// VF, because its driver has no operations for VFs or does not answer at present.
func (e *Engine) ReportedVF(pf *PF) (*VFState, error) {
	r, err := e.report(pf)
	return r.vf, err
}

// known reads a PF that reported the VF before. It waits while the PF leaves the VF out, because
// drivers do this while they reset the VF. The vf in the report is nil only if the PF has fewer VFs
// now, so that the VF no longer exists.
func (e *Engine) known(ctx context.Context, p patience, pf *PF) (r pfReport, err error) {
	silence := func(err error) bool { return errors.Is(err, errSilent) }
	err = p.retry(ctx, silence, func() error {
		if r, err = e.report(pf); err != nil {
			return err
		}

		switch {
		case r.operations && !r.silent(pf.VF):
			return nil
		case r.flags&unix.IFF_UP == 0:
			return fmt.Errorf("PF %s, VF %d: %w; %w", pf, pf.VF, errSilent, errDown)
		}

		return fmt.Errorf("PF %s, VF %d: %w", pf, pf.VF, errSilent)
	})

	return r, err
}

// baseline reads a PF before the first change of one of its VFs. It waits if the PF leaves the VF
// out.
//
// The vf in the report is nil if the driver has no operations for VFs. It is also nil if the driver
// reports no VF at all and the interface does not need the PF. In this case the PF stays untouched.
// For example, mlx5_core never reports VFs of a PF without an eswitch.
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

// patience is how long one call of the Engine waits for busy drivers.
type patience struct {
	end   time.Time
	whole time.Duration // the whole duration, for messages
}

// patient returns the patience of a call. It is at most half of the caller's time, because the rest
// is needed for the undo and for the error message. A container runtime gives an NRI plugin 2 s,
// and then starts the pod without the plugin.
func (e *Engine) patient(ctx context.Context) patience {
	return patienceFor(atMostHalf(ctx, e.busyTime))
}

func patienceFor(whole time.Duration) patience { return patience{time.Now().Add(whole), whole} }

// atMost returns a patience that ends after wait, or with p if p ends earlier.
func (p patience) atMost(wait time.Duration) patience {
	return patienceFor(max(0, min(wait, time.Until(p.end))))
}

func atMostHalf(ctx context.Context, wait time.Duration) time.Duration {
	if end, limited := ctx.Deadline(); limited {
		return min(wait, time.Until(end)/2)
	}
	return wait
}

// retry calls try until it succeeds or fails with an error that does not pass. The pauses in
// between grow. If the patience or ctx ends first, retry returns the last error and adds how long
// it waited.
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

// busy reports whether a driver refuses a change only for a while: see quirk "busy after a change".
func busy(err error) bool { return quirk.Busy(err) }

// changeVF sends one change to a PF, and repeats it while the driver is busy.
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
	// errNoCarrier is added to a refusal of a PF without a carrier. The PF may accept the change
	// once it has a carrier.
	errNoCarrier = errors.New("it has no carrier, without which some drivers refuse it")
	// errDown is added to a refusal of a PF that is administratively down.
	errDown = errors.New("the PF is administratively down, and some drivers want it up: set it up")
)

// gated adds to a refusal the state of the PF that may have caused it: some drivers want the PF to
// be up, or to have a carrier.
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

// order makes a PF enforce the properties in to, and reads them back. It stops at the first
// refusal.
//
// If a PF without a carrier refuses a change, order waits for the carrier and tries again, because
// a card has no carrier for some seconds after it made VFs or was set up.
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

// errDropped says that a PF reports another value than the one that its driver accepted.
var errDropped = errors.New("the driver accepted it, and enforces something else")

// readBack returns an error unless the PF reports the values that it accepted. Some drivers drop a
// value without an error, and some need a moment until they report it.
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
			if other := c.missedBy(*r.vf); other != "" {
				return fmt.Errorf("%s: PF %s tells %s for VF %d, and not %s: %w",
					c.fields, pf, other, pf.VF, c.what, errDropped)
			}
		}

		return nil
	})
}

// awaitCarrier waits until the PF with the index has a carrier, and reports whether it has one. It
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
