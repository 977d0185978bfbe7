// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/rdma"
)

// fullSnapshot returns a snapshot that contains every property.
func fullSnapshot() Snapshot {
	return Snapshot{
		Name: "ens1", MAC: "02:00:00:00:00:01", VF: &VFState{
			MAC:      "02:00:00:00:00:02",
			NodeGUID: "02:00:00:00:00:00:00:10", PortGUID: "02:00:00:00:00:00:00:11",
		},
		Rate:    &function.Rate{},
		Carried: &Carried{GSOIPv4MaxSize: 1, ProtoDown: &ProtoDown{}},
		Conf:    &Conf{IPv4: make([]uint32, 31), IPv6: make([]int32, len(conf6))},
		RDMA:    &RDMA{Devices: []rdma.Device{{Name: "mlx5_2", Moderation: new(true)}}},
	}
}

// TestProperties checks that the table has a row for each property of a snapshot and for each group
// of settings, and that each row which is not about the pod's namespace is about one of these.
func TestProperties(t *testing.T) {
	names := []string{}
	for _, p := range fullSnapshot().properties() {
		names = append(names, p.name)
	}
	for _, group := range (&Engine{}).settingGroups() {
		names = append(names, group.name+" any")
	}

	for _, name := range names {
		covers := func(p Property) bool { return p.Covers(name) }
		if !slices.ContainsFunc(table, covers) {
			t.Errorf("%s: no row is about it", name)
		}
	}

	for _, p := range table {
		outside := p.Source == FromPod || p.Name == "tcx programs" || p.Name == "RDMA devices"
		if !outside && !slices.ContainsFunc(names, p.Covers) {
			t.Errorf("%q: no property has this name", p.Name)
		}
		if !outside && (len(p.Leftovers) == 0 || p.Leftovers[len(p.Leftovers)-1].when != nil) {
			t.Errorf("%q: it is not known what some values mean for the next owner", p.Name)
		}
		if outside && p.Move != Gone && p.Release == "" {
			t.Errorf("%q: a release does nothing about it", p.Name)
		}
	}
}

// TestLeaks checks that it depends on the value that remains whether a property leaks.
func TestLeaks(t *testing.T) {
	vf := func(change func(*VFState)) *VFState {
		s := VFState{MAC: "02:00:00:00:00:02", SpoofCheck: new(true), Trust: new(false)}
		change(&s)
		return &s
	}
	for name, test := range map[string]struct {
		property    string
		before, now Snapshot
		want        bool
	}{
		"promiscuous":         {"promiscuous", Snapshot{}, Snapshot{Promiscuous: true}, true},
		"promiscuous no more": {"promiscuous", Snapshot{Promiscuous: true}, Snapshot{}, false},
		"allmulticast":        {"allmulticast", Snapshot{}, Snapshot{AllMulticast: true}, true},
		"altname of the pod": {
			"altnames", Snapshot{}, Snapshot{AltNames: []string{"eth0"}}, true,
		},
		"altname of the host": {
			"altnames", Snapshot{AltNames: []string{"a"}}, Snapshot{}, false,
		},
		"unknown property": {"something new", Snapshot{}, Snapshot{}, true},
		"unknown trust": {
			"vf trust", Snapshot{}, Snapshot{VF: vf(func(s *VFState) { s.Trust = nil })}, true,
		},
		"unknown spoof check": {
			"vf spoofchk", Snapshot{}, Snapshot{VF: vf(func(s *VFState) { s.SpoofCheck = nil })},
			true,
		},
		"a program": {"XDP program", Snapshot{}, Snapshot{}, true},
		"a sysctl":  {"sysctl 7 of net.ipv4.conf", Snapshot{}, Snapshot{}, false},
		"MAC without a PF": {
			"mac", Snapshot{MAC: "02:00:00:00:00:01"}, Snapshot{MAC: "02:00:00:00:00:02"}, true,
		},
		"MAC set by the PF": {
			"mac", Snapshot{VF: vf(func(*VFState) {})},
			Snapshot{MAC: "02:00:00:00:00:02", VF: vf(func(*VFState) {})}, false,
		},
		"MAC that the PF lost": {
			"mac", Snapshot{VF: vf(func(s *VFState) { s.MAC = "" })},
			Snapshot{MAC: "02:00:00:00:00:02", VF: vf(func(*VFState) {})}, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := (remains{
				before: test.before, now: test.now,
			}).leaks(test.property); got != test.want {
				t.Errorf("leaks: %t", got)
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
