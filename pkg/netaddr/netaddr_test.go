// SPDX-License-Identifier: Apache-2.0

package netaddr

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestFromIPNet(t *testing.T) {
	mapped := net.ParseIP("10.1.2.3") // in 16 bytes
	for name, test := range map[string]struct {
		from *net.IPNet
		want string // "" for none
	}{
		"IPv4":                  {&net.IPNet{IP: mapped.To4(), Mask: net.CIDRMask(24, 32)}, "10.1.2.3/24"},
		"IPv4 in 16 bytes":      {&net.IPNet{IP: mapped, Mask: net.CIDRMask(24, 32)}, "10.1.2.3/24"},
		"both in 16 bytes":      {&net.IPNet{IP: mapped, Mask: net.CIDRMask(120, 128)}, "10.1.2.3/24"},
		"all of IPv4":           {&net.IPNet{IP: mapped, Mask: net.CIDRMask(0, 32)}, "10.1.2.3/0"},
		"IPv6":                  {&net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(64, 128)}, "fd00::1/64"},
		"nothing":               {nil, ""},
		"no address":            {&net.IPNet{Mask: net.CIDRMask(24, 32)}, ""},
		"no mask":               {&net.IPNet{IP: mapped}, ""},
		"address of 5 bytes":    {&net.IPNet{IP: make(net.IP, 5), Mask: net.CIDRMask(24, 32)}, ""},
		"mask with holes":       {&net.IPNet{IP: mapped, Mask: net.IPMask{255, 0, 255, 0}}, ""},
		"mask longer than IPv4": {&net.IPNet{IP: mapped, Mask: net.CIDRMask(64, 128)}, ""},
		"IPv6 with IPv4's mask": {&net.IPNet{IP: net.ParseIP("fd00::1"), Mask: net.CIDRMask(24, 32)}, ""},
	} {
		got, ok := FromIPNet(test.from)
		if ok != (test.want != "") || ok && got.String() != test.want {
			t.Errorf("%s: %s, %t, want %q", name, got, ok, test.want)
		}
		if back, again := FromIPNet(ToIPNet(got)); ok && (!again || back != got) {
			t.Errorf("%s: %s becomes %s", name, got, back)
		}
	}
}

func TestParseRange(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.0.10-10.1.0.19": "10.1.0.10 10.1.0.19", "10.1.0.10-10.1.0.10": "10.1.0.10 10.1.0.10",
		"10.1.0.7/29": "10.1.0.0 10.1.0.7", "fd00::/126": "fd00:: fd00::3",
		"fd00::1-fd00::2": "fd00::1 fd00::2", "0.0.0.0/0": "0.0.0.0 255.255.255.255",
		"10.1.0.1": "", "10.1.0.2-10.1.0.1": "", "10.1.0.1-fd00::1": "", "fe80::1%a-fe80::2%a": "",
		"-": "", "": "", "10.1.0.1-": "", "10.1.0.1-10.1.0.2-10.1.0.3": "",
	} {
		r, err := ParseRange(text)
		if want == "" && err == nil {
			t.Errorf("%q is %s to %s, want an error", text, r.First, r.Last)
		} else if got := r.First.String() + " " + r.Last.String(); want != "" && got != want {
			t.Errorf("%q is %s, %v, want %s", text, got, err, want)
		}
	}
}

// TestLast compares with counting, by the standard library.
func TestLast(t *testing.T) {
	for _, text := range []string{"10.1.2.3/32", "10.1.2.3/27", "10.1.255.0/22", "fd00::ff/120",
		"::/128", "255.255.255.255/24"} {
		prefix := netip.MustParsePrefix(text)
		want := prefix.Masked().Addr()
		for next := want.Next(); prefix.Contains(next); next = next.Next() {
			want = next
		}
		if got := Last(prefix); got != want {
			t.Errorf("last of %s is %s, want %s", text, got, want)
		}
	}
}

// FuzzSet compares a set with the ranges that it is made of, for the addresses around their ends.
func FuzzSet(f *testing.F) {
	f.Add("10.1.0.1-10.1.0.9,10.1.0.5-10.1.0.20,10.1.0.21-10.1.0.21", "10.1.0.21")
	f.Add("10.1.0.0/24,fd00::/120,10.1.0.7-10.1.2.7", "fd00::ff")
	f.Add("0.0.0.0/0,::/0,255.255.255.255-255.255.255.255", "::ffff:1.2.3.4")
	f.Fuzz(func(t *testing.T, text, probe string) {
		var ranges []Range
		var probes []netip.Addr
		if ip, err := netip.ParseAddr(probe); err == nil && ip.Zone() == "" {
			probes = append(probes, ip)
		}
		for part := range strings.SplitSeq(text, ",") {
			r, err := ParseRange(part)
			if err != nil {
				continue
			}
			ranges = append(ranges, r)
			probes = append(probes, r.First.Prev(), r.First, r.Last, r.Last.Next())
		}

		set := NewSet(ranges)
		for _, ip := range probes {
			if !ip.IsValid() {
				continue
			}
			want := false
			for _, r := range ranges {
				want = want || ip.BitLen() == r.First.BitLen() &&
					ip.Compare(r.First) >= 0 && ip.Compare(r.Last) <= 0
			}

			found, got := set.Find(ip)
			if got != want || set.Contains(ip) != want {
				t.Errorf("%s in %q: %t, want %t", ip, text, got, want)
			}
			if got && (ip.Less(found.First) || found.Last.Less(ip)) {
				t.Errorf("%s is found in %s to %s", ip, found.First, found.Last)
			}
			if next := found.Last.Next(); got && next.IsValid() && next.BitLen() == ip.BitLen() {
				if r, ok := set.Find(next); ok && !found.Last.Less(r.First) {
					t.Errorf("%q: the range to %s does not end there", text, found.Last)
				}
			}
		}
	})
}
