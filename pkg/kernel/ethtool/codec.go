// SPDX-License-Identifier: Apache-2.0

package ethtool

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// On and Off are the values of a setting that is one bit.
const (
	On  = "on"
	Off = "off"
)

// number is the codec of an unsigned number. The number itself is the size in bytes, 1 or 4. The
// text is decimal.
type number int

func (n number) decode(f field, answer attribute.Set) map[string]string {
	value := answer[f.kind]
	switch {
	case len(value) != int(n):
		return nil
	case n == 1:
		return map[string]string{f.name: strconv.Itoa(int(value[0]))}
	}

	return map[string]string{
		f.name: strconv.FormatUint(uint64(binary.NativeEndian.Uint32(value)), 10),
	}
}

func (n number) encode(f field, to map[string]string) (*nl.RtAttr, error) {
	text, wanted := to[f.name]
	if !wanted {
		return nil, nil
	}

	value, err := strconv.ParseUint(text, 10, 8*int(n))
	if err != nil {
		return nil, fmt.Errorf("%s %q: must be a number of %d bits", f.name, text, 8*n)
	}
	if n == 1 {
		return nl.NewRtAttr(int(f.kind), []byte{byte(value)}), nil
	}

	return nl.NewRtAttr(int(f.kind), nl.Uint32Attr(uint32(value))), nil
}

// maxBits and maxName limit what is accepted of a bitset. The kernel has 64 features, names of at
// most 32 bytes (ETH_GSTRING_LEN), and drivers have fewer private flags.
const (
	maxBits = 256
	maxName = 32
)

// bits is the codec of a bitset with names. Each bit is one setting.
type bits struct{}

func (bits) decode(f field, answer attribute.Set) map[string]string {
	set := parseBits(answer[f.kind])
	names := set
	if f.changeable != 0 {
		names = parseBits(answer[f.changeable])
	}

	settings := map[string]string{}
	for name, there := range names {
		switch {
		case f.changeable != 0 && !there:
		case set[name]:
			settings[name] = On
		default:
			settings[name] = Off
		}
	}

	return settings
}

// parseBits reads a bitset in its long form. It returns the names of all bits in the answer, and
// whether each bit is set. A bitset with the flag NOMASK lists only the bits that are set.
func parseBits(data []byte) map[string]bool {
	list := false
	for kind := range attribute.All(data) {
		list = list || kind == unix.ETHTOOL_A_BITSET_NOMASK
	}

	set := map[string]bool{}
	for kind, all := range attribute.All(data) {
		if kind != unix.ETHTOOL_A_BITSET_BITS {
			continue
		}
		for _, bit := range attribute.All(all) {
			if name, value := parseBit(bit); name != "" && len(set) < maxBits {
				set[name] = list || value
			}
		}
	}

	return set
}

// parseBit returns the name of a bit and whether it is set. The name is "" if it is too long or not
// UTF-8, because a record cannot hold such a name.
func parseBit(bit []byte) (name string, set bool) {
	for kind, value := range attribute.All(bit) {
		switch kind {
		case unix.ETHTOOL_A_BITSET_BIT_NAME:
			name, _, _ = strings.Cut(string(value), "\x00")
		case unix.ETHTOOL_A_BITSET_BIT_VALUE:
			set = true
		}
	}

	if len(name) > maxName || !utf8.ValidString(name) {
		return "", set
	}

	return name, set
}

func (bits) encode(f field, to map[string]string) (*nl.RtAttr, error) {
	if len(to) == 0 {
		return nil, nil
	}

	set := nl.NewRtAttr(int(f.kind)|unix.NLA_F_NESTED, nil)
	all := set.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, nil)
	for name, value := range to {
		if value != On && value != Off {
			return nil, fmt.Errorf("%s %q: must be %s or %s", name, value, On, Off)
		}
		bit := addBit(all, name)
		if value == On {
			bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_VALUE, nil)
		}
	}

	return set, nil
}

func addBit(all *nl.RtAttr, name string) *nl.RtAttr {
	bit := all.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS_BIT|unix.NLA_F_NESTED, nil)
	bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_NAME, nl.ZeroTerminated(name))
	return bit
}

// list is the codec of a bitset whose answer names only the bits that are set. It is one setting:
// the names in alphabetical order, such as "drv link probe".
type list struct{}

func (list) decode(f field, answer attribute.Set) map[string]string {
	var names []string
	for name, set := range parseBits(answer[f.kind]) {
		if set {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return map[string]string{f.name: strings.Join(names, " ")}
}

func (list) encode(f field, to map[string]string) (*nl.RtAttr, error) {
	text, wanted := to[f.name]
	if !wanted {
		return nil, nil
	}

	set := nl.NewRtAttr(int(f.kind)|unix.NLA_F_NESTED, nil)
	set.AddRtAttr(unix.ETHTOOL_A_BITSET_NOMASK, nil)
	all := set.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, nil)
	for _, name := range strings.Fields(text) {
		addBit(all, name)
	}

	return set, nil
}

// binaryText is the codec of bytes. The text is hexadecimal.
type binaryText struct{}

func (binaryText) decode(f field, answer attribute.Set) map[string]string {
	return map[string]string{f.name: hex.EncodeToString(answer[f.kind])}
}

func (binaryText) encode(f field, to map[string]string) (*nl.RtAttr, error) {
	text, wanted := to[f.name]
	if !wanted {
		return nil, nil
	}

	value, err := hex.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("%s: must be in hexadecimal: %w", f.name, err)
	}
	return nl.NewRtAttr(int(f.kind), value), nil
}

// table is the codec of the RSS indirection table. The text is the list of queues among which the
// card spreads packets, such as "0 1 2 3 0 1 2 3".
//
// A table that assigns the first n queues in turn is written as "equal n". The kernel makes this
// table for n channels (ethtool_rxfh_indir_default), and makes it again when it receives an empty
// table.
type table struct{}

const equal = "equal "

func (table) decode(f field, answer attribute.Set) map[string]string {
	queues := make([]uint32, len(answer[f.kind])/4)
	_, _ = binary.Decode(answer[f.kind], binary.NativeEndian, queues)
	if len(queues) == 0 {
		return nil
	}

	n := int(slices.Max(queues)) + 1
	for i, queue := range queues {
		if int(queue) != i%n {
			return map[string]string{f.name: strings.Trim(fmt.Sprint(queues), "[]")}
		}
	}

	return map[string]string{f.name: equal + strconv.Itoa(n)}
}

func (table) encode(f field, to map[string]string) (*nl.RtAttr, error) {
	text, wanted := to[f.name]
	switch {
	case !wanted:
		return nil, nil
	case strings.HasPrefix(text, equal):
		return nl.NewRtAttr(int(f.kind), nil), nil
	}

	var value []byte
	for _, word := range strings.Fields(text) {
		queue, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("%s: %q: must be the number of a queue", f.name, word)
		}
		value = append(value, nl.Uint32Attr(uint32(queue))...)
	}

	return nl.NewRtAttr(int(f.kind), value), nil
}
