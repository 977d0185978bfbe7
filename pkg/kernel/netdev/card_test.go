// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const (
	pfAddress = "0000:3b:00.0"
	zeros     = "00:00:00:00:00:00"
	podsMAC   = "02:00:00:00:00:01"
	adminsMAC = "02:00:00:00:00:70"
)

func deviceOfCard() netdev.Device {
	return netdev.Device{Name: hostName, PF: &netdev.PF{Name: "ens1f0", Address: pfAddress, VF: 0}}
}

// newCard returns a world whose engine is patient, and a card without faults in it.
func newCard(t *testing.T) (*world, *netdev.Card) {
	t.Helper()
	w := newWorld(t, nil)
	c := &netdev.Card{Address: pfAddress, VF: netdev.VFState{
		MAC: zeros, Proto: "802.1q", SpoofCheck: new(true), Trust: new(false), LinkState: "auto",
	}}
	w.engine.Play(c, 10*time.Second, 5*time.Second)
	return w, c
}

// impatiently runs during with an engine that waits only briefly for the card.
func impatiently(w *world, c *netdev.Card, during func()) {
	w.engine.Play(c, 20*time.Millisecond, 30*time.Millisecond)
	defer w.engine.Play(c, 10*time.Second, 5*time.Second)
	during()
}

// attached is a VF of a card in a pod.
type attached struct {
	before   netdev.Snapshot
	place    netdev.Place
	observed netdev.Observed
	want     function.Interface
}

func attachCard(t *testing.T, w *world, want function.Interface) (a attached, err error) {
	t.Helper()
	a.want = want
	device := deviceOfCard()
	if want.Userspace {
		device.Name = ""
	}
	if a.before, a.place, err = w.engine.Plan(t.Context(), device, w.pod.Path(), want); err != nil {
		return a, err
	}

	a.observed, err = w.engine.Attach(t.Context(), device, a.before, a.place, want)
	return a, err
}

func (a attached) restore(t *testing.T, w *world) (netdev.Restored, error) {
	t.Helper()
	return w.engine.Restore(t.Context(), netdev.Device{PF: deviceOfCard().PF}, a.before, a.place)
}

func (a attached) check(t *testing.T, w *world, expected netdev.Expected) ([]string, error) {
	t.Helper()
	return w.engine.Check(t.Context(), deviceOfCard(), netdev.Attached{
		Before: a.before, Place: a.place, Want: a.want, Observed: a.observed, Expected: expected,
	})
}

func mentions(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want one with %q", err, text)
	}
}

// notes compares the beginnings of the notes of a release.
func notes(t *testing.T, restored netdev.Restored, want ...string) {
	t.Helper()
	for i, note := range restored.Notes {
		if i >= len(want) || !strings.HasPrefix(note, want[i]) {
			t.Errorf("note %q, want %q", note, want)
		}
	}

	if len(restored.Notes) < len(want) {
		t.Errorf("notes %q, want %q", restored.Notes, want)
	}
}

// everything returns an interface that uses every property of a PF.
func everything() function.Interface {
	return function.Interface{Name: "net1", MAC: podsMAC, VF: &function.VFConfig{
		VLAN: new(100), QoS: new(3), MaxTxRate: new(500), SpoofCheck: new(false), Trust: new(true),
		LinkState: "enable",
	}}
}

