// SPDX-License-Identifier: Apache-2.0

package function

import (
	"fmt"
	"net"
	"strings"
)

// MAC is a link-layer address in canonical form: lower-case hexadecimal bytes joined by colons,
// such as "02:00:00:00:00:01". An Ethernet address has 6 bytes, an InfiniBand address 20. The zero
// value means no address.
type MAC string

// ParseMAC parses the forms that [net.ParseMAC] accepts.
func ParseMAC(s string) (MAC, error) {
	address, err := net.ParseMAC(s)
	if err != nil {
		return "", fmt.Errorf("MAC %q: must be an address such as 02:00:00:00:00:01", s)
	}
	return MAC(address.String()), nil
}

// HardwareAddr returns the address in bytes, or nil for the zero value and for an invalid address.
func (m MAC) HardwareAddr() net.HardwareAddr {
	address, _ := net.ParseMAC(string(m))
	return address
}

// isUnicast reports whether m is an Ethernet address that one netdev can have.
func (m MAC) isUnicast() bool {
	address := m.HardwareAddr()
	return len(address) == 6 && address[0]&1 == 0 && strings.Trim(string(m), "0:") != ""
}

// UnmarshalText parses like [ParseMAC]; an empty text means no address.
func (m *MAC) UnmarshalText(text []byte) (err error) {
	if len(text) == 0 {
		*m = ""
		return nil
	}
	*m, err = ParseMAC(string(text))
	return err
}
