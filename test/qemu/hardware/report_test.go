// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/probe"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/stage"
)

// TestReport checks that "xpuctl hardware-report" writes the personality that a card plays, as far
// as it can be seen without disturbing others, and that the VF is as before.
func TestReport(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	s := stage.New(t, pf)
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	for _, p := range stage.Personalities(t) {
		t.Run(p.Name, func(t *testing.T) {
			p = slow(p)
			s.Play(t, p)
			before := s.Settled(t, 0)

			observed, notes, err := probe.VF(t.Context(), deviceOf(t, pf, 0), probe.Options{
				Engine: engine, Speed: card.Number(t, pf, "net/"+card.Netdev(pf)+"/speed"),
			})
			must.Succeed(t, err)
			report := probe.Report(probe.Card{PF: "simnic", VF: "simnic", Kernel: "6.12"}, observed,
				time.Now())
			written, err := report.Marshal()
			must.Succeed(t, err)
			t.Logf("noted %q; reported:\n%s", notes, written)
			read, err := personality.Parse(written)
			must.Succeed(t, err)

			if diff := cmp.Diff(visible(p), visible(read)); diff != "" {
				t.Errorf("what can be seen (-played +reported):\n%s", diff)
			}

			after := s.Settled(t, 0)
			if len(notes) > 0 || after.MAC == before.Own {
				after.MAC, after.Own = before.MAC, before.Own
			}

			if after.Max == speed(p) {
				after.Max = 0 // a limit of the link's speed limits nothing
			}

			after.Proto = before.Proto // has no meaning without a VLAN
			if diff := cmp.Diff(before, after); diff != "" {
				t.Errorf("after the report (-want +got):\n%s", diff)
			}
		})
	}
}

// slow returns the personality with times that are noticeable on an emulated machine, too.
func slow(p personality.Personality) personality.Personality {
	p.Deviations = slices.Clone(p.Deviations)
	for i, d := range p.Deviations {
		d.Play = slices.Clone(d.Play)
		for j, s := range d.Play {
			switch {
			case strings.HasSuffix(s.Knob, ".reset"):
				d.Play[j].Value = "800"
			case strings.HasSuffix(s.Knob, ".delay"):
				d.Play[j].Value = "400"
			}
		}

		p.Deviations[i].Play = d.Play
	}

	return p
}

// visible returns the knobs whose value can be seen without disturbing others, if their field
// exists. For a time it only has whether there is one, because an emulated machine is not exact.
func visible(p personality.Personality) map[string]string {
	seen := map[string]string{"get": p.Value("get"), "speed": p.Value("speed")}
	for _, knob := range []string{
		"mac", "mac.zero", "vlan", "vlan.zero", "min", "max", "max.zero", "spoofchk",
		"spoofchk.zero", "trust",
		"trust.zero", "link", "link.zero",
	} {
		seen[knob] = p.Value(knob)
	}

	if !stage.Tells(p) {
		return seen
	}

	of := func(field string, knobs ...string) {
		if p.Value(field) == personality.OK {
			for _, knob := range knobs {
				seen[knob] = p.Value(knob)
			}
		}
	}

	of("mac", "mac.follow", "mac.tell-none", "vf.mac.admin", "vf.mac.through", "vf.mac.busy")
	// the kernel does not ask the driver for a setting that the netdev has already
	if p.Value("mac.follow") != "now" {
		of("mac", "vf.mac.equal")
	}

	of("vlan", "qos", "vlan.ad")
	of("spoofchk", "spoofchk.tell")
	of("trust", "trust.tell")
	of("link", "link.enable")
	seen["max.tell-none"] = p.Value("max.tell-none")
	if p.Value("mac.tell") == "own" {
		seen["mac.tell-none"] = "own" // looks the same
	}

	if p.Value("vlan.proto-told") == "no" && p.Value("vlan.ad") == personality.OK {
		seen["vlan.ad"] = personality.Ignore // looks the same
	}

	times(p, seen)
	return seen
}

// times adds the times of resets, which only show if the VF's driver is busy meanwhile, and of
// settings that take effect later.
func times(p personality.Personality, seen map[string]string) {
	some := func(knob string) {
		seen[knob] = map[bool]string{true: "some", false: "none"}[p.Value(knob) != "0"]
	}
	if p.Value("vf.mac.busy") != personality.OK {
		some("mac.reset")
	}

	for _, field := range []string{"vlan", "trust", "link"} {
		if p.Value("vf.up.busy") != personality.OK && p.Value(field) == personality.OK {
			some(field + ".reset")
		}
	}

	if p.Value("mac.follow") == "now" {
		some("mac.delay")
	}

	if p.Value("trust") == personality.OK {
		some("trust.delay")
	}
}
