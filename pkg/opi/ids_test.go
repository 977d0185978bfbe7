package opi_test

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

func TestPortID(t *testing.T) {
	sf := func(n int) *int { return &n }
	tests := []struct {
		pci  string
		sf   *int
		want string // empty: invalid
	}{
		{"0000:03:00.2", nil, "vf-0000-03-00-2"},
		{"0001:3b:1f.7", nil, "vf-0001-3b-1f-7"},
		{"10000:01:00.0", nil, "vf-10000-01-00-0"},
		{"0000:03:00.0", sf(88), "sf-03-00-0-88"},
		{"0000:03:00.0", sf(9999), "sf-03-00-0-9999"},
		{"0001:03:00.0", sf(0), "sf-0001-03-00-0-0"},
		{"0000:03:00.0", sf(4294967295), "sf-03-00-0-4294967295"},
		{"0000:03:00.0", sf(-1), ""},
		{"0000:03:00.0", sf(4294967296 + 88), ""},
		{"03:00.2", nil, ""},
		{"0000:03:00.8", nil, ""},
		{"0000:03:20.0", nil, ""},
		{"0000:3B:00.0", nil, ""},
		{"", nil, ""},
	}
	for _, test := range tests {
		got, err := opi.PortID(test.pci, test.sf)
		if got != test.want || (err != nil) != (test.want == "") {
			t.Errorf("PortID(%q): %q, %v, want %q", test.pci, got, err, test.want)
		}
		if err != nil && !errors.Is(err, opi.ErrInvalid) {
			t.Errorf("PortID(%q): %v is not ErrInvalid", test.pci, err)
		}
		pci, sfnum, ok := opi.ParsePortID(got)
		if ok != (err == nil) || ok && (pci != test.pci || cmp.Diff(test.sf, sfnum) != "") {
			t.Errorf("ParsePortID(%q): %q, %v, %v, want %q, %v", got, pci, sfnum, ok, test.pci, test.sf)
		}
	}
}

func TestNetworkID(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"blue", "red", "Blue", "a", strings.Repeat("x", 253), ""} {
		id := opi.NetworkID(name)
		if !regexp.MustCompile(`^net-[a-z2-7]{8}$`).MatchString(id) {
			t.Errorf("NetworkID(%q) = %q", name, id)
		}
		if id != opi.NetworkID(name) {
			t.Errorf("NetworkID(%q) is not stable", name)
		}
		if other, taken := seen[id]; taken {
			t.Errorf("%q and %q have the id %s", name, other, id)
		}
		seen[id] = name
	}
	if got := opi.NetworkID("blue"); got != "net-czdxncga" {
		// Ids are kept by agents: another function would orphan every network in service.
		t.Errorf("NetworkID(blue) = %s has changed", got)
	}
}

func FuzzPortID(f *testing.F) {
	f.Add("0000:03:00.2", -1)
	f.Add("0000:03:00.0", 88)
	f.Add("10000:01:1f.7", 0)
	f.Add("ffff:ff:1f.7\n", 1<<31)
	valid := regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)
	f.Fuzz(func(t *testing.T, pci string, sfnum int) {
		var sf *int
		if sfnum >= 0 {
			sf = &sfnum
		}
		if id, err := opi.PortID(pci, sf); err == nil && !valid.MatchString(id) {
			t.Errorf("PortID(%q, %d) = %q is not a valid id", pci, sfnum, id)
		}
	})
}

func TestParsePortID(t *testing.T) {
	for _, id := range []string{
		"vf-03-00-2", "vf-0000-03-00-8", "vf-0000-3B-00-0", "vf-0000-03-00-2-1", "sf-03-00-0", "sf-03-00-0-088", "sf-03-00-0-x",
		"sf-03-00-0-4294967384", // SF 88, if 32 bits are taken of it
		"sf-0000-03-00-0-88", "pf-0000-03-00-0", "net-blue", "vf-0000:03:00.2", "",
	} {
		if pci, sfnum, ok := opi.ParsePortID(id); ok {
			t.Errorf("ParsePortID(%q): %q, %v, but it is no device's", id, pci, sfnum)
		}
	}
}

func FuzzParsePortID(f *testing.F) {
	f.Add("vf-0000-03-00-2")
	f.Add("sf-0001-03-00-0-88")
	f.Fuzz(func(t *testing.T, id string) {
		pci, sfnum, ok := opi.ParsePortID(id)
		if !ok {
			return
		}
		if again, err := opi.PortID(pci, sfnum); err != nil || again != id {
			t.Errorf("%q is of %q, %v, whose id is %q, %v", id, pci, sfnum, again, err)
		}
	})
}
