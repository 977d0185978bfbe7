// SPDX-License-Identifier: Apache-2.0

// Package probe finds out how the drivers of a card treat a VF. It moves one unused VF to a scratch
// network namespace, makes the PF enforce each setting and remove it again, and restores the VF. It
// does nothing that other Functions of the card could notice: PF, eswitch, firmware and the number
// of VFs stay unchanged.
package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// Times that a card may take, and how often it is polled.
const (
	settleTime  = 2 * time.Second        // to come out of a reset, like the maximum in attach
	effectTime  = 500 * time.Millisecond // from an answer to its effect
	restoreTime = 30 * time.Second       // to return to the initial state
	pause       = 2 * time.Millisecond
	// measurable is the shortest delay that can be distinguished from the machine's own. See
	// [prober.measurable].
	measurable = 15 * time.Millisecond
)

// interfaceName is the name of the VF's netdev during the probe.
const interfaceName = "probe0"

// Observation is a behaviour of the card, and the setting of the simulated NIC that reproduces it.
type Observation struct {
	personality.Setting
	Does string
}

// Options of [VF].
type Options struct {
	Engine *netdev.Engine
	// Speed is the speed of the PF's link in Mbit/s, or 0 if unknown.
	Speed int
	// Trace is called before each step; it may be nil.
	Trace func(step string)
}

// VF probes a VF and restores it. It needs CAP_NET_ADMIN and CAP_SYS_ADMIN in the host's network
// namespace, where it must run. The VF must not be used otherwise meanwhile. If ctx ends, the probe
// stops, but still restores the VF, which may take some 30 s. If an error is returned, the
// observations are incomplete; the error also says if the VF could not be restored.
func VF(
	ctx context.Context, device netdev.Device, options Options,
) (observed []Observation, notes []string, err error) {
	if options.Trace == nil {
		options.Trace = func(string) {}
	}

	err = inScratch(ctx, func(ctx context.Context, path string) error {
		want := function.Interface{Name: interfaceName}
		snapshot, place, err := options.Engine.Plan(ctx, device, path, want)
		if err != nil {
			return err
		}
		if _, err := options.Engine.Attach(ctx, device, snapshot, place, want); err != nil {
			return err
		}

		p, err := newProber(device, path, options)
		if err == nil {
			err = p.run(ctx)
			observed = p.observed
			p.close()
		}

		restored, undo := restore(ctx, options.Engine, device, snapshot, place)
		notes = restored.Notes

		return errors.Join(err, undo)
	})

	return observed, notes, err
}

// restore retries while the card is busy, even after ctx has ended.
func restore(
	ctx context.Context, engine *netdev.Engine, device netdev.Device, before netdev.Snapshot,
	place netdev.Place,
) (netdev.Restored, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
	defer cancel()

	for {
		restored, err := engine.Restore(ctx, device, before, place)
		if err == nil || errors.Is(err, netdev.ErrLeaks) || ctx.Err() != nil {
			return restored, err
		}
		if !loop.Sleep(ctx, 100*time.Millisecond) {
			return restored, err
		}
	}
}

// prober probes one VF.
type prober struct {
	Options
	device    netdev.Device
	vf        int
	host      *netlink.Handle
	pod       *netlink.Handle
	pf        netlink.Link
	link      netlink.Link // in the scratch namespace
	first     netdev.VFState
	own0      net.HardwareAddr // initial MAC of the VF's netdev
	reportsVF bool             // the PF reports the VF's state
	// shortest delay that can be distinguished from the time of a request on this machine
	measurable time.Duration
	observed   []Observation
}

func newProber(device netdev.Device, path string, options Options) (*prober, error) {
	p := &prober{Options: options, device: device, vf: device.PF.VF}
	var err error
	if p.host, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return nil, err
	}

	ns, err := netns.GetFromPath(path)
	if err != nil {
		p.close()
		return nil, err
	}
	defer ns.Close()

	if p.pod, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		p.close()
		return nil, err
	}

	p.host.DisableVFInfoCollection()
	p.pf, err = p.host.LinkByName(device.PF.Name)
	if err == nil {
		p.link, err = p.pod.LinkByName(interfaceName)
	}

	if err == nil {
		p.own0 = p.link.Attrs().HardwareAddr
		err = p.pod.LinkSetDown(p.link)
	}
	if err != nil {
		p.close()
		return nil, err
	}

	return p, nil
}

