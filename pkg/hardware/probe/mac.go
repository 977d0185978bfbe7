// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"net"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

// probeMAC returns a locally administered address, which is used only inside the scratch namespace.
func probeMAC(number byte) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0, 0, 0x70, 0x72, number}
}

// mac probes the administrative MAC, the MAC of the VF's netdev, and which follows the other.
func (p *prober) mac(ctx context.Context) error {
	p.Trace("MAC")
	if p.reportsVF && p.first.MAC != "" && string(p.first.MAC) == p.ownMAC() {
		p.observe("mac.tell-none", "own",
			"tells the VF's own MAC where no administrative one was set")
	}

	first := probeMAC(1)
	if err := p.setMAC(ctx, first); err != nil {
		p.observe("mac", personality.AnswerOf(err), "answers %v to a MAC", err)
		p.observeZeroMAC(context.WithoutCancel(ctx))
		return ctx.Err()
	}

	p.observeFollow(ctx, first)
	p.waitForReset(ctx, "")
	p.observeOpen(ctx)
	p.observeOtherMAC(ctx)
	p.observeZeroMAC(context.WithoutCancel(ctx))

	return ctx.Err()
}

// observeFollow observes when the netdev gets the MAC that the PF set, and whether the VF may set
// it.
func (p *prober) observeFollow(ctx context.Context, mac net.HardwareAddr) {
	begin, reset := time.Now(), false
	var refused error
	for {
		err := p.setOwn(mac) // the kernel does not ask the driver if the netdev already has it
		if err == nil || !busy(err) && p.ownMAC() == mac.String() {
			break
		}

		if busy(err) {
			reset = true
			p.observeOnce("vf.mac.busy", personality.AnswerOf(err),
				"answers "+err.Error()+" to the VF's MAC while it resets")
		} else if refused = err; time.Since(begin) > effectTime {
			break
		}

		if time.Since(begin) > settleTime || !loop.Sleep(ctx, pause) {
			break
		}
	}

	took := time.Since(begin)
	if refused != nil {
		p.observe("vf.mac.equal", personality.AnswerOf(refused),
			"answers %v to the VF that wants the administrative MAC", refused)
	}

	if reset {
		p.observeTime("mac.reset", took, "resets the VF when its MAC is set")
	} else if refused != nil && p.ownMAC() == mac.String() {
		p.observeTime("mac.delay", took, "gives the VF its MAC only after a while")
	}
}

// observeOpen observes when the netdev follows the PF by itself: at once, after a reset, when it is
// set up, or never.
func (p *prober) observeOpen(ctx context.Context) {
	mac := probeMAC(2)
	if err := p.setMAC(ctx, mac); err != nil {
		return
	}

	follow := func(when string) {
		p.observe("mac.follow", when, "gives the VF's netdev the MAC that the PF set (%s)", when)
	}

	begin, limit := time.Now(), effectTime
	if p.value("mac.reset") != "0" {
		limit = settleTime
	}

	var took time.Duration
	for p.ownMAC() != mac.String() && took < limit && loop.Sleep(ctx, pause) {
		took = time.Since(begin)
	}

	switch {
	case p.ownMAC() == mac.String() && p.value("mac.reset") != "0" && took > p.measurable:
		follow("reset")
		return
	case p.ownMAC() == mac.String():
		follow("now")
		if p.value("mac.delay") == "0" {
			p.observeTime("mac.delay", took, "gives the VF its MAC only after a while")
		}
		return
	}

	p.waitForReset(ctx, "")
	if p.ownMAC() == mac.String() {
		follow("open")
	} else if p.value("vf.mac.equal") == personality.OK {
		_ = p.setOwn(mac)
	}
}

// observeOtherMAC observes whether the VF may set another MAC than the administrative one, without
// and with trust.
func (p *prober) observeOtherMAC(ctx context.Context) {
	p.waitForReset(ctx, "")
	admin := p.ownMAC()
	other := probeMAC(3)
	err := p.setOwn(other)
	if err == nil {
		p.observe("vf.mac.admin", personality.OK,
			"lets the VF have another MAC than the administrative one")
		status, err := p.Engine.ReportedVF(p.device.PF)
		if err == nil && status != nil && status.MAC == function.MAC(other.String()) {
			p.observe("vf.mac.through", "yes", "makes the VF's own MAC the administrative one")
		}

		if back, err := net.ParseMAC(admin); err == nil {
			_ = p.setOwn(back)
		}
		return
	}

	p.observe("vf.mac.admin", personality.AnswerOf(err),
		"answers %v to the VF that wants another MAC than the administrative one", err)
	if p.host.LinkSetVfTrust(p.pf, p.vf, true) != nil {
		return
	}

	p.waitFor(ctx, func(s netdev.VFState) bool { return s.Trust != nil && *s.Trust })
	p.waitForReset(ctx, "")

	if p.setOwn(probeMAC(4)) != nil {
		p.observe("vf.mac.trusted", "no", "refuses another MAC to a trusted VF as well")
	}

	_ = p.retryBusy(context.WithoutCancel(ctx), func() error {
		return p.host.LinkSetVfTrust(p.pf, p.vf, false)
	})
	p.waitFor(ctx, func(s netdev.VFState) bool { return s.Trust != nil && !*s.Trust })
	p.waitForReset(ctx, "")
}

// observeZeroMAC removes the administrative MAC, which restores the initial state unless it is
// rejected or there was one.
func (p *prober) observeZeroMAC(ctx context.Context) {
	if err := p.setMAC(ctx, make(net.HardwareAddr, 6)); err != nil {
		p.observe("mac.zero", personality.AnswerOf(err), "answers %v to a MAC of zeros", err)
		_ = p.setMAC(ctx, p.own0)
	} else if first := p.first.MAC; first != "" && string(first) != p.own0.String() &&
		!isZero(first) {
		_ = p.setMAC(ctx, first.HardwareAddr())
	}
	p.waitForReset(ctx, "")
}

// isZero reports whether a MAC consists of zeros, which most drivers report if none was set.
func isZero(mac function.MAC) bool { return strings.Trim(string(mac), "0:") == "" }