// TestCardRoundTrip checks that each property is ordered once for the attachment and once for the
// release.
func TestCardRoundTrip(t *testing.T) {
	w, c := newCard(t)
	before := c.Enforced()
	a, err := attachCard(t, w, everything())
	must.Succeed(t, err)

	want := []string{
		"MAC " + podsMAC, "VLAN 100 qos 3 proto 802.1q", "rates of 0-500 Mbit/s", "spoof check off",
		"trust on", "link state enable",
	}
	if diff := cmp.Diff(want, c.Orders()); diff != "" {
		t.Errorf("attached by (-want +got):\n%s", diff)
	}
	if got, err := a.check(t, w, netdev.Expected{MAC: podsMAC}); err != nil || len(got) > 0 {
		t.Errorf("check: %q, %v", got, err)
	}

	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
	if got := c.Orders(); len(got) != len(want) {
		t.Errorf("released by %q", got)
	}
	if diff := cmp.Diff(before, c.Enforced()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestAdministratorsMAC covers a free VF whose MAC an administrator has set, but whose netdev does
// not have it yet and accepts no other MAC (igbvf). The pod gets this MAC, the first release
// succeeds, and the PF keeps the MAC.
func TestAdministratorsMAC(t *testing.T) {
	w, c := newCard(t)
	c.VF.MAC = adminsMAC
	c.TakeMAC = func(mac function.MAC, enforced netdev.VFState) error {
		if mac != enforced.MAC {
			return unix.EADDRNOTAVAIL
		}
		return nil
	}

	a, err := attachCard(t, w, function.Interface{Name: "net1"})
	must.Succeed(t, err)
	if a.observed.MAC != adminsMAC {
		t.Errorf("the pod has %s, want %s", a.observed.MAC, adminsMAC)
	}

	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored, "mac is "+adminsMAC+", was ")
	if got := c.Orders(); len(got) > 0 || c.Enforced().MAC != adminsMAC {
		t.Errorf("the PF was told %q, and has MAC %s", got, c.Enforced().MAC)
	}
}

// TestOwnMACIsNotWrittenBack covers a PF that reports the MAC that the VF gave itself, because the
// pod or the driver changed it. A release must not write it back, because it would become an
// administrative MAC.
func TestOwnMACIsNotWrittenBack(t *testing.T) {
	w, c := newCard(t)
	c.VF.MAC = function.MAC(get(t, w.host, hostName).Attrs().HardwareAddr.String())
	a, err := attachCard(t, w, function.Interface{Name: "net1"})
	must.Succeed(t, err)
	c.VF.MAC = "02:00:00:00:00:33"
	if got, err := a.check(t, w, netdev.Expected{}); err != nil || len(got) > 0 {
		t.Errorf("check: %q, %v", got, err)
	}

	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored, "vf mac is 02:00:00:00:00:33, was ")
	if got := c.Orders(); len(got) > 0 {
		t.Errorf("the PF was told %q", got)
	}
}

// TestZerosRefused covers a PF that reports zeros as the MAC of a VF and refuses to set them. After
// the release the VF has a MAC other than the pod's.
func TestZerosRefused(t *testing.T) {
	for name, userspace := range map[string]bool{"netdev": false, "without a netdev": true} {
		t.Run(name, func(t *testing.T) {
			w, c := newCard(t)
			own := function.MAC(get(t, w.host, hostName).Attrs().HardwareAddr.String())

			c.Refuse = func(order string) error {
				if order == "MAC "+zeros {
					return unix.EINVAL
				}
				return nil
			}

			a, err := attachCard(t,
				w, function.Interface{Name: "net1", MAC: podsMAC, Userspace: userspace})
			must.Succeed(t, err)
			restored, err := a.restore(t, w)
			must.Succeed(t, err)
			got := c.Enforced().MAC
			if got == podsMAC || got == zeros || !userspace && got != own {
				t.Errorf("MAC %s stays", got)
			}

			notes(t, restored, "vf mac is "+string(got)+", was "+zeros+
				": the old value was refused: ")
			c.Orders()
			_, err = a.restore(t, w)
			must.Succeed(t, err)
			if again := c.Orders(); len(again) > 0 {
				t.Errorf("once more the PF was told %q", again)
			}
		})
	}
}

// TestPodsMACStays checks that a PF that keeps the pod's MAC fails the release, because the next
// owner would get this MAC.
func TestPodsMACStays(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
	must.Succeed(t, err)
	c.Refuse = func(string) error { return unix.EPERM }
	_, err = a.restore(t, w)
	if !errors.Is(err, netdev.ErrLeaks) {
		t.Errorf("error %v, want %v", err, netdev.ErrLeaks)
	}
	mentions(t, err, "vf mac may reach the next owner")
}

