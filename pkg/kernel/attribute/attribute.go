// SPDX-License-Identifier: Apache-2.0

// Package attribute parses netlink attributes (struct nlattr of include/uapi/linux/netlink.h). An
// attribute is a length that includes the header, a type, a value, and padding to 4 bytes. The
// package removes the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER from every type.
package attribute

import (
	"encoding/binary"
	"fmt"
	"iter"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// walk calls yield with each attribute of b until yield returns false. The values are slices of b.
// walk returns an error at the first malformed attribute.
func walk(b []byte, yield func(kind uint16, value []byte) bool) error {
	for len(b) > 0 {
		if len(b) < unix.NLA_HDRLEN {
			return fmt.Errorf("attribute of %d bytes, want at least %d", len(b), unix.NLA_HDRLEN)
		}

		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.NLA_HDRLEN || length > len(b) {
			return fmt.Errorf("attribute of length %d in %d bytes", length, len(b))
		}
		if !yield(binary.NativeEndian.Uint16(b[2:])&nl.NLA_TYPE_MASK, b[unix.NLA_HDRLEN:length]) {
			return nil
		}

		padded := (length + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
		b = b[min(padded, len(b)):]
	}
	return nil
}

// All iterates over the attributes of b by type. It ends without an error at a malformed attribute.
// The values are slices of b.
func All(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) { _ = walk(b, yield) }
}

// Set holds the attributes of a message, or of a nested attribute, by type. If a type occurs more
// than once, the last attribute counts. An attribute that is missing or has another size reads as
// the zero value.
type Set map[uint16][]byte

// Parse reads all attributes of b. If one is malformed, Parse returns an error and the attributes
// before it. The values are slices of b.
func Parse(b []byte) (Set, error) {
	s := Set{}
	err := walk(b, func(kind uint16, value []byte) bool {
		s[kind] = value
		return true
	})
	return s, err
}

// Has reports whether there is an attribute of the type.
func (s Set) Has(kind uint16) bool {
	_, there := s[kind]
	return there
}

// number decodes a value in the byte order of the host. It returns 0 for a value of another size
// than T.
func number[T uint8 | uint16 | uint32 | uint64](value []byte) (n T) {
	if size, err := binary.Decode(value, binary.NativeEndian, &n); err != nil ||
		size != len(value) {
		return 0
	}
	return n
}

// Uint8 returns the value of an attribute of 8 bits.
func (s Set) Uint8(kind uint16) uint8 { return number[uint8](s[kind]) }

// Uint16 returns the value of an attribute of 16 bits.
func (s Set) Uint16(kind uint16) uint16 { return number[uint16](s[kind]) }

// Uint32 returns the value of an attribute of 32 bits.
func (s Set) Uint32(kind uint16) uint32 { return number[uint32](s[kind]) }

// Uint64 returns the value of an attribute of 64 bits.
func (s Set) Uint64(kind uint16) uint64 { return number[uint64](s[kind]) }

// Text returns the value of a string attribute without the terminating zero byte.
func (s Set) Text(kind uint16) string {
	text, _, _ := strings.Cut(string(s[kind]), "\x00")
	return text
}
