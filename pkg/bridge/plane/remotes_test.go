// SPDX-License-Identifier: Apache-2.0

package plane

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestParseRemotes(t *testing.T) {
	many := strings.TrimSuffix(strings.Repeat("10.1.0.1, ", maxRemotes+1), ", ")
	for name, test := range map[string]struct{ text, says string }{
		"rules": {
			"remotes: [{addresses: [198.51.100.2]}, {vnis: [7, 10-20], addresses: ['fd00::2']}]", "",
		},
		"nowhere":        {"remotes: [{addresses: []}]", ""},
		"no rules":       {"remotes: []", ""},
		"empty":          {"", "remotes: is missing"},
		"no addresses":   {"remotes: [{vnis: [7]}]", "remotes[0].addresses: is missing"},
		"no address":     {"remotes: [{addresses: [x]}]", "ParseAddr"},
		"multicast":      {"remotes: [{addresses: [239.0.0.1]}]", "addresses[0]: 239.0.0.1: must be"},
		"link-local":     {"remotes: [{addresses: ['fe80::1']}]", "addresses[0]: fe80::1: must be"},
		"loopback":       {"remotes: [{addresses: [127.0.0.1]}]", "addresses[0]: 127.0.0.1: must"},
		"IPv4 in IPv6":   {"remotes: [{addresses: ['::ffff:10.0.0.1']}]", "must be a unicast"},
		"too many":       {"remotes: [{addresses: [" + many + "]}]", "must have at most 1024"},
		"VNI 0":          {"remotes: [{vnis: [0], addresses: []}]", "must be in 1-16777215"},
		"VNI too large":  {"remotes: [{vnis: [1-16777216], addresses: []}]", "must be in 1-16777215"},
		"backwards":      {"remotes: [{vnis: [9-7], addresses: []}]", "the lowest first"},
		"no range":       {"remotes: [{vnis: ['*'], addresses: []}]", "must be a number, or a range"},
		"another field":  {"remotes: [{port: 4789, addresses: []}]", "port"},
		"no YAML at all": {"remotes: [", "yaml"},
	} {
		_, err := ParseRemotes([]byte(test.text))
		if test.says == "" && err != nil || test.says != "" &&
			(err == nil || !strings.Contains(err.Error(), test.says)) {
			t.Errorf("%s: error %v, want one with %q", name, err, test.says)
		}
	}
}

func TestRemotesFor(t *testing.T) {
	r, err := ParseRemotes([]byte(`
remotes:
- vnis: [10-20, 30]
  addresses: [198.51.100.3, 198.51.100.2]
- vnis: [20-25]
  addresses: [198.51.100.2, "fd00::2"]
- vnis: [40]
  addresses: []
`))
	if err != nil {
		t.Fatal(err)
	}

	for vni, want := range map[uint32]string{
		9: "[] false", 10: "[198.51.100.2 198.51.100.3] true", 25: "[198.51.100.2 fd00::2] true",
		20: "[198.51.100.2 198.51.100.3 fd00::2] true", 40: "[] true", 41: "[] false",
	} {
		addresses, named := r.For(vni)
		if got := fmt.Sprint(addresses, named); got != want {
			t.Errorf("VNI %d: %s, want %s", vni, got, want)
		}
	}
	if addresses, named := (*Remotes)(nil).For(10); named || addresses != nil {
		t.Errorf("no configuration: %s, %t", addresses, named)
	}
}

func FuzzParseRemotes(f *testing.F) {
	f.Add([]byte("remotes: [{vnis: [7, 10-20], addresses: [198.51.100.2, 'fd00::2']}]"))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		r, err := ParseRemotes(text)
		if err != nil {
			return
		}
		addresses, named := r.For(7)
		if len(addresses) > maxRemotes || len(addresses) > 0 && !named ||
			!slices.IsSortedFunc(addresses, netip.Addr.Compare) {
			t.Errorf("%q: %s, %t", text, addresses, named)
		}
	})
}