// TestThreeOutcomes checks that a property that a driver refuses for good is noted or leaks, and
// that a property that it refuses for now is tried again.
func TestThreeOutcomes(t *testing.T) {
	isolating := netdev.VFState{
		MAC: zeros, Proto: "802.1q", SpoofCheck: new(false), Trust: new(true), LinkState: "auto",
	}
	for name, test := range map[string]struct {
		before *netdev.VFState
		wish   function.VFConfig
		refuse error
		down   bool
		leaks  bool
		note   string // of a release that succeeds
	}{
		"VLAN": {
			wish: function.VFConfig{VLAN: new(100)}, refuse: unix.EINVAL, leaks: true,
		},
		"VLAN, busy": {
			wish: function.VFConfig{VLAN: new(100)}, refuse: unix.EAGAIN,
		},
		"VLAN, PF is down": {
			wish: function.VFConfig{VLAN: new(100)}, refuse: unix.EINVAL, down: true,
		},
		"VLAN, not for this driver": {
			wish: function.VFConfig{VLAN: new(100)}, refuse: unix.EOPNOTSUPP, down: true,
			leaks: true,
		},
		"VLAN, firmware fails": {wish: function.VFConfig{VLAN: new(100)}, refuse: unix.EIO},
		"trust stays": {
			wish: function.VFConfig{Trust: new(true)}, refuse: unix.EPERM, leaks: true,
		},
		"trust is taken away": {
			before: &isolating, wish: function.VFConfig{Trust: new(false)}, refuse: unix.EPERM,
			note: "vf trust is ",
		},
		"spoof check stays off": {
			wish: function.VFConfig{SpoofCheck: new(false)}, refuse: unix.Errno(524), leaks: true,
		},
		"spoof check stays on": {
			before: &isolating, wish: function.VFConfig{SpoofCheck: new(true)}, refuse: unix.EPERM,
			note: "vf spoofchk is ",
		},
		"rate": {
			wish: function.VFConfig{MaxTxRate: new(5)}, refuse: unix.EINVAL,
			note: "vf max_tx_rate is 5, was 0",
		},
		"link state": {
			wish: function.VFConfig{LinkState: "disable"}, refuse: unix.EOPNOTSUPP,
			note: "vf link-state is ",
		},
		"rate, a reset is under way": {
			wish: function.VFConfig{MaxTxRate: new(5)}, refuse: unix.EBUSY,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := newCard(t)
			if test.before != nil {
				c.VF = *test.before
			}

			a, err := attachCard(t, w, function.Interface{Name: "net1", VF: &test.wish})
			must.Succeed(t, err)
			c.Refuse, c.Down = func(string) error { return test.refuse }, test.down
			var restored netdev.Restored
			impatiently(w, c, func() { restored, err = a.restore(t, w) })
			if (err == nil) != (test.note != "") || errors.Is(err, netdev.ErrLeaks) != test.leaks {
				t.Fatalf("%+v, error %v", restored, err)
			}
			if test.note != "" {
				notes(t, restored, test.note)
				return
			}

			if test.down && !test.leaks {
				mentions(t, err, "administratively down")
			}

			c.Refuse, c.Down = nil, false
			restored, err = a.restore(t, w)
			must.Succeed(t, err)
			notes(t, restored)
		})
	}
}

// TestMTURefused checks that the release succeeds with a note if the driver no longer accepts the
// MTU.
func TestMTURefused(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w, function.Interface{Name: "net1", MTU: 1400})
	must.Succeed(t, err)
	c.MTU = func(int) error { return unix.EINVAL }
	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored, "mtu is 1400, was 1500: the old value was refused: ")
}

