// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"regexp"
	"strconv"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Card is a SmartNIC in a slot of the host. The zero values of fields other than PFs and VFs mean a
// BlueField-3 in slot 3b of NUMA node 0.
type Card struct {
	// PFs is the number of physical functions, 1-8.
	PFs int
	// VFs is the initial number of virtual functions of each PF.
	VFs int
	// TotalVFs is the maximum number of VFs of a PF (sriov_totalvfs), at most 256. 0 means VFs, but
	// at least 8.
	TotalVFs int
	// Bus is the PCI bus of the PFs as two hex digits, 01 or higher. VFs that do not fit are on the
	// next buses.
	Bus string
	// PCIeRoot is the root complex, such as "pci0000:3a". The default is domain 0000 and the bus
	// before Bus.
	PCIeRoot string
	// Vendor, Device and VFDevice are PCI ids, four hex digits.
	Vendor, Device, VFDevice string
	// Driver is the driver of PFs and VFs.
	Driver string
	// NUMANode is the node of the slot; -1 if the kernel does not know it.
	NUMANode int
	// Serial is the serial number in the card's Vital Product Data, at most 255 characters; "" for
	// none.
	Serial string
	// Identifier is the keyword V3 of the Vital Product Data, by which functions of one ConnectX-8
	// name each other, at most 200 characters; "" for none.
	Identifier string
	// DataDirect is the root complex of a ConnectX-8's Data Direct function and of the GPU beside
	// it, such as "pci0008:00"; "" for a card without one. See [GB300].
	DataDirect string
	// LinkSpeed is the speed of each PF's link in Mbit/s; 0 for a driver that does not report it.
	LinkSpeed int
	// Controller is the xPU's number for the host, as in c1pf0vf3; 0 if its eswitch does not number
	// controllers.
	Controller int
}

const (
	functionsPerDevice = 8
	maxVFs             = 256
	minTotalVFs        = 8
)

var (
	twoHex   = regexp.MustCompile(`^[0-9a-f]{2}$`)
	fourHex  = regexp.MustCompile(`^[0-9a-f]{4}$`)
	rootName = regexp.MustCompile(`^pci([0-9a-f]{4,8}):([0-9a-f]{2})$`)
	driver   = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
)

// complete fills in defaults and validates the card.
func (c Card) complete() (Card, error) {
	c.Bus = cmp.Or(c.Bus, "3b")
	c.Vendor, c.Device, c.VFDevice = cmp.Or(c.Vendor, "15b3"), cmp.Or(c.Device,
		"a2dc"), cmp.Or(c.VFDevice, "101e")
	c.Driver = cmp.Or(c.Driver, "mlx5_core")
	c.TotalVFs = cmp.Or(c.TotalVFs, max(c.VFs, minTotalVFs))
	var errs []error
	if !twoHex.MatchString(c.Bus) || c.Bus == "00" {
		return c, fmt.Errorf("card: bus %q: must be two hex digits, 01 or higher", c.Bus)
	}

	if c.PCIeRoot == "" {
		c.PCIeRoot = fmt.Sprintf("pci0000:%02x", c.bus()-1)
	}

	if !rootName.MatchString(c.PCIeRoot) {
		errs = append(errs, fmt.Errorf("PCIe root %q: must be like pci0000:3a", c.PCIeRoot))
	}

	if c.PFs < 1 || c.PFs > functionsPerDevice {
		errs = append(errs, fmt.Errorf("%d PFs: must be 1-%d", c.PFs, functionsPerDevice))
	}

	if c.TotalVFs < 1 || c.TotalVFs > maxVFs || c.VFs < 0 || c.VFs > c.TotalVFs {
		errs = append(errs,
			fmt.Errorf("%d of %d VFs: must be at most %d", c.VFs, c.TotalVFs,
				min(max(c.TotalVFs, 0), maxVFs)))
	}

	for _, id := range []string{c.Vendor, c.Device, c.VFDevice} {
		if !fourHex.MatchString(id) {
			errs = append(errs, fmt.Errorf("PCI id %q: must be four hex digits", id))
		}
	}

	if c.DataDirect != "" && (!rootName.MatchString(c.DataDirect) || c.DataDirect == c.PCIeRoot) {
		errs = append(errs, fmt.Errorf("PCIe root %q of Data Direct: must be like pci0008:00, and "+
			"another one than the card's", c.DataDirect))
	}

	if len(c.Identifier) > 200 {
		errs = append(errs, fmt.Errorf("identifier %q: must be at most 200 characters", c.Identifier))
	}

	if len(c.Serial) > 255 || c.Controller < 0 {
		errs = append(errs,
			fmt.Errorf("serial number %q, controller %d: must be at most 255 characters, and 0 "+
				"or more", c.Serial, c.Controller))
	}

	if !driver.MatchString(c.Driver) {
		errs = append(errs,
			fmt.Errorf("driver %q: must be a module's name such as mlx5_core", c.Driver))
	}
	if err := errors.Join(errs...); err != nil {
		return c, fmt.Errorf("card on bus %s: %w", c.Bus, err)
	}
	if c.last() > 0xffff {
		return c, fmt.Errorf("card on bus %s: %d x %d VFs do not fit on the buses behind it",
			c.Bus, c.PFs, c.TotalVFs)
	}

	return c, nil
}

