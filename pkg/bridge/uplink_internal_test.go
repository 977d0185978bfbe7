// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// FuzzParseUplink: what is taken has VNIs that there are, and is the same in its own words.
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
		if u.Name == "" || u.First > u.Last || u.Last > maxVNI {
			t.Errorf("%q is %+v", text, u)
		}
	})
}

// TestUplinkAfterLostEvents: an event that only repeats what was known before others were lost is
// something new, because the networks may have been told of what came between.
func TestUplinkAfterLostEvents(t *testing.T) {
	b := &bridgePlane{uplinks: []Uplink{{Name: "p0"}}, uplinksNow: map[string]uplinkState{}}
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
			b.uplinksUnknown()
		}

		if got := b.uplinkChanged(test.attrs, false); got != test.want {
			t.Errorf("event %d: changed is %t, want %t", i, got, test.want)
		}
		if !b.isUplink(7) {
			t.Errorf("event %d: its addresses are not followed", i)
		}
	}
}

// TestBlockage: each reason why nothing passes an uplink is told apart.
func TestBlockage(t *testing.T) {
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
		err := blockage(&netlink.LinkAttrs{
			Name: "p0", Flags: test.flags, RawFlags: test.raw, OperState: netlink.OperDormant,
		})
		if (err != nil) != (test.says != "") || err != nil &&
			!strings.Contains(err.Error(), test.says) {
			t.Errorf("flags %#x: %v, want %q", test.raw, err, test.says)
		}
	}
}
