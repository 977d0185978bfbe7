// SPDX-License-Identifier: Apache-2.0

package function

import (
	"fmt"
	"net"
)

// MAC is a link-layer address in canonical form, lower-case hexadecimal bytes joined by colons:
// "02:00:00:00:00:01". An Ethernet address has 6 bytes, an InfiniBand one 20. The zero value is no
// address.
type MAC string

// ParseMAC reads the forms that [net.ParseMAC] reads.
func ParseMAC(s string) (MAC, error) {
	address, err := net.ParseMAC(s)
	if err != nil {
		return "", fmt.Errorf("MAC %q: must be an address such as 02:00:00:00:00:01", s)
	}
	return MAC(address.String()), nil
}

// HardwareAddr is the address in bytes, nil for the zero value or an address that [ParseMAC] would
// refuse.
func (m MAC) HardwareAddr() net.HardwareAddr {
	address, _ := net.ParseMAC(string(m))
	return address
}

// UnmarshalText reads what [ParseMAC] reads; an empty text is no address.
func (m *MAC) UnmarshalText(text []byte) (err error) {
	if len(text) == 0 {
		*m = ""
		return nil
	}
	*m, err = ParseMAC(string(text))
	return err
}
