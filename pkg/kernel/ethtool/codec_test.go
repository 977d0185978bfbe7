// SPDX-License-Identifier: Apache-2.0

package ethtool

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

func message(attributes ...*nl.RtAttr) []byte {
	var m []byte
	for _, a := range attributes {
		m = append(m, a.Serialize()...)
	}
	return m
}

// bitset returns a bitset in its long form. With list it has the flag NOMASK, and all its bits are
// set.
func bitset(kind int, values map[string]bool, list bool) *nl.RtAttr {
	set := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	if list {
		set.AddRtAttr(unix.ETHTOOL_A_BITSET_NOMASK, nil)
	}

	set.AddRtAttr(unix.ETHTOOL_A_BITSET_SIZE, nl.Uint32Attr(uint32(len(values))))
	all := set.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, nil)
	for i, name := range slices.Sorted(maps.Keys(values)) {
		bit := all.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS_BIT|unix.NLA_F_NESTED, nil)
		bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_INDEX, nl.Uint32Attr(uint32(i)))
		bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_NAME, nl.ZeroTerminated(name))
		if values[name] && !list {
			bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_VALUE, nil)
		}
	}

	return set
}

// answers holds an answer of a driver for each group, and the settings that it means.
var answers = map[string]struct {
	answer []byte
	want   map[string]string
}{
	"private flags": {
		message(bitset(unix.ETHTOOL_A_PRIVFLAGS_FLAGS,
			map[string]bool{"legacy-rx": true, "vf-vlan-pruning": false}, false)),
		map[string]string{"legacy-rx": On, "vf-vlan-pruning": Off},
	},
	"features": {
		message(
			bitset(unix.ETHTOOL_A_FEATURES_HW,
				map[string]bool{"rx-gro": true, "tx-nocache-copy": true, "fixed": false}, false),
			bitset(unix.ETHTOOL_A_FEATURES_WANTED, map[string]bool{"rx-gro": true, "fixed": true},
				true),
		),
		map[string]string{"rx-gro": On, "tx-nocache-copy": Off},
	},
	"rings": {
		message(
			nl.NewRtAttr(unix.ETHTOOL_A_RINGS_RX_MAX, nl.Uint32Attr(4096)),
			nl.NewRtAttr(unix.ETHTOOL_A_RINGS_RX, nl.Uint32Attr(512)),
			nl.NewRtAttr(unix.ETHTOOL_A_RINGS_TX_PUSH, []byte{1}),
			nl.NewRtAttr(unix.ETHTOOL_A_RINGS_TX, []byte{1}), // the kernel uses 4 bytes
		),
		map[string]string{"rx": "512", "tx-push": "1"},
	},
	"RSS": {
		message(
			nl.NewRtAttr(rssHashFunction, nl.Uint32Attr(1)),
			nl.NewRtAttr(rssKey, []byte{0x6d, 0x5a}),
			nl.NewRtAttr(rssTable,
				slices.Concat(nl.Uint32Attr(0), nl.Uint32Attr(3), nl.Uint32Attr(0))),
		),
		map[string]string{"hash function": "1", "hash key": "6d5a", "table": "0 3 0"},
	},
	"time stamps": {
		message(
			bitset(tsTxTypes, map[string]bool{"on": true}, true),
			bitset(tsRxFilters, map[string]bool{"none": false, "all": true}, false),
		),
		map[string]string{"tx": "on", "rx": "all"},
	},
	"messages": {
		message(bitset(unix.ETHTOOL_A_DEBUG_MSGMASK,
			map[string]bool{"probe": true, "link": true, "drv": true}, true)),
		map[string]string{"classes": "drv link probe"},
	},
}

func TestParse(t *testing.T) {
	for name, test := range answers {
		g, err := groupOf(name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := g.parse(test.answer)
		if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
}

// TestTable checks that a table which assigns the queues in turn is written by the number of queues
// alone.
func TestTable(t *testing.T) {
	f := field{name: "table", kind: rssTable}
	for text, queues := range map[string][]uint32{
		"equal 1": {0, 0}, "equal 3": {0, 1, 2, 0, 1}, "0 1 1 0": {0, 1, 1, 0}, "2 2": {2, 2},
		"4294967295": {1<<32 - 1}, "": nil,
	} {
		var value []byte
		for _, queue := range queues {
			value = append(value, nl.Uint32Attr(queue)...)
		}
		if got := (table{}).decode(f, map[uint16][]byte{rssTable: value}); got["table"] != text {
			t.Errorf("%d is %q, want %q", queues, got["table"], text)
		}

		attr, err := table{}.encode(f, map[string]string{"table": text})
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}

		if strings.HasPrefix(text, equal) {
			value = nil
		}
		if !slices.Equal(attr.Data, value) {
			t.Errorf("%q is sent as %v, want %v", text, attr.Data, value)
		}
	}
}

// TestSpread checks the tables of shares. A table that assigns the queues in turn has its short form.
func TestSpread(t *testing.T) {
	for want, test := range map[string]struct {
		shares []int
		size   int
	}{
		"0 0 0 1":         {[]int{3, 1}, 4},
		"equal 1":         {[]int{7}, 4},
		"0 0 1 1":         {[]int{1, 1}, 4},
		"1 1 1 3":         {[]int{0, 6, 0, 2}, 4},
		"equal 2":         {[]int{65535, 65535}, 2},
		"0 0 1 1 1 2 2 2": {[]int{1, 1, 1}, 8},
		"":                {[]int{1}, 0},
	} {
		if got := Spread(test.shares, test.size); got != want {
			t.Errorf("%v of %d: %q, want %q", test.shares, test.size, got, want)
		}
	}

	// ethtool -X weight 1 2 gives 42 of 128 entries to the first queue.
	want := strings.TrimSpace(strings.Repeat("0 ", 42) + strings.Repeat("1 ", 86))
	if got := Spread([]int{1, 2}, 128); got != want {
		t.Errorf("[1 2] of 128: %q, want %q", got, want)
	}
}

// FuzzParse checks for any answer of a driver that the settings can be written back and are limited
// in number.
func FuzzParse(f *testing.F) {
	for _, test := range answers {
		f.Add(test.answer)
	}

	f.Add([]byte{4, 0, 3, 0, 9})
	f.Fuzz(func(t *testing.T, answer []byte) {
		for _, g := range groups {
			settings, err := g.parse(answer)
			if err != nil {
				continue
			}
			if limit := maxBits * len(g.fields); len(settings) > limit {
				t.Errorf("%s: %d settings, want at most %d", g.name, len(settings), limit)
			}
			if _, err := g.attributes(settings); err != nil {
				t.Errorf("%s: %v cannot be sent back: %v", g.name, settings, err)
			}
		}
	})
}
