// SPDX-License-Identifier: Apache-2.0

// Package probe finds out what the drivers of a card do with a VF, by asking them. It takes one VF
// that nobody has to a network namespace of its own, has the PF enforce each property and take it
// away, and gives the VF back as it was. It does nothing that other Functions of the card could
// notice: PF, eswitch, firmware and the number of VFs stay as they are.
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

// Times that a card may take, and how often it is asked.
const (
	settleTime  = 2 * time.Second        // to come out of a reset, as attach waits at most
	effectTime  = 500 * time.Millisecond // from an answer to its effect
	restoreTime = 30 * time.Second       // to be as it was
	pause       = 2 * time.Millisecond
	// noticed is what is no delay yet on a machine that answers at once. See [prober.noticed].
	noticed = 15 * time.Millisecond
)

// interfaceName is that of the VF's netdev while it is probed.
const interfaceName = "probe0"

// Observation is a knob of the simulated NIC by which it would do what the card did, and what that
// was.
type Observation struct {
	personality.Setting
	Does string
}

// Options of [VF].
type Options struct {
	Engine *netdev.Engine
	// Speed is that of the PF's link in Mbit/s, 0 where it is unknown.
	Speed int
	// Trace is called before each thing that is tried; it may be nil.
	Trace func(step string)
}

// VF probes a VF, and gives it back as it was: its error says if that failed, and what is left. It
// needs CAP_NET_ADMIN and CAP_SYS_ADMIN in the host's network namespace, in which it must run.
// Nobody else may use the VF meanwhile. If ctx ends, it asks nothing more, and still gives the VF
// back, which may take some 30 s. With an error the observations are not complete.
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
			err = p.all(ctx)
			observed = p.observed
			p.close()
		}

		restored, undo := restore(ctx, options.Engine, device, snapshot, place)
		notes = restored.Notes

		return errors.Join(err, undo)
	})

	return observed, notes, err
}

// restore tries again what the card refuses for a moment, also when ctx has ended.
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