// TestSilentPF checks that the state of a VF is unknown if the PF no longer reports the VF. The
// release must take it neither for equal nor for gone.
func TestSilentPF(t *testing.T) {
	for name, userspace := range map[string]bool{"netdev": false, "without a netdev": true} {
		t.Run(name, func(t *testing.T) {
			w, c := newCard(t)
			before := c.Enforced()

			want := function.Interface{
				Name: "net1", Userspace: userspace,
				VF: &function.VFConfig{VLAN: new(100), Trust: new(true)},
			}

			a, err := attachCard(t, w, want)
			must.Succeed(t, err)
			const unknown = "tells nothing about the VF, whose state is unknown"

			c.Silent = -1
			impatiently(w, c, func() {
				_, err = a.check(t, w, netdev.Expected{})
				mentions(t, err, unknown)
				_, err = a.restore(t, w)
				mentions(t, err, unknown)
				if errors.Is(err, netdev.ErrLeaks) {
					t.Errorf("error %v is final", err)
				}

				_, err = w.engine.Restore(t.Context(), netdev.Device{PF: deviceOfCard().PF},
					a.before.WithoutNetdev(), netdev.Place{})
				mentions(t, err, unknown)
				c.NoOperations = true // as of another driver
				_, err = a.restore(t, w)
				mentions(t, err, unknown)
			})

			c.NoOperations, c.Silent = false, 3
			restored, err := a.restore(t, w)
			must.Succeed(t, err)
			notes(t, restored)
			if diff := cmp.Diff(before, c.Enforced()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestVFThatIsGone checks that nothing is left to restore if the PF reports that the VF no longer
// exists.
func TestVFThatIsGone(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w,
		function.Interface{Name: "net1", Userspace: true, VF: &function.VFConfig{VLAN: new(100)}})
	must.Succeed(t, err)
	c.NoVFs = true
	if got, err := a.check(t, w, netdev.Expected{}); err != nil || len(got) != 1 {
		t.Errorf("check: %q, %v", got, err)
	}

	_, err = a.restore(t, w)
	must.Succeed(t, err)
	_, err = attachCard(t, w, function.Interface{Name: "net1"})
	mentions(t, err, "PF ens1f0 (0000:3b:00.0): has 0 VFs, and VF 0 is not among them")
}

// TestBaselineOfSilentPF checks that an attachment does not start from a state that the PF did not
// report.
func TestBaselineOfSilentPF(t *testing.T) {
	nothing, mac := function.Interface{Name: "net1"}, function.Interface{Name: "net1", MAC: podsMAC}
	trust := function.Interface{Name: "net1", VF: &function.VFConfig{Trust: new(true)}}
	for name, test := range map[string]struct {
		silent       int
		others, none bool // the PF reports another VF; its driver has no operations
		want         function.Interface
		says         string // part of the error
		told         bool   // the PF reports the VF in the end
	}{
		"of this VF": {
			silent: -1, others: true, want: nothing, says: "whose state is unknown",
		},
		"of this VF for a moment":   {silent: 2, others: true, want: nothing, told: true},
		"of all, trust is wanted":   {silent: -1, want: trust, says: "whose state is unknown"},
		"of all for a moment":       {silent: 2, want: trust, told: true},
		"of all, nothing is wanted": {silent: -1, want: nothing},
		"of all, a MAC is wanted":   {silent: -1, want: mac},
		"of all for a moment, MAC":  {silent: 1, want: mac, told: true},
		"no operations":             {none: true, want: mac},
		"no operations, trust, wanted": {
			none: true, want: trust, says: "has no PF that VF properties",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w, c := newCard(t)
			c.Silent, c.Others, c.NoOperations = test.silent, test.others, test.none
			var a attached
			var err error
			attach := func() { a, err = attachCard(t, w, test.want) }
			if c.Silent < 0 {
				impatiently(w, c, attach)
			} else {
				attach()
			}

			if test.says != "" {
				mentions(t, err, test.says)
				return
			}

			must.Succeed(t, err)
			if told := a.before.VF != nil; told != test.told {
				t.Errorf("snapshot has %+v", a.before.VF)
			}

			_, err = a.restore(t, w)
			must.Succeed(t, err)
			if orders := c.Orders(); !test.told && len(orders) > 0 {
				t.Errorf("orders %q", orders)
			}
		})
	}
}

// TestUntoldSettings checks that an attachment is refused if it wants a property that the PF does
// not report (-1), because the property could be neither checked nor restored.
func TestUntoldSettings(t *testing.T) {
	w, c := newCard(t)
	c.VF.Trust, c.VF.SpoofCheck = nil, nil
	want := function.Interface{
		Name: "net1", VF: &function.VFConfig{Trust: new(true), SpoofCheck: new(false)},
	}
	_, err := attachCard(t, w, want)
	mentions(t, err, "vf.spoofCheck, vf.trust: must be absent: PF ens1f0 (0000:3b:00.0) does not "+
		"tell it for VF 0")
}

// TestVFResets covers a VF that is busy after each order to the PF (i40e, ice). It is attached and
// released all the same, and no order is sent twice.
func TestVFResets(t *testing.T) {
	for name, talkative := range map[string]bool{"PF is silent": false, "PF tells": true} {
		t.Run(name, func(t *testing.T) {
			w, c := newCard(t)
			c.ResetTime, c.Talkative = 100*time.Millisecond, talkative
			begin := time.Now()
			a, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
			must.Succeed(t, err)
			if took := time.Since(begin); took > 2*time.Second || a.observed.MAC != podsMAC {
				t.Errorf("attached with %s after %s", a.observed.MAC, took)
			}
			if diff := cmp.Diff([]string{"MAC " + podsMAC}, c.Orders()); diff != "" {
				t.Errorf("orders (-want +got):\n%s", diff)
			}

			_, err = a.restore(t, w)
			must.Succeed(t, err)
			if diff := cmp.Diff([]string{"MAC " + zeros}, c.Orders()); diff != "" {
				t.Errorf("orders (-want +got):\n%s", diff)
			}

			a, err = attachCard(t, w, everything())
			must.Succeed(t, err)
			if orders := c.Orders(); len(orders) != 6 {
				t.Errorf("orders %q", orders)
			}

			_, err = a.restore(t, w)
			must.Succeed(t, err)
			if orders := c.Orders(); len(orders) != 6 {
				t.Errorf("orders %q", orders)
			}
		})
	}
}

// TestBusyForEver checks that an attachment fails in bounded time with the driver's error if EAGAIN
// is final (fm10k).
func TestBusyForEver(t *testing.T) {
	w, c := newCard(t)
	c.TakeMAC = func(mac function.MAC, _ netdev.VFState) error {
		if mac == podsMAC {
			return unix.EAGAIN
		}
		return nil
	}

	begin := time.Now()
	impatiently(w, c, func() {
		_, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
		mentions(t, err, "resource temporarily unavailable (after waiting for 20ms)")
	})

	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("took %s", took)
	}
	if got := names(t, w.pod); len(got) != 1 {
		t.Errorf("the pod has %q", got)
	}
}

// TestRenamedPF covers another PF that has got the netdev name of the VF's PF. The engine must not
// use its report and must not send it orders.
func TestRenamedPF(t *testing.T) {
	w, c := newCard(t)
	want := function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(100)}}
	const says = "netdev ens1f0 belongs to device 0000:81:00.0 by now"
	before, place, err := w.engine.Plan(t.Context(), deviceOfCard(), w.pod.Path(), want)
	must.Succeed(t, err)
	c.Address = "0000:81:00.0"
	_, err = w.engine.Attach(t.Context(), deviceOfCard(), before, place, want)
	mentions(t, err, says)
	_, _, err = w.engine.Plan(t.Context(), deviceOfCard(), w.pod.Path(), want)
	mentions(t, err, says)

	c.Address = pfAddress
	_, err = w.engine.Attach(t.Context(), deviceOfCard(), before, place, want)
	must.Succeed(t, err)
	c.Orders()
	c.Address = "0000:81:00.0"
	_, err = w.engine.Restore(t.Context(), netdev.Device{PF: deviceOfCard().PF}, before, place)
	mentions(t, err, says)
	if orders := c.Orders(); len(orders) > 0 {
		t.Errorf("orders %q", orders)
	}

	c.Address = pfAddress
	_, err = w.engine.Restore(t.Context(), netdev.Device{PF: deviceOfCard().PF}, before, place)
	must.Succeed(t, err)
}

