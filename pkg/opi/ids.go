package opi

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var (
	pciAddress = regexp.MustCompile(`^([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])\.([0-7])$`)
	// https://google.aip.dev/122 as agents check it: 4-63 characters, a letter first, no hyphen last.
	objectID = regexp.MustCompile(`^[a-z][a-z0-9-]{2,61}[a-z0-9]$`)
)

// PortID is the id under which a Function's Port is kept on its xPU. It is a pure function of the device, so a call
// that is repeated after a crash finds what the first one made.
//
// pci is the PCI address (dddd:bb:dd.f, lower case) of the Function, or for an SF the address of its PF together with
// its sfnum (32 bits); sfnum is nil for everything else. The id is "vf-dddd-bb-dd-f" or "sf-bb-dd-f-sfnum" (with the PCI
// domain, "sf-dddd-bb-dd-f-sfnum", where that is not 0000). In the usual domain, with an sfnum below 10000, it has at
// most 15 characters: it is then also a valid netdev name, as agents need that look up a representor by it.
func PortID(pci string, sfnum *int) (string, error) {
	m := pciAddress.FindStringSubmatch(pci)
	if m == nil {
		return "", invalid("port id", "", "PCI address", fmt.Sprintf("%q is not of the form dddd:bb:dd.f, such as 0000:3b:02.1", pci))
	}
	parts := m[1:]
	if sfnum == nil {
		return "vf-" + strings.Join(parts, "-"), nil
	}
	if *sfnum < 0 || uint64(*sfnum) > math.MaxUint32 {
		return "", invalid("port id", "", "sfnum", fmt.Sprintf("%d is not a number of 32 bits", *sfnum))
	}
	if parts[0] == "0000" {
		parts = parts[1:]
	}
	return "sf-" + strings.Join(parts, "-") + "-" + strconv.Itoa(*sfnum), nil
}

// ParsePortID reverses [PortID]: it tells the device that an id is of. ok is false for an id that no device has.
func ParsePortID(id string) (pci string, sfnum *int, ok bool) {
	parts := strings.Split(id, "-")
	switch {
	case len(parts) == 5 && parts[0] == "sf":
		parts = slices.Insert(parts, 1, "0000")
		fallthrough
	case len(parts) == 6 && parts[0] == "sf":
		number, err := strconv.Atoi(parts[5])
		if err != nil {
			return "", nil, false
		}
		sfnum, parts = &number, parts[:5]
	case len(parts) == 5 && parts[0] == "vf":
	default:
		return "", nil, false
	}
	pci = strings.Join(parts[1:4], ":") + "." + parts[4]
	if again, err := PortID(pci, sfnum); err != nil || again != id {
		return "", nil, false
	}
	return pci, sfnum, true
}

// NetworkID is the id under which the network of this name (an XPUNetwork's, any length) is kept on an xPU. It has 12
// characters, "net-" and 40 bits of the name's SHA-256, which leaves three for a prefix in a netdev name. Should two
// names ever collide, [Client.EnsureNetwork] says ErrConflict as long as the networks differ in VLAN or VNI.
func NetworkID(name string) string {
	sum := sha256.Sum256([]byte(name))
	return "net-" + strings.ToLower(base32.StdEncoding.EncodeToString(sum[:5]))
}

func checkID(op, id string) error {
	if objectID.MatchString(id) {
		return nil
	}
	return invalid(op, id, "ID", "must be 4-63 characters of a-z, 0-9 and '-', begin with a letter and not end with '-'")
}
