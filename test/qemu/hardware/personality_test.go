// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/stage"
)

// Limits for an attachment and a release. The agent tries again after errors that pass, and gives
// up after some time.
const (
	attachTime  = 2 * time.Second // without emulation
	restoreTime = 5 * time.Second // for one call
	releaseTime = 10 * time.Second
)

// wish is a setting that a pod requests for a VF.
type wish struct {
	knob  string // the personality's knob for the setting
	field string // the field that an error must name
	ask   func(*function.Interface)
}

// wishes are all settings that a pod can request for a VF, each without the others except the VLAN.
var wishes = []wish{
	{"mac", "mac", func(i *function.Interface) { i.MAC = "02:00:00:00:00:21" }},
	{"vlan", "vf.vlan", func(i *function.Interface) { i.VF.VLAN = new(100) }},
	{"qos", "vf.qos", func(i *function.Interface) { i.VF.VLAN, i.VF.QoS = new(100), new(3) }},
	{"vlan.ad", "vf.vlanProtocol", func(i *function.Interface) {
		i.VF.VLAN, i.VF.Proto = new(100), function.VLAN8021AD
	}},
	{"min", "vf.minTxRate", func(i *function.Interface) { i.VF.MinTxRate = new(100) }},
	{"max", "vf.maxTxRate", func(i *function.Interface) { i.VF.MaxTxRate = new(500) }},
	{"spoofchk", "vf.spoofCheck", func(i *function.Interface) { i.VF.SpoofCheck = new(true) }},
	{"trust", "vf.trust", func(i *function.Interface) { i.VF.Trust = new(true) }},
	{"link.enable", "vf.linkState", func(i *function.Interface) {
		i.VF.LinkState = function.LinkEnable
	}},
}

// TestPersonalities plays the drivers of other cards. A pod must have what it asked for within 2 s,
// or an error must name the field. After the release the VF is as before, or the engine has noted a
// difference that isolates the next owner as well, or an error keeps the VF from the next owner.
func TestPersonalities(t *testing.T) {
	card.InGuest(t, "simnic")
	pf := card.PFs(t)[0]
	s := stage.New(t, pf)
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	plain := &lives{
		stage: s, engine: engine, pf: pf, device: deviceOf(t, pf, 0), limit: time.Minute,
	}
	slow := plain.calibrate(t)
	for _, p := range stage.Personalities(t) {
		t.Run(p.Name, func(t *testing.T) {
			s.Play(t, p)
			l := *plain
			l.personality, l.limit = p, attachTime+slow
			l.all(t)
		})
	}
}

// lives are the lives of a VF with one personality.
type lives struct {
	stage       *stage.Stage
	engine      *netdev.Engine
	personality personality.Personality
	pf          pci.Address
	device      netdev.Device
	limit       time.Duration // for an attachment
}

// calibrate returns how much longer an attachment takes on this emulated machine, measured with a
// driver that does everything at once.
func (l *lives) calibrate(t *testing.T) time.Duration {
	t.Helper()
	want := function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(100)}}
	begin := time.Now()
	h, err := l.attach(t, want)
	must.Succeed(t, err)
	took := time.Since(begin)
	l.wantReleased(t, h)

	const attempts = 10 // maximum for one attachment
	t.Logf("an attachment that waits for nothing takes %s", took.Round(time.Millisecond))

	return attempts * took
}

func (l *lives) all(t *testing.T) {
	everything := function.Interface{Name: "net1", MTU: 1400, VF: &function.VFConfig{}}
	for _, w := range wishes {
		if stage.Grants(l.personality, w.knob) && w.knob != "vlan.ad" {
			w.ask(&everything)
		}
	}

	l.run(t, "everything that it has", func(t *testing.T) { l.live(t, everything, nil, nil) })
	for _, w := range wishes {
		if stage.Grants(l.personality, w.knob) && w.knob != "vlan.ad" {
			continue
		}
		l.run(t, w.field, func(t *testing.T) {
			want := function.Interface{Name: "net1", VF: &function.VFConfig{}}
			w.ask(&want)
			l.single(t, w, want)
		})
	}

	l.run(t, "VF in reset", func(t *testing.T) {
		l.live(t, everything, func() { l.reset(t) }, nil)
	})
	l.run(t, "hostile pod", func(t *testing.T) {
		l.live(t, everything, nil, func(pod *netns.Namespace) { vandalise(t, pod) })
	})

	if stage.Tells(l.personality) {
		l.run(t, "PF silent at release", func(t *testing.T) { l.silent(t, everything) })
		l.run(t, "PF down at release", func(t *testing.T) { l.down(t, everything) })
	}
}

// run runs a life, and restores the VF if the life fails.
func (l *lives) run(t *testing.T, name string, life func(*testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Cleanup(func() {
			if t.Failed() {
				l.stage.Write(t, "")
				l.stage.Clear(t)
				l.stage.Write(t, l.personality.Script())
			}
		})
		life(t)
	})
}