// prober asks the drivers of one VF.
type prober struct {
	Options
	device   netdev.Device
	vf       int
	host     *netlink.Handle
	pod      *netlink.Handle
	pf       netlink.Link
	link     netlink.Link // in the pod
	first    netdev.VFState
	own0     net.HardwareAddr // of the VF's netdev at first
	told     bool             // the PF tells of the VF
	noticed  time.Duration    // what is no delay yet, by the time that asking takes on this machine
	observed []Observation
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

// observe notes a knob that is not at its default.
func (p *prober) observe(knob, value, does string, arguments ...any) {
	if value != (personality.Personality{}).Value(knob) {
		setting := personality.Setting{Knob: knob, Value: value}
		p.observed = append(p.observed, Observation{setting, fmt.Sprintf(does, arguments...)})
	}
}

func (p *prober) observeTime(knob string, took time.Duration, does string) {
	if took > p.noticed {
		p.observe(knob, strconv.Itoa(int(took.Milliseconds())), "%s", does)
	}
}

// all asks for everything, one after the other, as each may reset the VF.
func (p *prober) all(ctx context.Context) error {
	begin := time.Now()
	told, err := p.Engine.Told(p.device.PF)
	if err != nil {
		return err
	}

	const times = 10 // that one asks while something settles
	p.noticed = noticed + times*time.Since(begin)

	if told != nil {
		p.first, p.told = *told, true
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

// properties asks for each of the fields.
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

// putRateBack gives the VF the rate that it had, which [netdev.Engine.Restore] leaves alone because
// it did not change it.
func (p *prober) putRateBack(ctx context.Context) error {
	told, err := p.Engine.Told(p.device.PF)
	if err != nil || told == nil || told.MaxTxRate == p.first.MaxTxRate &&
		told.MinTxRate == p.first.MinTxRate {
		return err
	}
	return p.patiently(ctx, func() error {
		return p.host.LinkSetVfRate(p.pf, p.vf, p.first.MinTxRate, p.first.MaxTxRate)
	})
}

// rates looks at the maximum rate of a VF that has none.
func (p *prober) rates() {
	if p.told && p.first.MaxTxRate != 0 && p.first.MaxTxRate == p.Speed {
		p.observe("max.tell-none", "speed",
			"tells the speed of the link as the maximum rate of a VF that has none")
	}
}

// field is a property that a PF enforces.
type field struct {
	knob, name string
	set, unset func(*prober) error
	// shows says whether the PF tells that it is set, and told whether it tells of the property at
	// all; told is nil where it always does.
	shows func(netdev.VFState) bool
	told  func(netdev.VFState) bool
}

var fields = []field{
	{
		knob: "vlan", name: "VLAN",
		set:   func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 100, 0) },
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		shows: func(s netdev.VFState) bool { return s.VLAN == 100 },
	}, {
		knob: "qos", name: "QoS",
		set:   func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 100, 3) },
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		shows: func(s netdev.VFState) bool { return s.QoS == 3 },
	}, {
		knob: "vlan.ad", name: "802.1ad",
		set: func(p *prober) error {
			return p.host.LinkSetVfVlanQosProto(p.pf, p.vf, 100, 0, unix.ETH_P_8021AD)
		},
		unset: func(p *prober) error { return p.host.LinkSetVfVlanQos(p.pf, p.vf, 0, 0) },
		shows: func(s netdev.VFState) bool { return s.Proto == function.VLAN8021AD },
	}, {
		knob: "min", name: "minimum rate",
		set: func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 100, 500) },
		unset: func(p *prober) error {
			return p.host.LinkSetVfRate(p.pf, p.vf, 0,
				p.first.MaxTxRate)
		},
		shows: func(s netdev.VFState) bool { return s.MinTxRate == 100 },
	}, {
		knob: "max", name: "maximum rate",
		set:   func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 0, 500) },
		unset: func(p *prober) error { return p.host.LinkSetVfRate(p.pf, p.vf, 0, 0) },
		shows: func(s netdev.VFState) bool { return s.MaxTxRate == 500 },
	}, {
		knob: "spoofchk", name: "spoof check",
		set:   func(p *prober) error { return p.host.LinkSetVfSpoofchk(p.pf, p.vf, true) },
		unset: func(p *prober) error { return p.host.LinkSetVfSpoofchk(p.pf, p.vf, false) },
		shows: func(s netdev.VFState) bool { return s.SpoofCheck != nil && *s.SpoofCheck },
		told:  func(s netdev.VFState) bool { return s.SpoofCheck != nil },
	}, {
		knob: "trust", name: "trust",
		set:   func(p *prober) error { return p.host.LinkSetVfTrust(p.pf, p.vf, true) },
		unset: func(p *prober) error { return p.host.LinkSetVfTrust(p.pf, p.vf, false) },
		shows: func(s netdev.VFState) bool { return s.Trust != nil && *s.Trust },
		told:  func(s netdev.VFState) bool { return s.Trust != nil },
	}, {
		knob: "link", name: "link state",
		set: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf, p.vf, nl.IFLA_VF_LINK_STATE_DISABLE)
		},
		unset: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf,
				p.vf, nl.IFLA_VF_LINK_STATE_AUTO)
		},
		shows: func(s netdev.VFState) bool { return s.LinkState == function.LinkDisable },
	}, {
		knob: "link.enable", name: `link state "enable"`,
		set: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf, p.vf, nl.IFLA_VF_LINK_STATE_ENABLE)
		},
		unset: func(p *prober) error {
			return p.host.LinkSetVfState(p.pf,
				p.vf, nl.IFLA_VF_LINK_STATE_AUTO)
		},
		shows: func(s netdev.VFState) bool { return s.LinkState == function.LinkEnable },
	},
}

// plain says whether a knob has the knobs of a field beside it.
func plain(knob string) bool { return knob != "vlan.ad" && knob != "link.enable" }

// value is what was observed of a knob so far.
func (p *prober) value(knob string) string {
	for _, o := range p.observed {
		if o.Knob == knob {
			return o.Value
		}
	}
	return (personality.Personality{}).Value(knob)
}

