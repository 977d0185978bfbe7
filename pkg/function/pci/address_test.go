// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"regexp"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		in, want string
		bad      bool
	}{
		{in: "0000:3b:02.1", want: "0000:3b:02.1"},
		{in: "0000:3B:1F.7", want: "0000:3b:1f.7"},
		{in: "10000:e1:00.0", want: "10000:e1:00.0"}, // behind VMD
		{in: "ffffffff:ff:1f.7", want: "ffffffff:ff:1f.7"},
		{in: "3b:02.1", bad: true},
		{in: "000:3b:02.1", bad: true},
		{in: "123456789:3b:02.1", bad: true},
		{in: "0000:3b:20.0", bad: true}, // a bus has 32 devices
		{in: "0000:3b:02.8", bad: true}, // a device has 8 functions
		{in: "0000:3b:02", bad: true},
		{in: "0000:3b:02.1\n", bad: true},
		{in: " 0000:3b:02.1", bad: true},
		{in: "0000-3b-02-1", bad: true},
		{in: "", bad: true},
		{in: "\u017f000:3b:02.1", bad: true},
	} {
		got, err := Parse(tt.in)
		if string(got) != tt.want || (err != nil) != tt.bad {
			t.Errorf("Parse(%q) = %q, %v, want %q, error %t", tt.in, got, err, tt.want, tt.bad)
		}
		if err != nil && !strings.Contains(err.Error(), "dddd:bb:dd.f") {
			t.Errorf("Parse(%q): %v does not say what would be right", tt.in, err)
		}
	}
}

func TestParseDeviceName(t *testing.T) {
	for _, tt := range []struct {
		in, want string
		bad      bool
	}{
		{in: "0000-3b-02-1", want: "0000:3b:02.1"},
		{in: "10000-e1-00-0", want: "10000:e1:00.0"},
		{in: "0000-3B-02-1", bad: true},
		{in: "0000-3b-02", bad: true},
		{in: "0000-3b-02-1-sf1", bad: true},
		{in: "0000:3b:02.1", bad: true},
		{in: "", bad: true},
	} {
		got, err := ParseDeviceName(tt.in)
		if string(got) != tt.want || (err != nil) != tt.bad {
			t.Errorf("ParseDeviceName(%q) = %q, %v, want %q, error %t", tt.in, got,
				err, tt.want, tt.bad)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"0000:3b:02.1", "10000:E1:00.0", "3b:02.1", "0000-3b-02-1", "\x00\xff",
	} {
		f.Add(s)
	}

	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`) // RFC 1123
	f.Fuzz(func(t *testing.T, s string) {
		a, err := Parse(s)
		if err != nil {
			if a != "" {
				t.Fatalf("Parse(%q) = %q with an error", s, a)
			}
			return
		}

		if again, err := Parse(string(a)); err != nil || again != a {
			t.Fatalf("Parse(%q) = %q, which reads as %q, %v", s, a, again, err)
		}
		if !label.MatchString(a.DeviceName()) {
			t.Fatalf("%q: device name %q is no DNS label", a, a.DeviceName())
		}
		if back, err := ParseDeviceName(a.DeviceName()); err != nil || back != a {
			t.Fatalf("%q: device name %q reads as %q, %v", a, a.DeviceName(), back, err)
		}
	})
}

func TestVFIndex(t *testing.T) {
	tests := []struct {
		address Address
		index   int
		ok      bool
	}{
		{"0000:3b:10.0", 0, true},
		{"0000:3b:10.2", 1, true},
		{"0000:3c:00.0", 64, true}, // on the next bus
		{"0000:3b:10.1", 0, false}, // between two VFs
		{"0000:3b:0f.6", 0, false}, // before the first VF
		{"0001:3b:10.0", 0, false}, // in another domain
	}

	for _, test := range tests {
		if index, _, ok := VFIndex("0000:3b:00.1", test.address, 127, 2); index != test.index ||
			ok != test.ok {
			t.Errorf("%s: VF %d, %v, want %d, %v", test.address, index, ok, test.index, test.ok)
		}
	}

	if _, _, ok := VFIndex("0000:3b:00.0", "0000:3b:00.0", 0, 0); ok {
		t.Error("a PF without offset and stride has VFs")
	}
}
