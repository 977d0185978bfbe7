// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

func TestParseUplink(t *testing.T) {
	for text, want := range map[string]Uplink{
		"p0": {Name: "p0"}, "bond0.100": {Name: "bond0.100"}, "p0=1-16777215": {"p0", 1, 16777215},
		"p1=7-7": {"p1", 7, 7},
	} {
		if got, err := ParseUplink(text); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "=1-2", "p0=", "p0=1", "p0=0-9", "p0=9-1", "p0=1-16777216",
		"p0=1-999999999", "p0 p1", "a/b"} {
		if got, err := ParseUplink(text); err == nil ||
			!strings.Contains(err.Error(), `"`+text+`"`) {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

func TestUplinkFor(t *testing.T) {
	rest, low, high := Uplink{Name: "rest"}, Uplink{"low", 1, 99}, Uplink{"high", 1000, 1999}
	all := []Uplink{rest, low, high}
	must.Succeed(t, checkUplinks(all))

	for vni, want := range map[uint32]string{
		1: "low", 99: "low", 100: "rest", 1500: "high", 2000: "rest",
	} {
		if got := UplinkFor(all, vni); got == nil || got.Name != want {
			t.Errorf("VNI %d: %+v, want %s", vni, got, want)
		}
	}

	if got := UplinkFor([]Uplink{low, high}, 100); got != nil {
		t.Errorf("VNI 100 has uplink %+v, want none", got)
	}

	for _, both := range [][]Uplink{{rest, {Name: "p1"}}, {low, {"p1", 99, 200}}} {
		if err := checkUplinks(both); err == nil ||
			!strings.Contains(err.Error(), both[0].Name+" and p1 have VNIs in common") {
			t.Errorf("%+v: %v", both, err)
		}
	}
}

// FuzzParseUplink checks that an accepted uplink has possible VNIs, and that its text parses to the
// same uplink.
func FuzzParseUplink(f *testing.F) {
	f.Add("p0")
	f.Add("p0=1-9999")
	f.Add("bond0.7=16777215-16777215")

	f.Fuzz(func(t *testing.T, text string) {
		u, err := ParseUplink(text)
		if err != nil {
			return
		}

		again := u.Name
		if u.Last != 0 {
			again = fmt.Sprintf("%s=%d-%d", u.Name, u.First, u.Last)
		}
		if got, err := ParseUplink(again); err != nil || got != u {
			t.Errorf("%q is %+v, whose text %q is %+v, %v", text, u, again, got, err)
		}
		if u.Name == "" || u.First > u.Last || u.Last > MaxVNI {
			t.Errorf("%q is %+v", text, u)
		}
	})
}

// TestUplinkAfterLostEvents checks that the first event after a loss counts as a change although it
// repeats what is known, because the networks may have seen what came in between.
func TestUplinkAfterLostEvents(t *testing.T) {
	states := newUplinkStates([]Uplink{{Name: "p0"}})
	up := &netlink.LinkAttrs{
		Name: "p0", Index: 7, MTU: 1500,
		RawFlags: unix.IFF_UP | unix.IFF_LOWER_UP | unix.IFF_RUNNING,
	}

	noCarrier := *up
	noCarrier.RawFlags = unix.IFF_UP
	for i, test := range []struct {
		attrs *netlink.LinkAttrs
		lost  bool
		want  bool
	}{{up, false, true}, {up, false, false}, {&noCarrier, false, true}, {&noCarrier, false, false},
		{&noCarrier, true, true}, {up, false, true}} {
		if test.lost {
			states.eventsLost()
		}

		if got := states.update(test.attrs, false); got != test.want {
			t.Errorf("event %d: changed is %t, want %t", i, got, test.want)
		}
		if !states.contains(7) {
			t.Errorf("event %d: its addresses are not followed", i)
		}
	}
}

// TestCheckOperational checks that the error says why no frames pass an uplink.
func TestCheckOperational(t *testing.T) {
	const carrier = unix.IFF_LOWER_UP
	for _, test := range []struct {
		flags net.Flags
		raw   uint32
		says  string
	}{
		{net.FlagUp, unix.IFF_UP | carrier | unix.IFF_RUNNING, ""},
		{net.FlagUp, unix.IFF_UP, "has no carrier"},
		{net.FlagUp, unix.IFF_UP | carrier, "is not operational but dormant"},
		{0, 0, "is administratively down"},
	} {
		err := checkOperational(&netlink.LinkAttrs{
			Name: "p0", Flags: test.flags, RawFlags: test.raw, OperState: netlink.OperDormant,
		})
		if (err != nil) != (test.says != "") || err != nil &&
			!strings.Contains(err.Error(), test.says) {
			t.Errorf("flags %#x: %v, want %q", test.raw, err, test.says)
		}
	}
}