// TestRateOfTheLink covers a PF that reports the speed of the link as the VF's rate (qede,
// liquidio). This rate is never written back.
func TestRateOfTheLink(t *testing.T) {
	w, c := newCard(t)
	c.VF.MaxTxRate = 25000
	a, err := attachCard(t,
		w, function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(100)}})
	must.Succeed(t, err)
	c.Orders()
	c.VF.MaxTxRate = 10000
	if got, err := a.check(t, w, netdev.Expected{}); err != nil || len(got) > 0 {
		t.Errorf("check: %q, %v", got, err)
	}

	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
	if diff := cmp.Diff([]string{"VLAN none"}, c.Orders()); diff != "" {
		t.Errorf("orders (-want +got):\n%s", diff)
	}
}

// TestDroppedValues covers a driver that accepts a value and drops it. The attachment fails and is
// undone.
func TestDroppedValues(t *testing.T) {
	for order, test := range map[string]struct {
		wish function.VFConfig
		says string
	}{
		"link state enable": {function.VFConfig{LinkState: "enable"}, "vf.linkState: PF ens1f0 " +
			"(0000:3b:00.0) tells link state auto for VF 0, and not link state enable"},
		"VLAN 7 qos 3 proto 802.1q": {
			function.VFConfig{VLAN: new(7), QoS: new(3)},
			"tells VLAN none for VF 0, and not VLAN 7 qos 3 proto 802.1q",
		},
		"rates of 0-9 Mbit/s": {function.VFConfig{MaxTxRate: new(9)}, "vf.maxTxRate: PF ens1f0"},
	} {
		t.Run(order, func(t *testing.T) {
			w, c := newCard(t)
			before := c.Enforced()
			c.Drop = func(got string) bool { return got == order }
			impatiently(w, c, func() {
				_, err := attachCard(t, w,
					function.Interface{Name: "net1", MAC: podsMAC, VF: &test.wish})
				mentions(t, err, test.says)
			})

			if diff := cmp.Diff(before, c.Enforced()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	t.Run("at release", func(t *testing.T) {
		w, c := newCard(t)
		a, err := attachCard(t,
			w, function.Interface{Name: "net1", VF: &function.VFConfig{MaxTxRate: new(9)}})
		must.Succeed(t, err)
		c.Drop = func(string) bool { return true }
		impatiently(w, c, func() { _, err = a.restore(t, w) })
		mentions(t, err, "the driver accepted it, and does not have it yet")
		w.engine.Play(c, 10*time.Second, 20*time.Millisecond)
		restored, err := a.restore(t, w)
		must.Succeed(t, err)
		notes(t, restored,
			"vf max_tx_rate is 9, was 0: the driver accepted the old value and did not set it")
	})
}

// TestRestoreEndsWithItsContext checks that a release never waits longer than its caller.
func TestRestoreEndsWithItsContext(t *testing.T) {
	w, c := newCard(t)
	w.engine.Play(c, time.Minute, time.Second)
	a, err := attachCard(t,
		w, function.Interface{Name: "net1", VF: &function.VFConfig{VLAN: new(100)}})
	must.Succeed(t, err)

	for name, silent := range map[string]int{"silent": -1, "busy": 0} {
		t.Run(name, func(t *testing.T) {
			c.Silent, c.Refuse = silent, func(string) error { return unix.EBUSY }
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			begin := time.Now()
			_, err := w.engine.Restore(ctx, netdev.Device{PF: deviceOfCard().PF}, a.before, a.place)
			if took := time.Since(begin); err == nil || took > 5*time.Second {
				t.Errorf("after %s: %v", took, err)
			}
		})
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.engine.Restore(ctx, device(), a.before, a.place); !errors.Is(err,
		context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}

	c.Silent, c.Refuse = 0, nil
	_, err = a.restore(t, w)
	must.Succeed(t, err)
}

// TestForcedMAC covers a netdev that refuses every MAC and gets the MAC of the PF by itself, while
// the PF refuses zeros (qede).
func TestForcedMAC(t *testing.T) {
	w, c := newCard(t)
	own := function.MAC(get(t, w.host, hostName).Attrs().HardwareAddr.String())
	c.Forced, c.TakeMAC = true, func(function.MAC, netdev.VFState) error { return unix.EINVAL }
	c.Refuse = func(order string) error {
		if order == "MAC "+zeros {
			return unix.EINVAL
		}
		return nil
	}

	a, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
	must.Succeed(t, err)
	if a.observed.MAC != podsMAC {
		t.Errorf("observed %+v", a.observed)
	}

	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored, "vf mac is "+string(own)+", was "+zeros)
	a.before.VF = nil
	w.checkRestored(t, a.before)
}

// TestReattachedMAC covers a VF that is attached again. The PF, which had no MAC for it before, has
// set the MAC of the pod.
func TestReattachedMAC(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w, function.Interface{Name: "net1"})
	must.Succeed(t, err)
	_, err = a.restore(t, w)
	must.Succeed(t, err)
	again, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
	must.Succeed(t, err)
	again.before = a.before.Renewed(again.before)
	restored, err := again.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
	if got := c.Enforced().MAC; got != zeros {
		t.Errorf("the PF has MAC %s", got)
	}
}

// TestCheckWithoutPF checks that the state of a VF is unknown if its PF has no netdev.
func TestCheckWithoutPF(t *testing.T) {
	w, _ := newCard(t)
	a, err := attachCard(t, w, function.Interface{Name: "net1"})
	must.Succeed(t, err)
	_, err = w.engine.Check(t.Context(), netdev.Device{},
		netdev.Attached{Before: a.before, Place: a.place, Want: a.want})
	mentions(t, err, "what it enforces for the VF is unknown")
}

// TestMTUAboveTheMaximum covers a driver whose maximum is now below the MTU before the attachment.
// The netdev gets the maximum, with which the next owner is isolated as well.
func TestMTUAboveTheMaximum(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1", MTU: 1400})
	before.MTU = 70000
	restored, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
	must.Succeed(t, err)
	notes(t, restored, "mtu is 65535, was 70000: the old value was refused: ")
}

// TestMACOfPFThatIsDown covers a netdev that refuses its MAC as long as the PF enforces the pod's.
// The PF accepts another MAC only once it is up again.
func TestMACOfPFThatIsDown(t *testing.T) {
	w, c := newCard(t)
	a, err := attachCard(t, w, function.Interface{Name: "net1", MAC: podsMAC})
	must.Succeed(t, err)
	c.Down, c.Refuse = true, func(string) error { return unix.EINVAL }
	c.TakeMAC = func(mac function.MAC, enforced netdev.VFState) error {
		if mac != enforced.MAC && enforced.MAC != zeros {
			return unix.EINVAL
		}
		return nil
	}

	_, err = a.restore(t, w)
	mentions(t, err, "the PF is administratively down")
	if errors.Is(err, netdev.ErrLeaks) {
		t.Errorf("error %v is final", err)
	}

	c.Down, c.Refuse = false, nil
	restored, err := a.restore(t, w)
	must.Succeed(t, err)
	notes(t, restored)
}