func (c Card) bus() int {
	bus, _ := strconv.ParseUint(c.Bus, 16, 8)
	return int(bus)
}

// Repeat returns n equal cards, each in the first slot after the VFs of the previous one.
func Repeat(card Card, n int) ([]Card, error) {
	if n > 1 && card.PCIeRoot != "" {
		return nil, errors.New("cards: one PCIe root has one slot")
	}

	var out []Card
	for range n {
		complete, err := card.complete()
		if err != nil {
			return nil, err
		}

		out = append(out, complete)
		// One bus for the last VFs, one for the next root port.
		if next := complete.last()>>8 + 2; next <= 0xff {
			card.Bus = fmt.Sprintf("%02x", next)
		} else if len(out) < n {
			return nil, fmt.Errorf("cards: there are buses for %d of %d", len(out), n)
		}
	}

	return out, nil
}

// last returns the routing id of the card's last VF.
func (c Card) last() int { return c.routingID(c.PFs-1) + c.offset(c.PFs-1) + c.TotalVFs - 1 }

// routingID returns bus, device and function as one number (PCI Express Base Specification,
// 2.2.4.2).
func (c Card) routingID(pf int) int { return c.bus()<<8 | pf }

// stride and offset place the VFs (PCI Express Base Specification, 9.3.3.9 and 9.3.3.10): VF i has
// the routing id of its PF + offset + i * stride. The VFs of PF 0 begin at device 01, and those of
// each following PF at the next free device.
const stride = 1

func (c Card) offset(pf int) int {
	devices := (c.TotalVFs + functionsPerDevice - 1) / functionsPerDevice
	return functionsPerDevice*(1+pf*devices) - pf
}

// overlaps reports whether two cards share an address.
func (c Card) overlaps(other Card) bool {
	domain := func(c Card) string { return rootName.FindStringSubmatch(c.PCIeRoot)[1] }
	return domain(c) == domain(other) && c.routingID(0) <= other.last() &&
		other.routingID(0) <= c.last() ||
		// They would be in the same root port.
		c.PCIeRoot == other.PCIeRoot || c.PCIeRoot == other.DataDirect ||
		c.DataDirect == other.PCIeRoot || c.DataDirect != "" && c.DataDirect == other.DataDirect
}

func (c Card) pf(pf int) pci.Address { return c.address(c.routingID(pf)) }

func (c Card) vf(pf, index int) pci.Address {
	return c.address(c.routingID(pf) + c.offset(pf) + index*stride)
}

// rootPort returns the bridge above the card.
func (c Card) rootPort() pci.Address {
	parts := rootName.FindStringSubmatch(c.PCIeRoot)
	return pci.Address(parts[1] + ":" + parts[2] + ":00.0")
}

func (c Card) address(routingID int) pci.Address {
	domain := rootName.FindStringSubmatch(c.PCIeRoot)[1]
	return pci.Address(fmt.Sprintf("%s:%02x:%02x.%x", domain, routingID>>8, routingID>>3&0x1f,
		routingID&7))
}

// netdev returns the name of a PF in systemd's naming scheme (systemd.net-naming-scheme(7)), which
// is also the prefix of its VFs' names.
func (c Card) netdev(pf int) string {
	domain, _ := strconv.ParseUint(rootName.FindStringSubmatch(c.PCIeRoot)[1], 16, 32)
	if domain == 0 {
		return fmt.Sprintf("enp%ds0f%d", c.bus(), pf)
	}
	return fmt.Sprintf("enP%dp%ds0f%d", domain, c.bus(), pf)
}

// vitalProductData returns data with the serial number and the identifier (PCI Local Bus
// Specification 3.0, appendix I): a read-only resource with the keywords SN, V3 and RV, and the end
// tag. RV makes the sum of all bytes up to it 0.
func (c Card) vitalProductData() string {
	data := []byte{0x90, 0, 0}
	for _, keyword := range [][2]string{{"SN", c.Serial}, {"V3", c.Identifier}} {
		if keyword[1] != "" {
			data = append(append(data, keyword[0]...), byte(len(keyword[1])))
			data = append(data, keyword[1]...)
		}
	}

	data = append(data, 'R', 'V', 1)
	binary.LittleEndian.PutUint16(data[1:], uint16(len(data)+1-3))
	var sum byte
	for _, b := range data {
		sum += b
	}
	return string(append(data, -sum, 0x78))
}

// eswitchName returns the xPU's name for a VF, such as "c1pf0vf3", or "" if it does not number
// controllers.
func (c Card) eswitchName(pf, vf int) string {
	if c.Controller == 0 {
		return ""
	}
	return fmt.Sprintf("c%dpf%dvf%d", c.Controller, pf, vf)
}
