package devlink

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// attributes are those of a message, or of an attribute that has attributes in it, by type; of several with one type,
// the last. Reading never fails: an attribute that is not there, or not of the size that it should have, is the zero
// value, as for a kernel that does not know it.
type attributes map[uint16][]byte

// parse reads what include/uapi/linux/netlink.h calls nlattr: length with header, type, value, padding to 4 bytes.
func parse(message []byte) (attributes, error) {
	const header, alignment = 4, 4
	attrs := attributes{}
	for rest := message; len(rest) > 0; {
		if len(rest) < header {
			return nil, fmt.Errorf("attribute of %d bytes, want at least %d", len(rest), header)
		}
		length := int(binary.NativeEndian.Uint16(rest))
		if length < header || length > len(rest) {
			return nil, fmt.Errorf("attribute of length %d in %d bytes", length, len(rest))
		}
		attrs[binary.NativeEndian.Uint16(rest[2:])&nl.NLA_TYPE_MASK] = rest[header:length]
		padded := (length + alignment - 1) / alignment * alignment
		rest = rest[min(padded, len(rest)):]
	}
	return attrs, nil
}

func (a attributes) has(kind uint16) bool {
	_, there := a[kind]
	return there
}

func (a attributes) uint8(kind uint16) uint8 {
	if v := a[kind]; len(v) == 1 {
		return v[0]
	}
	return 0
}

func (a attributes) uint16(kind uint16) uint16 {
	if v := a[kind]; len(v) == 2 {
		return binary.NativeEndian.Uint16(v)
	}
	return 0
}

func (a attributes) uint32(kind uint16) uint32 {
	if v := a[kind]; len(v) == 4 {
		return binary.NativeEndian.Uint32(v)
	}
	return 0
}

func (a attributes) uint64(kind uint16) uint64 {
	if v := a[kind]; len(v) == 8 {
		return binary.NativeEndian.Uint64(v)
	}
	return 0
}

// text is what comes before the terminating zero.
func (a attributes) text(kind uint16) string {
	text, _, _ := strings.Cut(string(a[kind]), "\x00")
	return text
}

func (a attributes) nested(kind uint16) (attributes, error) { return parse(a[kind]) }

func (a attributes) device() Device {
	return Device{Bus: a.text(unix.DEVLINK_ATTR_BUS_NAME), Name: a.text(unix.DEVLINK_ATTR_DEV_NAME)}
}

// attributes name the device in a request.
func (d Device) attributes() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(unix.DEVLINK_ATTR_BUS_NAME, nl.ZeroTerminated(d.Bus)),
		nl.NewRtAttr(unix.DEVLINK_ATTR_DEV_NAME, nl.ZeroTerminated(d.Name)),
	}
}

func portIndex(index uint32) *nl.RtAttr {
	return nl.NewRtAttr(unix.DEVLINK_ATTR_PORT_INDEX, nl.Uint32Attr(index))
}

// one is the answer to a question that has one.
func one(messages [][]byte) (attributes, error) {
	if len(messages) != 1 {
		return nil, fmt.Errorf("%d answers, want 1", len(messages))
	}
	return parse(messages[0])
}

// list decodes one object from each message.
func list[T any](messages [][]byte, decode func(attributes) (T, error)) ([]T, error) {
	var all []T
	for _, m := range messages {
		attrs, err := parse(m)
		if err != nil {
			return nil, err
		}
		object, err := decode(attrs)
		if err != nil {
			return nil, err
		}
		all = append(all, object)
	}
	return all, nil
}
