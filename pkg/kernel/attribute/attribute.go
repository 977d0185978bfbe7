// Package attribute reads what include/uapi/linux/netlink.h calls nlattr: length with header, type, value, padding to 4
// bytes. The types are those without the flags NLA_F_NESTED and NLA_F_NET_BYTEORDER.
package attribute

import (
	"encoding/binary"
	"fmt"
	"iter"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// next takes the first attribute off.
func next(b []byte) (kind uint16, value, rest []byte, err error) {
	if len(b) < unix.NLA_HDRLEN {
		return 0, nil, nil, fmt.Errorf("attribute of %d bytes, want at least %d", len(b), unix.NLA_HDRLEN)
	}
	length := int(binary.NativeEndian.Uint16(b))
	if length < unix.NLA_HDRLEN || length > len(b) {
		return 0, nil, nil, fmt.Errorf("attribute of length %d in %d bytes", length, len(b))
	}
	padded := (length + unix.NLA_ALIGNTO - 1) &^ (unix.NLA_ALIGNTO - 1)
	kind = binary.NativeEndian.Uint16(b[2:]) & nl.NLA_TYPE_MASK
	return kind, b[unix.NLA_HDRLEN:length], b[min(padded, len(b)):], nil
}

// All walks over attributes by type, and ends at one that is not well formed. The values are parts of b.
func All(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) > 0 {
			kind, value, rest, err := next(b)
			if err != nil || !yield(kind, value) {
				return
			}
			b = rest
		}
	}
}

// Set are the attributes of a message, or of an attribute that has attributes in it, by type; of several with one type,
// the last. Reading never fails: an attribute that is not there, or not of the size that it should have, is the zero
// value, as for a kernel that does not know it.
type Set map[uint16][]byte

// Parse reads all attributes. The values are parts of b.
func Parse(b []byte) (Set, error) {
	s := Set{}
	for len(b) > 0 {
		kind, value, rest, err := next(b)
		if err != nil {
			return nil, err
		}
		s[kind], b = value, rest
	}
	return s, nil
}

// Nested reads the attributes in an attribute.
func (s Set) Nested(kind uint16) (Set, error) { return Parse(s[kind]) }

// Has says whether there is an attribute of the type.
func (s Set) Has(kind uint16) bool {
	_, there := s[kind]
	return there
}

// Uint8 is the value of an attribute of 8 bits.
func (s Set) Uint8(kind uint16) uint8 {
	if v := s[kind]; len(v) == 1 {
		return v[0]
	}
	return 0
}

// Uint16 is the value of an attribute of 16 bits.
func (s Set) Uint16(kind uint16) uint16 {
	if v := s[kind]; len(v) == 2 {
		return binary.NativeEndian.Uint16(v)
	}
	return 0
}

// Uint32 is the value of an attribute of 32 bits.
func (s Set) Uint32(kind uint16) uint32 {
	if v := s[kind]; len(v) == 4 {
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

// Uint64 is the value of an attribute of 64 bits.
func (s Set) Uint64(kind uint16) uint64 {
	if v := s[kind]; len(v) == 8 {
		return binary.NativeEndian.Uint64(v)
	}
	return 0
}

// Text is what comes before the terminating zero.
func (s Set) Text(kind uint16) string {
	text, _, _ := strings.Cut(string(s[kind]), "\x00")
	return text
}
