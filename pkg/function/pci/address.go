// Package pci names PCI functions.
package pci

import (
	"fmt"
	"regexp"
	"strings"
)

// Address is the address of a PCI function, "dddd:bb:dd.f" in lower-case hex: domain (16 bits; 32 where a bridge such
// as VMD has a domain of its own), bus, device (5 bits) and function (3 bits). It is what the kernel names devices by
// in sysfs (Documentation/ABI/testing/sysfs-bus-pci), and it is the same on the host and on the xPU.
type Address string

var (
	canonical  = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	deviceName = regexp.MustCompile(`^([0-9a-f]{4,8})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])$`)
)

// Parse reads an address in upper or lower case. The domain must be there.
func Parse(s string) (Address, error) {
	lower := strings.ToLower(s)
	if !canonical.MatchString(lower) {
		return "", fmt.Errorf("PCI address %q: must be dddd:bb:dd.f in hex, such as 0000:3b:02.1", s)
	}
	return Address(lower), nil
}

// DeviceName is the address as a DNS label, "0000-3b-02-1": the name of a device in a ResourceSlice.
func (a Address) DeviceName() string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(string(a))
}

// ParseDeviceName reverses [Address.DeviceName].
func ParseDeviceName(s string) (Address, error) {
	parts := deviceName.FindStringSubmatch(s)
	if parts == nil {
		return "", fmt.Errorf("device name %q: must be dddd-bb-dd-f in hex, such as 0000-3b-02-1", s)
	}
	return Address(parts[1] + ":" + parts[2] + ":" + parts[3] + "." + parts[4]), nil
}