// base is the knob without whose "ok" another one cannot be observed.
var base = map[string]string{"qos": "vlan", "vlan.ad": "vlan", "link.enable": "link"}

// field sets a property and takes it away, and looks what comes of it. It takes it away also when
// ctx has ended.
func (p *prober) field(ctx context.Context, f field) {
	if of, ok := base[f.knob]; ok && p.value(of) != personality.OK {
		return
	}

	err := p.patiently(ctx, func() error { return f.set(p) })
	if err != nil {
		p.observe(f.knob, personality.AnswerOf(err), "answers %v to a %s", err, f.name)
	} else {
		p.effect(ctx, f)
	}

	err = p.patiently(context.WithoutCancel(ctx), func() error { return f.unset(p) })
	if !plain(f.knob) || f.knob == "qos" || f.knob == "min" {
		p.settle(ctx, "")
		return
	}

	if err != nil {
		p.observe(f.knob+".zero", personality.AnswerOf(err), "answers %v to the end of a %s",
			err, f.name)
	} else if p.told && p.value(f.knob) == personality.OK && p.stays(ctx, f) {
		p.observe(f.knob+".zero", personality.Ignore,
			"answers success to the end of a %s, which stays", f.name)
	}

	p.settle(ctx, "")
}

// stays says whether the PF goes on to tell a property that was taken away.
func (p *prober) stays(ctx context.Context, f field) bool {
	return p.await(ctx, func(s netdev.VFState) bool { return !f.shows(s) }) < 0
}

// effect looks what comes of a property that was set with success. A reset is over before an effect
// is waited for.
func (p *prober) effect(ctx context.Context, f field) {
	if !p.told {
		return
	}

	begin := time.Now()
	if plain(f.knob) {
		p.settle(ctx, f.knob)
	}

	took := p.await(ctx, f.shows)
	switch {
	case took < 0 && f.told != nil && !f.told(p.first):
		p.observe(f.knob+".tell", "unknown", "does not tell the %s", f.name)
	case took < 0:
		p.observe(f.knob, personality.Ignore, "answers success to a %s, and tells none", f.name)
	case plain(f.knob) && took > p.noticed:
		p.observeTime(f.knob+".delay", time.Since(begin), "tells a "+f.name+" only after a while")
	}
}

// silent notes that the PF told nothing of the VF.
func (p *prober) silent() {
	p.observeOnce("get.busy", "EAGAIN",
		"leaves the VF out of what it tells for a while, after something was set")
}

// await waits until the PF tells something, and returns how long that took: 0 if it told so at
// once, -1 if it did not, or not before ctx ended. It waits longer for a PF that tells nothing of
// the VF.
func (p *prober) await(ctx context.Context, shows func(netdev.VFState) bool) time.Duration {
	begin, limit, first := time.Now(), effectTime, true
	for {
		told, err := p.Engine.Told(p.device.PF)
		if err == nil && told == nil {
			p.silent()
			limit = settleTime
		}

		if err == nil && told != nil && shows(*told) {
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

// busy says whether an error passes with time.
func busy(err error) bool { return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EBUSY) }

// patiently does something again until it is not refused for a moment, or ctx ends. It does it at
// least once.
func (p *prober) patiently(ctx context.Context, do func() error) error {
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

// settle waits until the VF has come out of a reset, by setting it up. It notes how long that took
// after the field was set, unless the field is "".
func (p *prober) settle(ctx context.Context, field string) {
	begin := time.Now()
	err := p.pod.LinkSetUp(p.link)
	for busy(err) && time.Since(begin) < settleTime {
		p.observeOnce("vf.up.busy", personality.AnswerOf(err),
			"answers "+err.Error()+" to the VF being set up while it resets")

		if told, err := p.Engine.Told(p.device.PF); p.told && err == nil && told == nil {
			p.silent()
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

// own is the MAC of the VF's netdev.
func (p *prober) own() string {
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
	return p.patiently(ctx, func() error { return p.host.LinkSetVfHardwareAddr(p.pf, p.vf, mac) })
}
