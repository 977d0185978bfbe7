// SPDX-License-Identifier: Apache-2.0

package opi_test

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

func TestPortID(t *testing.T) {
	vf := func(address string) function.ID { return function.ID{Address: pci.Address(address)} }
	sf := func(address string, sfnum uint32) function.ID {
		return function.SubfunctionID(pci.Address(address), sfnum)
	}
	tests := []struct {
		function function.ID
		want     string // empty if invalid
	}{
		{vf("0000:03:00.2"), "vf-0000-03-00-2"},
		{vf("0001:3b:1f.7"), "vf-0001-3b-1f-7"},
		{vf("10000:01:00.0"), "vf-10000-01-00-0"},
		{sf("0000:03:00.0", 88), "sf-03-00-0-88"},
		{sf("0000:03:00.0", 9999), "sf-03-00-0-9999"},
		{sf("0001:03:00.0", 0), "sf-0001-03-00-0-0"},
		{sf("10000:03:00.0", 1), "sf-10000-03-00-0-1"},
		{sf("0000:03:00.0", 4294967295), "sf-03-00-0-4294967295"},
		{function.ID{Address: "0000:03:00.0", Subfunction: "sf-1"}, ""},
		{function.ID{Address: "0000:03:00.0", Subfunction: "sf088"}, ""},
		{function.ID{Address: "0000:03:00.0", Subfunction: "sf4294967384"}, ""},
		{function.ID{Address: "0000:03:00.0", Subfunction: "88"}, ""},
		{vf("03:00.2"), ""},
		{vf("0000:03:00.8"), ""},
		{vf("0000:03:20.0"), ""},
		{vf("0000:3B:00.0"), ""},
		{vf(""), ""},
	}

	for _, test := range tests {
		got, err := opi.PortID(test.function)
		if got != test.want || (err != nil) != (test.want == "") {
			t.Errorf("PortID(%q): %q, %v, want %q", test.function, got, err, test.want)
		}
		if err != nil && !errors.Is(err, opi.ErrInvalid) {
			t.Errorf("PortID(%q): %v is not ErrInvalid", test.function, err)
		}

		parsed, ok := opi.ParsePortID(got)
		if ok != (err == nil) || ok && parsed != test.function {
			t.Errorf("ParsePortID(%q): %v, %v, want %v", got, parsed, ok, test.function)
		}
	}
}

func TestNetworkID(t *testing.T) {
	seen := map[string]string{}
	for _, identity := range []string{"4d2f5f3c-8a0e-4c3e-9f6e-3d1c7f0c1a2b", "other", ""} {
		installation := opi.NewInstallation(identity)
		for _, name := range []string{"blue", "red", "Blue", "a", strings.Repeat("x", 253), ""} {
			id := installation.NetworkID(name)
			if !regexp.MustCompile(`^n[a-z2-7]{8}-[a-z2-7]{8}$`).MatchString(id) {
				t.Errorf("NetworkID(%q) = %q", name, id)
			}
			if id != opi.NewInstallation(identity).NetworkID(name) {
				t.Errorf("NetworkID(%q) is not stable", name)
			}
			if other, taken := seen[id]; taken {
				t.Errorf("%q of %q has the id %s, as %s", name, identity, id, other)
			}

			seen[id] = identity + "/" + name
			for _, owner := range []string{"4d2f5f3c-8a0e-4c3e-9f6e-3d1c7f0c1a2b", "other", ""} {
				if got := opi.NewInstallation(owner).Owns(id); got != (owner == identity) {
					t.Errorf("%q owns %s of %q: %t", owner, id, identity, got)
				}
			}
		}
	}

	if got := opi.NewInstallation("other").NetworkID("blue"); got != "n3euyuegr-czdxncga" {
		// Agents store ids: another function would orphan every network in service.
		t.Errorf("NetworkID(blue) = %s has changed", got)
	}
}

func FuzzPortID(f *testing.F) {
	f.Add("0000:03:00.2", "")
	f.Add("0000:03:00.0", "sf88")
	f.Add("10000:01:1f.7", "sf0")
	f.Add("ffff:ff:1f.7\n", "sf-1")
	valid := regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)
	f.Fuzz(func(t *testing.T, address, subfunction string) {
		of := function.ID{Address: pci.Address(address), Subfunction: subfunction}
		if id, err := opi.PortID(of); err == nil && !valid.MatchString(id) {
			t.Errorf("PortID(%q) = %q is not a valid id", of, id)
		}
	})
}

func TestParsePortID(t *testing.T) {
	for _, id := range []string{
		"vf-03-00-2", "vf-0000-03-00-8", "vf-0000-3B-00-0", "vf-0000-03-00-2-1", "sf-03-00-0",
		"sf-03-00-0-088", "sf-03-00-0-x",
		"sf-03-00-0-4294967384", // SF 88 if truncated to 32 bits
		"sf-0000-03-00-0-88", "pf-0000-03-00-0", "net-blue", "vf-1", "my-port", "vf-0000-3b-02-1-x",
		"vf-0000:03:00.2", "",
	} {
		if f, ok := opi.ParsePortID(id); ok {
			t.Errorf("ParsePortID(%q): %v, but it is no Function's", id, f)
		}
	}
}

func FuzzParsePortID(f *testing.F) {
	f.Add("vf-0000-03-00-2")
	f.Add("sf-0001-03-00-0-88")

	f.Fuzz(func(t *testing.T, id string) {
		of, ok := opi.ParsePortID(id)
		if !ok {
			return
		}
		if again, err := opi.PortID(of); err != nil || again != id {
			t.Errorf("%q is of %v, whose id is %q, %v", id, of, again, err)
		}
	})
}