func (p *prober) close() {
	if p.pod != nil {
		p.pod.Close()
	}
	p.host.Close()
}

// observe records the value of a knob if it differs from the default.
func (p *prober) observe(knob, value, does string, arguments ...any) {
	if value != (personality.Personality{}).Value(knob) {
		setting := personality.Setting{Knob: knob, Value: value}
		p.observed = append(p.observed, Observation{setting, fmt.Sprintf(does, arguments...)})
	}
}

func (p *prober) observeTime(knob string, took time.Duration, does string) {
	if took > p.measurable {
		p.observe(knob, strconv.Itoa(int(took.Milliseconds())), "%s", does)
	}
}

// run probes everything, one step after the other, because each may reset the VF.
func (p *prober) run(ctx context.Context) error {
	begin := time.Now()
	status, err := p.Engine.ReportedVF(p.device.PF)
	if err != nil {
		return err
	}

	const times = 10 // requests while something settles
	p.measurable = measurable + times*time.Since(begin)

	if status != nil {
		p.first, p.reportsVF = *status, true
	} else {
		p.observe("get", "EOPNOTSUPP", "tells nothing of its VFs")
	}

	if p.Speed > 0 {
		p.observe("speed", strconv.Itoa(p.Speed), "has a link of %d Mbit/s", p.Speed)
	}

	p.rates()

	if err := p.mac(ctx); err != nil {
		return err
	}

	err = p.properties(ctx)
	return errors.Join(err, p.putRateBack(context.WithoutCancel(ctx)))
}

// properties probes each field.
func (p *prober) properties(ctx context.Context) error {
	for _, f := range fields {
		if err := ctx.Err(); err != nil {
			return err
		}
		p.Trace(f.name)
		p.field(ctx, f)
	}
	return ctx.Err()
}

// putRateBack restores the VF's rate. [netdev.Engine.Restore] leaves it alone, because it did not
// change it.
func (p *prober) putRateBack(ctx context.Context) error {
	status, err := p.Engine.ReportedVF(p.device.PF)
	if err != nil || status == nil || status.MaxTxRate == p.first.MaxTxRate &&
		status.MinTxRate == p.first.MinTxRate {
		return err
	}
	return p.retryBusy(ctx, func() error {
		return p.host.LinkSetVfRate(p.pf, p.vf, p.first.MinTxRate, p.first.MaxTxRate)
	})
}

// rates observes the reported maximum rate of a VF that has none.
func (p *prober) rates() {
	if p.reportsVF && p.first.MaxTxRate != 0 && p.first.MaxTxRate == p.Speed {
		p.observe("max.tell-none", "speed",
			"tells the speed of the link as the maximum rate of a VF that has none")
	}
}

// field is a setting that a PF enforces.
type field struct {
	knob, name string
	set, unset func(*prober) error
	// isSet reports whether the PF reports the setting as set. isReported reports whether the PF
	// reports the setting at all; nil means always.
	isSet      func(netdev.VFState) bool
	isReported func(netdev.VFState) bool
}

