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

// infiniBandSize is the size of an InfiniBand address in bytes (INFINIBAND_ALEN of
// include/linux/if_infiniband.h). The last 8 bytes are the port's GUID. The bytes before it are the
// prefix of the subnet, and the number of a queue pair. A driver chooses this number when it makes
// the netdev (RFC 4391, section 9.1.1).
const infiniBandSize = 20

// PortGUID returns the port's GUID in an InfiniBand address, or "" for another address.
func (m MAC) PortGUID() GUID {
	address := m.HardwareAddr()
	if len(address) != infiniBandSize {
		return ""
	}
	return GUID(address[infiniBandSize-guidSize:].String())
}

// At returns m as a netdev can have it that has the address now. Of an InfiniBand address only the
// port's GUID can be set (ipoib_check_lladdr of drivers/infiniband/ulp/ipoib/ipoib_main.c), so that
// At takes the rest from now. Other addresses stay.
func (m MAC) At(now MAC) MAC {
	if m.PortGUID() == "" || now.PortGUID() == "" {
		return m
	}
	const rest = infiniBandSize - guidSize
	return MAC(append(now.HardwareAddr()[:rest:rest], m.HardwareAddr()[rest:]...).String())
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