// held is a VF in a pod.
type held struct {
	snapshot netdev.Snapshot
	place    netdev.Place
	pod      *netns.Namespace
	before   stage.VF
	name     string // name of its netdev on the host
}

// attach tries for as long as an attachment may take, as the agent does.
func (l *lives) attach(t *testing.T, want function.Interface) (held, error) {
	t.Helper()
	h := held{pod: netns.New(t), before: l.stage.Settled(t, 0), name: l.device.Name}
	begin := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), l.limit)
	defer cancel()

	for {
		var err error
		h.snapshot, h.place, err = l.engine.Plan(ctx, l.device, h.pod.Path(), want)
		if err == nil {
			_, err = l.engine.Attach(ctx, l.device, h.snapshot, h.place, want)
		}

		if took := time.Since(begin); took > l.limit+restoreTime {
			t.Errorf("attach took %s", took)
		}
		if err == nil || time.Since(begin) > l.limit/2 {
			return h, err
		}
	}
}

// release tries for as long as a release may take, as the agent does. It returns the last error.
func (l *lives) release(t *testing.T, h held) (netdev.Restored, error) {
	t.Helper()
	begin := time.Now()
	for {
		restored, err := l.restore(t, h)
		if err == nil || errors.Is(err, netdev.ErrLeaks) {
			return restored, err
		}
		if time.Since(begin) > releaseTime {
			return restored, fmt.Errorf("for %s: %w", releaseTime, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// restore calls Restore once and checks the duration of the call.
func (l *lives) restore(t *testing.T, h held) (netdev.Restored, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), restoreTime)
	defer cancel()

	begin := time.Now()
	restored, err := l.engine.Restore(ctx, l.device, h.snapshot, h.place)
	if took := time.Since(begin); took > restoreTime+time.Second {
		t.Errorf("Restore took %s, with a context of %s", took, restoreTime)
	}
	return restored, err
}

// live attaches and releases the VF, and checks both. It calls before, which changes the driver,
// before the attachment, and it calls does while the pod has the interface.
func (l *lives) live(
	t *testing.T, want function.Interface, before func(), does func(*netns.Namespace),
) {
	t.Helper()
	if before != nil {
		before()
	}

	begin := time.Now()
	h, err := l.attach(t, want)
	if err != nil {
		t.Fatalf("after %s: %v", time.Since(begin), err)
	}

	t.Logf("attached after %s", time.Since(begin).Round(time.Millisecond))
	l.wantAttached(t, h, want)

	if does != nil {
		does(h.pod)
	}

	l.wantReleased(t, h)
}

// single requests one setting that the driver does not support, or does not report. The pod has the
// setting, or does not start, with an error that names the field.
func (l *lives) single(t *testing.T, w wish, want function.Interface) {
	t.Helper()
	h, err := l.attach(t, want)
	if err == nil {
		l.wantAttached(t, h, want)
		l.wantReleased(t, h)
		return
	}

	t.Log(err)
	if !strings.Contains(err.Error(), w.field) {
		t.Errorf("error %v, want one that names %s", err, w.field)
	}
	if diff := cmp.Diff(h.before, l.stage.Settled(t, 0)); diff != "" {
		t.Errorf("after the refusal (-want +got):\n%s", diff)
	}
	if card.Netdev(card.VF(t, l.pf, 0)) != h.name {
		t.Errorf("netdev %s is not on the host", h.name)
	}
}

// wantAttached compares the settings in effect with the request.
func (l *lives) wantAttached(t *testing.T, h held, want function.Interface) {
	t.Helper()
	got, expected := l.stage.Settled(t, 0), h.before
	if want.MAC != "" {
		expected.Own = string(want.MAC)
		if stage.Tells(l.personality) {
			expected.MAC = string(want.MAC)
		}
	}

	if vf := want.VF; stage.Tells(l.personality) {
		set(&expected.VLAN, vf.VLAN)
		set(&expected.QoS, vf.QoS)
		set(&expected.Min, vf.MinTxRate)
		set(&expected.Max, vf.MaxTxRate)
		expected.SpoofChk += number(vf.SpoofCheck)
		expected.Trust += number(vf.Trust)
		if vf.LinkState == function.LinkEnable {
			expected.Link = 1
		}

		if vf.Proto == function.VLAN8021AD {
			expected.Proto = "88a8"
		}
	}

	if diff := cmp.Diff(expected, got); diff != "" {
		t.Errorf("in effect for the pod (-want +got):\n%s", diff)
	}

	link, err := h.pod.Handle().LinkByName(want.Name)
	must.Succeed(t, err)
	if a := link.Attrs(); a.RawFlags&unix.IFF_UP == 0 || want.MTU != 0 && a.MTU != want.MTU {
		t.Errorf("%s in the pod: %+v", want.Name, a)
	}
}

func set(to, value *int) {
	if value != nil {
		*to = *value
	}
}

func number(b *bool) int {
	if b != nil && *b {
		return 1
	}
	return 0
}

// wantReleased checks that a release has one of the three outcomes.
func (l *lives) wantReleased(t *testing.T, h held) {
	t.Helper()
	restored, err := l.release(t, h)
	if errors.Is(err, netdev.ErrLeaks) {
		t.Logf("kept from the next owner: %v", err)
		return
	}
	if err != nil {
		t.Fatal(err)
	}

	now, before := l.stage.Settled(t, 0), h.before
	for _, vf := range []*stage.VF{&now, &before} {
		if vf.Max == speed(l.personality) {
			vf.Max = 0 // a limit of the link's speed limits nothing
		}
	}

	if now.VLAN == 0 {
		now.Proto = h.before.Proto // has no meaning without a VLAN
	}

	if len(restored.Notes) > 0 {
		t.Logf("noted: %q", restored.Notes)
		now.MAC, now.Own = h.before.MAC, h.before.Own // other MACs isolate the next owner as well
	}

	if now.MAC == h.before.Own && l.tellsOwn() {
		now.MAC = h.before.MAC // the reported MAC has become an administrative one
	}
	if diff := cmp.Diff(before, now); diff != "" {
		t.Errorf("after the release (-want +got):\n%s", diff)
	}
	if name := card.Netdev(card.VF(t, l.pf, 0)); name != h.name || restored.Name != h.name {
		t.Errorf("netdev of the host is %q, told as %q, want %q", name, restored.Name, h.name)
	}
}

// tellsOwn reports whether the PF reports a MAC that the VF chose as the enforced MAC.
func (l *lives) tellsOwn() bool {
	p := l.personality
	return p.Value("mac.tell-none") == "own" || p.Value("mac.tell") == "own" ||
		p.Value("vf.mac.through") == "yes"
}

func speed(p personality.Personality) (mbits int) {
	_, _ = fmt.Sscan(p.Value("speed"), &mbits)
	return mbits
}

// reset makes the driver reset the VF by a command that changes nothing. It does nothing with a
// driver that never resets.
func (l *lives) reset(t *testing.T) {
	t.Helper()
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must.Succeed(t, err)
	defer handle.Close()

	pf := linkOf(t, l.device.PF.Name)

	if l.personality.Value("vlan.reset") != "0" {
		must.Succeed(t, handle.LinkSetVfVlanQos(pf, 0, 0, 0))
	}
}

// silent checks that a release has no outcome while the PF reports nothing, and that the next try
// has one.
func (l *lives) silent(t *testing.T, want function.Interface) {
	t.Helper()
	h, err := l.attach(t, want)
	must.Succeed(t, err)
	l.stage.Settled(t, 0)

	l.stage.Write(t, l.personality.Script()+"get=EAGAIN\n")
	if restored, err := l.restore(t, h); err == nil {
		t.Errorf("released with %+v while the PF told nothing", restored)
	} else {
		t.Log(err)
	}

	l.stage.Write(t, l.personality.Script())
	l.wantReleased(t, h)
}

// down sets the PF down when the Function is released.
func (l *lives) down(t *testing.T, want function.Interface) {
	t.Helper()
	h, err := l.attach(t, want)
	must.Succeed(t, err)
	pf := linkOf(t, l.device.PF.Name)
	must.Succeed(t, netlink.LinkSetDown(pf))
	defer func() { must.Succeed(t, netlink.LinkSetUp(pf)) }()

	restored, err := l.restore(t, h)
	t.Logf("while the PF is down: %+v, %v", restored, err)
	must.Succeed(t, netlink.LinkSetUp(pf))
	l.wantReleased(t, h)
}

// vandalise does to the pod's interface what a tenant with CAP_NET_ADMIN can do. The driver may
// refuse some changes.
func vandalise(t *testing.T, pod *netns.Namespace) {
	t.Helper()
	handle := pod.Handle()
	link, err := handle.LinkByName("net1")
	must.Succeed(t, err)

	must.Succeed(t, handle.LinkAdd(&netlink.Macvlan{
		LinkAttrs: netlink.LinkAttrs{Name: "evil", ParentIndex: link.Attrs().Index},
		Mode:      netlink.MACVLAN_MODE_PRIVATE,
	}))

	must.Succeed(t, handle.LinkSetAlias(link, "evil"))
	must.Succeed(t, handle.LinkAddAltName(link, "evil-altname"))
	must.Succeed(t, handle.SetPromiscOn(link))
	must.Succeed(t, handle.LinkSetAllmulticastOn(link))
	_ = handle.LinkSetMTU(link, 1300)
	must.Succeed(t, handle.LinkSetDown(link))
	_ = handle.LinkSetHardwareAddr(link, []byte{0x02, 0, 0, 0, 0, 0x66})
	must.Succeed(t, handle.LinkSetName(link, "evil0"))
	_ = handle.LinkSetUp(link)
}