var fields = []field{
	{
		knob: "vlan", name: "VLAN",
		set:   func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 100, 0) },
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		isSet: func(s netdev.VFState) bool { return s.VLAN == 100 },
	}, {
		knob: "qos", name: "QoS",
		set:   func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 100, 3) },
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		isSet: func(s netdev.VFState) bool { return s.QoS == 3 },
	}, {
		knob: "vlan.ad", name: "802.1ad",
		set: func(p *prober) error {
			return p.host.LinkSetVfVlanQosProto(p.pf, p.vf, 100, 0, unix.ETH_P_8021AD)
		},
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		isSet: func(s netdev.VFState) bool { return s.Proto == function.VLAN8021AD },
	}, {
		knob: "min", name: "minimum rate",
		set: func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 100, 500) },
		unset: func(p *prober) error {
			return p.host.LinkSetVfRate(p.pf, p.vf, 0,
				p.first.MaxTxRate)
		},
		isSet: func(s netdev.VFState) bool { return s.MinTxRate == 100 },
	}, {
		knob: "max", name: "maximum rate",
		set:   func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 0, 500) },
		unset: func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 0, 0) },
		isSet: func(s netdev.VFState) bool { return s.MaxTxRate == 500 },
	}, {
		knob: "spoofchk", name: "spoof check",
		set:        func(p *prober) error { return p.host.LinkSetVfSpoofchk(p.pf, p.vf, true) },
		unset:      func(p *prober) error { return p.host.LinkSetVfSpoofchk(p.pf, p.vf, false) },
		isSet:      func(s netdev.VFState) bool { return s.SpoofCheck != nil && *s.SpoofCheck },
		isReported: func(s netdev.VFState) bool { return s.SpoofCheck != nil },
	}, {
		knob: "trust", name: "trust",
		set:        func(p *prober) error { return p.host.LinkSetVfTrust(p.pf, p.vf, true) },
		unset:      func(p *prober) error { return p.host.LinkSetVfTrust(p.pf, p.vf, false) },
		isSet:      func(s netdev.VFState) bool { return s.Trust != nil && *s.Trust },
		isReported: func(s netdev.VFState) bool { return s.Trust != nil },
	}, {
		knob: "link", name: "link state",
		set: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf, p.vf, nl.IFLA_VF_LINK_STATE_DISABLE)
		},
		unset: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf,
				p.vf, nl.IFLA_VF_LINK_STATE_AUTO)
		},
		isSet: func(s netdev.VFState) bool { return s.LinkState == function.LinkDisable },
	}, {
		knob: "link.enable", name: `link state "enable"`,
		set: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf, p.vf, nl.IFLA_VF_LINK_STATE_ENABLE)
		},
		unset: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf,
				p.vf, nl.IFLA_VF_LINK_STATE_AUTO)
		},
		isSet: func(s netdev.VFState) bool { return s.LinkState == function.LinkEnable },
	},
}

// isField reports whether a knob is a field, which has further knobs.
func isField(knob string) bool { return knob != "vlan.ad" && knob != "link.enable" }

// value returns the observed value of a knob so far.
func (p *prober) value(knob string) string {
	for _, o := range p.observed {
		if o.Knob == knob {
			return o.Value
		}
	}
	return (personality.Personality{}).Value(knob)
}

// prerequisites maps a knob to the knob that must be "ok" for an observation.
var prerequisites = map[string]string{"qos": "vlan", "vlan.ad": "vlan", "link.enable": "link"}

// field sets and removes a setting, and observes the effects. It removes the setting even if ctx
// has ended.
func (p *prober) field(ctx context.Context, f field) {
	if of, ok := prerequisites[f.knob]; ok && p.value(of) != personality.OK {
		return
	}

	err := p.retryBusy(ctx, func() error { return f.set(p) })
	if err != nil {
		p.observe(f.knob, personality.AnswerOf(err), "answers %v to a %s", err, f.name)
	} else {
		p.observeEffect(ctx, f)
	}

	err = p.retryBusy(context.WithoutCancel(ctx), func() error { return f.unset(p) })
	if !isField(f.knob) || f.knob == "qos" || f.knob == "min" {
		p.waitForReset(ctx, "")
		return
	}

	if err != nil {
		p.observe(f.knob+".zero", personality.AnswerOf(err), "answers %v to the end of a %s",
			err, f.name)
	} else if p.reportsVF && p.value(f.knob) == personality.OK && p.remainsSet(ctx, f) {
		p.observe(f.knob+".zero", personality.Ignore,
			"answers success to the end of a %s, which stays", f.name)
	}

	p.waitForReset(ctx, "")
}

// remainsSet reports whether the PF still reports a setting that was removed.
func (p *prober) remainsSet(ctx context.Context, f field) bool {
	return p.waitFor(ctx, func(s netdev.VFState) bool { return !f.isSet(s) }) < 0
}

