// SPDX-License-Identifier: Apache-2.0

package function

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
)

// GUID is the globally unique identifier (EUI-64) of an InfiniBand node or port, in canonical form:
// 8 lower-case hexadecimal bytes joined by colons, such as "00:11:22:33:44:55:66:77". The zero value
// means no GUID.
type GUID string

// GUIDPattern is what [ParseGUID] accepts, in the syntax of RE2.
const GUIDPattern = `^([0-9a-fA-F]{2}:){7}[0-9a-fA-F]{2}$`

// MustBeGUID says in words what a GUID must be.
const MustBeGUID = "must be 8 bytes such as 00:11:22:33:44:55:66:77, and neither zeros nor all ones"

// ParseGUID parses a GUID of the form "00:11:22:33:44:55:66:77".
func ParseGUID(s string) (GUID, error) {
	address, err := net.ParseMAC(s)
	if err != nil || len(address) != guidSize || strings.Count(s, ":") != guidSize-1 {
		return "", fmt.Errorf("GUID %q: %s", s, MustBeGUID)
	}
	return GUID(address.String()), nil
}

const guidSize = 8 // bytes

// GUIDOf returns the GUID with a value, as the kernel has it in struct ifla_vf_guid of
// include/uapi/linux/if_link.h. The first byte of the text is the most significant one.
func GUIDOf(value uint64) GUID {
	return GUID(net.HardwareAddr(binary.BigEndian.AppendUint64(nil, value)).String())
}

// HardwareAddr returns the GUID in bytes, or nil for the zero value and for an invalid GUID.
func (g GUID) HardwareAddr() net.HardwareAddr {
	address, _ := net.ParseMAC(string(g))
	return address
}

// IsUsable reports whether a node or port can have the GUID. It cannot be zeros, which a PF reports
// if no GUID was set, and not all ones.
func (g GUID) IsUsable() bool {
	return len(g.HardwareAddr()) == guidSize && strings.Trim(string(g), "0:") != "" &&
		strings.Trim(string(g), "f:") != ""
}
