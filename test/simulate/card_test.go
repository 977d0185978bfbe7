// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

func TestAddresses(t *testing.T) {
	for _, tt := range []struct {
		card         Card
		pf, vf       int
		wantPF       pci.Address
		wantVF       pci.Address
		wantRootPort pci.Address
		wantNetdev   string
	}{
		{Card{PFs: 2, VFs: 8}, 0, 0, "0000:3b:00.0", "0000:3b:01.0", "0000:3a:00.0", "enp59s0f0"},
		{Card{PFs: 2, VFs: 8}, 0, 7, "0000:3b:00.0", "0000:3b:01.7", "0000:3a:00.0", "enp59s0f0"},
		{Card{PFs: 2, VFs: 8}, 1, 1, "0000:3b:00.1", "0000:3b:02.1", "0000:3a:00.0", "enp59s0f1"},
		{Card{PFs: 2, TotalVFs: 9}, 1, 0, "0000:3b:00.1", "0000:3b:03.0", "0000:3a:00.0",
			"enp59s0f1"},
		{Card{PFs: 1, VFs: 256}, 0, 247, "0000:3b:00.0", "0000:3b:1f.7", "0000:3a:00.0",
			"enp59s0f0"},
		// on the next bus
		{Card{PFs: 1, VFs: 256}, 0, 248, "0000:3b:00.0", "0000:3c:00.0", "0000:3a:00.0",
			"enp59s0f0"},
		{Card{PFs: 8, VFs: 256}, 7, 255, "0000:3b:00.7", "0000:43:00.7", "0000:3a:00.0",
			"enp59s0f7"},
		{Card{PFs: 1, VFs: 1, Bus: "e1", PCIeRoot: "pci10000:e0"}, 0, 0, "10000:e1:00.0",
			"10000:e1:01.0", "10000:e0:00.0", "enP65536p225s0f0"},
	} {
		card, err := tt.card.complete()
		if err != nil {
			t.Errorf("%+v: %v", tt.card, err)
			continue
		}
		if got := card.pf(tt.pf); got != tt.wantPF {
			t.Errorf("%+v: PF %d is %s, want %s", tt.card, tt.pf, got, tt.wantPF)
		}
		if got := card.vf(tt.pf, tt.vf); got != tt.wantVF {
			t.Errorf("%+v: VF %d of PF %d is %s, want %s", tt.card, tt.vf, tt.pf, got, tt.wantVF)
		}
		if got := card.rootPort(); got != tt.wantRootPort {
			t.Errorf("%+v: root port %s, want %s", tt.card, got, tt.wantRootPort)
		}
		if got := card.netdev(tt.pf); got != tt.wantNetdev {
			t.Errorf("%+v: netdev %s, want %s", tt.card, got, tt.wantNetdev)
		}
	}
}

// TestNoAddressTwice covers the layout of VFs with bus overflow.
func TestNoAddressTwice(t *testing.T) {
	cards, err := Repeat(Card{PFs: 3, TotalVFs: 250}, 4)
	if err != nil {
		t.Fatal(err)
	}
	if cards, err = completeCards(cards); err != nil {
		t.Fatal(err)
	}

	seen := map[pci.Address]bool{}
	see := func(a pci.Address) {
		if _, err := pci.Parse(string(a)); err != nil || seen[a] {
			t.Fatalf("%s: given out twice, or %v", a, err)
		}
		seen[a] = true
	}

	for _, card := range cards {
		see(card.rootPort())
		for pf := range card.PFs {
			see(card.pf(pf))
			for vf := range card.TotalVFs {
				see(card.vf(pf, vf))
			}
		}
	}
}

func TestCardRefused(t *testing.T) {
	for want, cards := range map[string][]Card{
		"needs a card": nil,
		"0 PFs":        {{}},
		"9 PFs":        {{PFs: 9}},
		"257 of 257":   {{PFs: 1, VFs: 257}},
		"9 of 8":       {{PFs: 1, VFs: 9, TotalVFs: 8}},
		"-1 of 8":      {{PFs: 1, VFs: -1}},
		`bus "3g"`:     {{PFs: 1, Bus: "3g"}},
		`bus "00"`:     {{PFs: 1, Bus: "00"}},
		`root "0000"`:  {{PFs: 1, PCIeRoot: "0000"}},
		`id "0x15b3"`:  {{PFs: 1, Vendor: "0x15b3"}},
		`driver "../"`: {{PFs: 1, Driver: "../"}},
		"do not fit":   {{PFs: 8, VFs: 256, Bus: "f8"}},
		"overlaps":     {{PFs: 1, VFs: 256}, {PFs: 1, Bus: "3c"}},
		"Data Direct":  {{PFs: 1, DataDirect: "0008:00"}},
		"overlaps with": {{PFs: 1, Bus: "03", PCIeRoot: "pci0002:00", DataDirect: "pci0008:00"},
			{PFs: 1, Bus: "03", PCIeRoot: "pci0003:00", DataDirect: "pci0008:00"}},
	} {
		if _, err := completeCards(cards); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cards, err, want)
		}
	}
	for want, card := range map[string]Card{
		"do not fit": {PFs: 8, VFs: 256}, "buses for": {PFs: 1},
	} {
		if _, err := Repeat(card, 200); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("200 of %+v: %v, want an error with %q", card, err, want)
		}
	}
}