// observeEffect observes the effect of a successful setting. It first waits for the end of a reset.
func (p *prober) observeEffect(ctx context.Context, f field) {
	if !p.reportsVF {
		return
	}

	begin := time.Now()
	if isField(f.knob) {
		p.waitForReset(ctx, f.knob)
	}

	took := p.waitFor(ctx, f.isSet)
	switch {
	case took < 0 && f.isReported != nil && !f.isReported(p.first):
		p.observe(f.knob+".tell", "unknown", "does not tell the %s", f.name)
	case took < 0:
		p.observe(f.knob, personality.Ignore, "answers success to a %s, and tells none", f.name)
	case isField(f.knob) && took > p.measurable:
		p.observeTime(f.knob+".delay", time.Since(begin), "tells a "+f.name+" only after a while")
	}
}

// observeSilence records that the PF reported nothing about the VF.
func (p *prober) observeSilence() {
	p.observeOnce("get.busy", "EAGAIN",
		"leaves the VF out of what it tells for a while, after something was set")
}

// waitFor waits until isSet is true for the state that the PF reports, and returns how long that
// took: 0 if it was true at once, -1 if it did not become true in time or ctx ended. It waits
// longer if the PF reports nothing about the VF.
func (p *prober) waitFor(ctx context.Context, shows func(netdev.VFState) bool) time.Duration {
	begin, limit, first := time.Now(), effectTime, true
	for {
		status, err := p.Engine.ReportedVF(p.device.PF)
		if err == nil && status == nil {
			p.observeSilence()
			limit = settleTime
		}

		if err == nil && status != nil && shows(*status) {
			if first {
				return 0
			}
			return time.Since(begin)
		}

		first = false
		if time.Since(begin) > limit || !loop.Sleep(ctx, pause) {
			return -1
		}
	}
}

func (p *prober) observeOnce(knob, value, does string) {
	if p.value(knob) == (personality.Personality{}).Value(knob) {
		p.observe(knob, value, "%s", does)
	}
}

// busy reports whether an error is temporary.
func busy(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EBUSY) }

// retryBusy calls do at least once, and again while it fails temporarily and ctx has not ended.
func (p *prober) retryBusy(ctx context.Context, do func() error) error {
	begin := time.Now()
	for {
		err := do()
		if !busy(err) || time.Since(begin) > settleTime {
			return err
		}

		p.observeOnce("set.busy", personality.AnswerOf(err),
			"answers "+err.Error()+" to a change for a while after another")
		if !loop.Sleep(ctx, pause) {
			return err
		}
	}
}

// waitForReset waits for the end of a reset, by setting the VF up. It records the duration for the
// field, unless the field is "".
func (p *prober) waitForReset(ctx context.Context, field string) {
	begin := time.Now()
	err := p.pod.LinkSetUp(p.link)
	for busy(err) && time.Since(begin) < settleTime {
		p.observeOnce("vf.up.busy", personality.AnswerOf(err),
			"answers "+err.Error()+" to the VF being set up while it resets")

		if status, err := p.Engine.ReportedVF(p.device.PF); p.reportsVF && err == nil && status == nil {
			p.observeSilence()
		}

		if !loop.Sleep(ctx, pause) {
			break
		}
		err = p.pod.LinkSetUp(p.link)
	}

	if field != "" && p.value("vf.up.busy") != personality.OK {
		p.observeTime(field+".reset", time.Since(begin), "resets the VF when its "+field+" is set")
	}

	_ = p.pod.LinkSetDown(p.link)
}

// ownMAC returns the MAC of the VF's netdev.
func (p *prober) ownMAC() string {
	link, err := p.pod.LinkByIndex(p.link.Attrs().Index)
	if err != nil {
		return ""
	}
	return link.Attrs().HardwareAddr.String()
}

func (p *prober) setOwn(mac net.HardwareAddr) error {
	return p.pod.LinkSetHardwareAddr(p.link, mac)
}

func (p *prober) setMAC(ctx context.Context, mac net.HardwareAddr) error {
	return p.retryBusy(ctx, func() error { return p.host.LinkSetVfHardwareAddr(p.pf, p.vf, mac) })
}
