// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// fullSnapshot returns a snapshot that contains every property.
func fullSnapshot() Snapshot {
	return Snapshot{
		Name: "ens1", MAC: "02:00:00:00:00:01", VF: &VFState{MAC: "02:00:00:00:00:02"},
		Rate:    &function.Rate{},
		Carried: &Carried{GSOIPv4MaxSize: 1, ProtoDown: &ProtoDown{}},
		Conf:    &Conf{IPv4: make([]uint32, 31), IPv6: make([]int32, len(conf6))},
	}
}

// TestLeftovers checks that each property has a rule, which is documented, and that each rule
// concerns a property.
func TestLeftovers(t *testing.T) {
	page, err := os.ReadFile("../../../docs/explanation/attach-and-release.md")
	if err != nil {
		t.Fatal(err)
	}

	used := map[string]bool{}
	for _, p := range fullSnapshot().properties() {
		found := ""
		for _, rule := range leftovers {
			if p.name == rule.property || strings.HasSuffix(rule.property, " ") &&
				strings.HasPrefix(p.name, rule.property) {
				found = rule.property
				break
			}
		}

		if used[found] = true; found == "" {
			t.Errorf("%s: leftovers has no rule", p.name)
		}
	}

	for _, rule := range leftovers {
		if !used[rule.property] {
			t.Errorf("%q: no property has this name", rule.property)
		}
		if !strings.Contains(string(page), "`"+strings.TrimSpace(rule.property)+"`") {
			t.Errorf("%q: attach-and-release.md does not tell what it means", rule.property)
		}
	}
}

// TestMeanings checks that the meaning of a property depends on the value that remains.
func TestMeanings(t *testing.T) {
	vf := func(change func(*VFState)) *VFState {
		s := VFState{MAC: "02:00:00:00:00:02", SpoofCheck: new(true), Trust: new(false)}
		change(&s)
		return &s
	}
	for name, test := range map[string]struct {
		property    string
		before, now Snapshot
		want        meaning
	}{
		"promiscuous":         {"promiscuous", Snapshot{}, Snapshot{Promiscuous: true}, leaks},
		"promiscuous no more": {"promiscuous", Snapshot{Promiscuous: true}, Snapshot{}, isolates},
		"allmulticast":        {"allmulticast", Snapshot{}, Snapshot{AllMulticast: true}, leaks},
		"altname of the pod": {
			"altnames", Snapshot{}, Snapshot{AltNames: []string{"eth0"}}, leaks,
		},
		"altname of the host": {
			"altnames", Snapshot{AltNames: []string{"a"}}, Snapshot{}, harmless,
		},
		"unknown property": {"something new", Snapshot{}, Snapshot{}, leaks},
		"unknown trust": {
			"vf trust", Snapshot{}, Snapshot{VF: vf(func(s *VFState) { s.Trust = nil })}, leaks,
		},
		"unknown spoof check": {
			"vf spoofchk", Snapshot{}, Snapshot{VF: vf(func(s *VFState) { s.SpoofCheck = nil })},
			leaks,
		},
		"a program": {"XDP program", Snapshot{}, Snapshot{}, leaks},
		"a sysctl":  {"sysctl 7 of net.ipv4.conf", Snapshot{}, Snapshot{}, harmless},
		"MAC without a PF": {
			"mac", Snapshot{MAC: "02:00:00:00:00:01"}, Snapshot{MAC: "02:00:00:00:00:02"}, leaks,
		},
		"MAC set by the PF": {
			"mac", Snapshot{VF: vf(func(*VFState) {})},
			Snapshot{MAC: "02:00:00:00:00:02", VF: vf(func(*VFState) {})}, isolates,
		},
		"MAC that the PF lost": {
			"mac", Snapshot{VF: vf(func(s *VFState) { s.MAC = "" })},
			Snapshot{MAC: "02:00:00:00:00:02", VF: vf(func(*VFState) {})}, leaks,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := (remains{
				before: test.before, now: test.now,
			}).meaningOf(test.property); got != test.want {
				t.Errorf("%d, want %d", got, test.want)
			}
		})
	}
}

// TestNeutralMAC checks that the neutral MAC is a unicast address that is always the same for a VF,
// and differs between VFs.
func TestNeutralMAC(t *testing.T) {
	made := neutralMAC(&PF{Address: "0000:3b:00.0"}, Snapshot{})
	address := made.HardwareAddr()
	if len(address) != 6 || address[0]&1 != 0 ||
		made != neutralMAC(&PF{Address: "0000:3b:00.0", Name: "x"}, Snapshot{}) {
		t.Errorf("MAC %s", made)
	}
	if other := neutralMAC(&PF{Address: "0000:3b:00.0", VF: 1}, Snapshot{}); other == made {
		t.Errorf("two VFs have %s", other)
	}
	if own := neutralMAC(&PF{},
		Snapshot{Name: "ens1", MAC: "02:00:00:00:00:05"}); own != "02:00:00:00:00:05" {
		t.Errorf("a netdev gets %s in place of its own", own)
	}
}

// TestConclude checks that a property that leaks is reported even if another one may pass.
func TestConclude(t *testing.T) {
	r := remains{now: Snapshot{Name: "ens1", VF: &VFState{Trust: new(true)}}}
	trust, rate := property{name: "vf trust", value: "off", now: "on"}, property{
		name: "vf max_tx_rate", value: 0, now: 5,
	}
	_, err := r.conclude([]property{trust, rate},
		refusals{"vf max_tx_rate": unix.EAGAIN, "vf trust": unix.EINVAL})
	if !errors.Is(err, ErrLeaks) || !errors.Is(err, unix.EAGAIN) {
		t.Errorf("error %v", err)
	}

	_, err = r.conclude([]property{trust, rate},
		refusals{"vf max_tx_rate": unix.EINVAL, "vf trust": unix.EAGAIN})
	if errors.Is(err, ErrLeaks) || err == nil {
		t.Errorf("error %v", err)
	}

	notes, err := r.conclude([]property{rate}, refusals{"vf max_tx_rate": unix.EINVAL})
	if err != nil || len(notes) != 1 {
		t.Errorf("notes %q, error %v", notes, err)
	}
}
