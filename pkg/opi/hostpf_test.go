// SPDX-License-Identifier: Apache-2.0

package opi

import (
	"strings"
	"testing"
)

func TestParseHostPF(t *testing.T) {
	for text, want := range map[string]HostPF{
		"host-pf c1pf0 hw_addr 02:00:00:00:00:01 serial MT2334XZ0LTK": {
			"c1pf0", "02:00:00:00:00:01", "MT2334XZ0LTK",
		},
		"host-pf pf1":                   {Name: "pf1"},
		"host-pf c1pf0 serial 00-11 22": {Name: "c1pf0", Serial: "00-11 22"},
	} {
		got, err := ParseHostPF(text)
		if err != nil || got != want || got.String() != text {
			t.Errorf("%q is %+v, %v, which is %q; want %+v", text, got, err, got, want)
		}
	}
	for _, text := range []string{
		"", "host-pf", "host-pf p0", "host-pf c1pf0vf3", "host-pf c1pf0 hw_addr 02:00",
		"host-pf c1pf0 hw_addr", "host-pf c1pf0 serial ",
		"host-pf c1pf0 serial " + strings.Repeat("7", MaxSerial+1), "host-pf c1pf0 serial a\nb",
		"host-pf c12345678901pf0", "c1pf0",
	} {
		if got, err := ParseHostPF(text); err == nil {
			t.Errorf("%q is %+v, want an error", text, got)
		}
	}
}

func FuzzParseHostPF(f *testing.F) {
	f.Add("host-pf c1pf0 hw_addr 02:00:00:00:00:01 serial MT2334XZ0LTK")
	f.Fuzz(func(t *testing.T, text string) {
		pf, err := ParseHostPF(text)
		if err != nil {
			return
		}
		if again, err := ParseHostPF(pf.String()); err != nil || again != pf {
			t.Errorf("%q is %+v, and that again %+v, %v", text, pf, again, err)
		}
		if !objectID.MatchString(PortIDAt(pf.Name, "vf0")) {
			t.Errorf("%q: no id of a port begins with %q", text, pf.Name)
		}
	})
}
