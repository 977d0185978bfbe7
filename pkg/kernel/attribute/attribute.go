// SPDX-License-Identifier: Apache-2.0

// Package attribute parses netlink attributes (nlattr of include/uapi/linux/netlink.h): length with
// header, type, value, padding to 4 bytes. The types are without the flags NLA_F_NESTED and
// NLA_F_NET_BYTEORDER.
package attribute

import (
	"encoding/binary"
	"fmt"
	"iter"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// walk calls yield with each attribute until it returns false. The values are parts of b.
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

// All iterates over attributes by type, and ends at a malformed one. The values are parts of b.
func All(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) { _ = walk(b, yield) }
}

// First returns the value of the first attribute of a type, or nil. It ignores what is behind a
// malformed attribute. The value is a part of b. First is for messages of which most are not looked
// at any further; [Parse] makes a map of each.
func First(b []byte, kind uint16) []byte {
	for k, value := range All(b) {
		if k == kind {
			return value
		}
	}
	return nil
}

// Set are the attributes of a message, or of a nested attribute, by type; the last one of each
// type. An attribute that is not there, or of another size, reads as the zero value.
type Set map[uint16][]byte

// Parse reads all attributes, with an error those before a malformed one. The values are parts of
// b.
func Parse(b []byte) (Set, error) {
	s := Set{}
	err := walk(b, func(kind uint16, value []byte) bool {
		s[kind] = value
		return true
	})
	return s, err
}

// Has says whether there is an attribute of the type.
func (s Set) Has(kind uint16) bool {
	_, there := s[kind]
	return there
}

// number reads a value of exactly its own size.
func number[T uint8 | uint16 | uint32 | uint64](value []byte) (n T) {
	if size, err := binary.Decode(value, binary.NativeEndian, &n); err != nil ||
		size != len(value) {
		return 0
	}
	return n
}

// Uint8 is the value of an attribute of 8 bits.
func (s Set) Uint8(kind uint16) uint8 { return number[uint8](s[kind]) }

// Uint16 is the value of an attribute of 16 bits.
func (s Set) Uint16(kind uint16) uint16 { return number[uint16](s[kind]) }

// Uint32 is the value of an attribute of 32 bits.
func (s Set) Uint32(kind uint16) uint32 { return number[uint32](s[kind]) }

// Uint64 is the value of an attribute of 64 bits.
func (s Set) Uint64(kind uint16) uint64 { return number[uint64](s[kind]) }

// Text is what comes before the terminating zero.
func (s Set) Text(kind uint16) string {
	text, _, _ := strings.Cut(string(s[kind]), "\x00")
	return text
}
