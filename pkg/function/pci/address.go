// SPDX-License-Identifier: Apache-2.0

// Package pci handles PCI addresses.
package pci

import (
	"fmt"
	"regexp"
	"strings"
)

// Address is the address of a PCI function, "dddd:bb:dd.f" in lower-case hex: domain (16 bits, or
// 32 bits behind a bridge such as VMD that has its own domain), bus, device (5 bits) and function
// (3 bits). The kernel names devices by it in sysfs (Documentation/ABI/testing/sysfs-bus-pci). It
// is the same on the host and on the xPU.
type Address string

var (
	canonical  = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	deviceName = regexp.MustCompile(`^([0-9a-f]{4,8})-([0-9a-f]{2})-([01][0-9a-f])-([0-7])$`)
)

// Parse parses an address in upper or lower case. The domain is required.
func Parse(s string) (Address, error) {
	lower := strings.ToLower(s)
	if !canonical.MatchString(lower) {
		return "", fmt.Errorf("PCI address %q: must be dddd:bb:dd.f in hex, such as 0000:3b:02.1",
			s)
	}
	return Address(lower), nil
}

// VFIndex returns the index of the VF with this address at a PF whose SR-IOV capability has this
// offset and stride (PCI Express 6.0, section 9.2.1.2), and its distance in routing IDs from VF 0.
// ok is false if no VF of the PF has the address.
func VFIndex(pf, vf Address, offset, stride int) (index, distance int, ok bool) {
	domain, id := pf.routingID()
	vfDomain, vfID := vf.routingID()
	distance = vfID - id - offset
	if stride == 0 || domain != vfDomain || distance < 0 || distance%stride != 0 {
		return 0, 0, false
	}
	return distance / stride, distance, true
}

// routingID returns bus, device and function as one number (PCI Express 6.0, section 2.2.4.2).
func (a Address) routingID() (domain, id int) {
	var bus, device, function int
	// the form of addresses is known
	_, _ = fmt.Sscanf(string(a), "%x:%x:%x.%d", &domain, &bus, &device, &function)
	return domain, bus<<8 | device<<3 | function
}

// DeviceName returns the address as a DNS label, such as "0000-3b-02-1". It is the name of a device
// in a ResourceSlice.
func (a Address) DeviceName() string {
	return strings.NewReplacer(":", "-", ".", "-").Replace(string(a))
}

// ParseDeviceName reverses [Address.DeviceName].
func ParseDeviceName(s string) (Address, error) {
	parts := deviceName.FindStringSubmatch(s)
	if parts == nil {
		return "", fmt.Errorf("device name %q: must be dddd-bb-dd-f in hex, such as 0000-3b-02-1",
			s)
	}
	return Address(parts[1] + ":" + parts[2] + ":" + parts[3] + "." + parts[4]), nil
}
