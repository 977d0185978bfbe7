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

// probeMAC is a locally administered address, which nothing outside the scratch namespace ever
// sees.
func probeMAC(number byte) net.HardwareAddr {
	return net.HardwareAddr{0x02, 0, 0, 0x70, 0x72, number}
}

// mac asks about the administrative MAC, the one of the VF's netdev, and who follows whom.
func (p *prober) mac(ctx context.Context) error {
	p.Trace("MAC")
	if p.told && p.first.MAC != "" && string(p.first.MAC) == p.own() {
		p.observe("mac.tell-none", "own",
			"tells the VF's own MAC where no administrative one was set")
	}

	first := probeMAC(1)
	if err := p.setMAC(ctx, first); err != nil {
		p.observe("mac", personality.AnswerOf(err), "answers %v to a MAC", err)
		p.zeros(context.WithoutCancel(ctx))
		return ctx.Err()
	}

	p.follows(ctx, first)
	p.settle(ctx, "")
	p.opens(ctx)
	p.others(ctx)
	p.zeros(context.WithoutCancel(ctx))

	return ctx.Err()
}

// follows looks when the netdev has the MAC that the PF set, and whether the VF may have it.
func (p *prober) follows(ctx context.Context, mac net.HardwareAddr) {
	begin, reset := time.Now(), false
	var refused error
	for {
		err := p.setOwn(mac) // the kernel does not ask the driver where the netdev has it
		if err == nil || !busy(err) && p.own() == mac.String() {
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
	} else if refused != nil && p.own() == mac.String() {
		p.observeTime("mac.delay", took, "gives the VF its MAC only after a while")
	}
}

// opens looks whether the netdev follows the PF by itself: at once, after a reset, when it is set
// up, or never.
func (p *prober) opens(ctx context.Context) {
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
	for p.own() != mac.String() && took < limit && loop.Sleep(ctx, pause) {
		took = time.Since(begin)
	}

	switch {
	case p.own() == mac.String() && p.value("mac.reset") != "0" && took > p.noticed:
		follow("reset")
		return
	case p.own() == mac.String():
		follow("now")
		if p.value("mac.delay") == "0" {
			p.observeTime("mac.delay", took, "gives the VF its MAC only after a while")
		}
		return
	}

	p.settle(ctx, "")
	if p.own() == mac.String() {
		follow("open")
	} else if p.value("vf.mac.equal") == personality.OK {
		_ = p.setOwn(mac)
	}
}

// others looks whether the VF may have another MAC than the administrative one, by itself and when
// it is trusted.
func (p *prober) others(ctx context.Context) {
	p.settle(ctx, "")
	admin := p.own()
	other := probeMAC(3)
	err := p.setOwn(other)
	if err == nil {
		p.observe("vf.mac.admin", personality.OK,
			"lets the VF have another MAC than the administrative one")
		told, err := p.Engine.Told(p.device.PF)
		if err == nil && told != nil && told.MAC == function.MAC(other.String()) {
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

	p.await(ctx, func(s netdev.VFState) bool { return s.Trust != nil && *s.Trust })
	p.settle(ctx, "")

	if p.setOwn(probeMAC(4)) != nil {
		p.observe("vf.mac.trusted", "no", "refuses another MAC to a trusted VF as well")
	}

	_ = p.patiently(context.WithoutCancel(ctx), func() error {
		return p.host.LinkSetVfTrust(p.pf, p.vf, false)
	})
	p.await(ctx, func(s netdev.VFState) bool { return s.Trust != nil && !*s.Trust })
	p.settle(ctx, "")
}

// zeros asks for no administrative MAC, which puts back what was there, unless it is refused or
// there was one.
func (p *prober) zeros(ctx context.Context) {
	if err := p.setMAC(ctx, make(net.HardwareAddr, 6)); err != nil {
		p.observe("mac.zero", personality.AnswerOf(err), "answers %v to a MAC of zeros", err)
		_ = p.setMAC(ctx, p.own0)
	} else if first := p.first.MAC; first != "" && string(first) != p.own0.String() &&
		!zero(first) {
		_ = p.setMAC(ctx, first.HardwareAddr())
	}
	p.settle(ctx, "")
}

// zero says whether a MAC is of zeros, as most drivers tell it where none was set.
func zero(mac function.MAC) bool { return strings.Trim(string(mac), "0:") == "" }
