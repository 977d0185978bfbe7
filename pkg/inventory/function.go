package inventory

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/pci"
)

// Kind is what a Function is.
type Kind string

// The kinds of Functions.
const (
	PF Kind = "PF" // physical function; also a NIC without SR-IOV
	VF Kind = "VF" // virtual function
	SF Kind = "SF" // subfunction, on the auxiliary bus
)

// ID names a Function of a node for ever, whatever its netdev is called and wherever it is. It is comparable.
type ID struct {
	// Address is the Function's PCI address; an SF has its PF's.
	Address pci.Address
	// Subfunction is "" for a PF or VF, and "sf" with the sfnum in decimal for an SF: "sf88".
	Subfunction string
}

// SubfunctionID is the ID of the SF that the PF at this address has under the sfnum.
func SubfunctionID(pf pci.Address, sfnum uint32) ID {
	return ID{Address: pf, Subfunction: "sf" + strconv.FormatUint(uint64(sfnum), 10)}
}

// SFNum returns the sfnum of an SF; ok is false for a PF or VF.
func (id ID) SFNum() (sfnum uint32, ok bool) {
	digits, isSF := strings.CutPrefix(id.Subfunction, "sf")
	if !isSF {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), err == nil
}

// String is "0000:3b:02.1", or "0000:3b:00.0/sf88" for an SF.
func (id ID) String() string {
	if id.Subfunction == "" {
		return string(id.Address)
	}
	return string(id.Address) + "/" + id.Subfunction
}

// DeviceName is the ID as a DNS label: "0000-3b-02-1", or "0000-3b-00-0-sf88" for an SF.
func (id ID) DeviceName() string {
	if id.Subfunction == "" {
		return id.Address.DeviceName()
	}
	return id.Address.DeviceName() + "-" + id.Subfunction
}

// ParseID reverses [ID.String].
func ParseID(s string) (ID, error) {
	address, subfunction, isSF := strings.Cut(s, "/")
	return newID(s, address, subfunction, isSF, pci.Parse)
}

// ParseDeviceName reverses [ID.DeviceName].
func ParseDeviceName(s string) (ID, error) {
	if i := strings.LastIndex(s, "-sf"); i >= 0 {
		return newID(s, s[:i], s[i+1:], true, pci.ParseDeviceName)
	}
	return newID(s, s, "", false, pci.ParseDeviceName)
}

func newID(s, address, subfunction string, isSF bool, parse func(string) (pci.Address, error)) (ID, error) {
	a, err := parse(address)
	if err != nil {
		return ID{}, err
	}
	id := ID{Address: a, Subfunction: subfunction}
	if !isSF {
		return id, nil
	}
	if n, ok := id.SFNum(); !ok || SubfunctionID(a, n) != id {
		return ID{}, fmt.Errorf("Function %q: %q must be sf and a number, such as sf88", s, subfunction)
	}
	return id, nil
}

// MarshalText is [ID.String].
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText is [ParseID].
func (id *ID) UnmarshalText(text []byte) (err error) {
	*id, err = ParseID(string(text))
	return err
}

// Function is a PCI network function of the node as the kernel shows it. Only Netdev, Driver, PFName and LinkUp
// change while the Function exists.
type Function struct {
	ID   ID
	Kind Kind
	// PF is the address of the parent PF; a PF's own.
	PF pci.Address
	// PFName is the name of the PF's netdev on the host; the last one known if it is away, "" if it never had one.
	PFName string
	// Index is the VF's index at its PF, the SF's sfnum, and -1 for a PF.
	Index int
	// Vendor and Device are PCI ids in lower-case hex without prefix: "15b3", "101e".
	Vendor, Device string
	// Driver is the kernel driver that is bound, "" if none is.
	Driver string
	// NUMANode is the node of the Function's memory, -1 if the kernel does not know.
	NUMANode int
	// PCIeRoot is the root complex, "pci0000:3a", as in attribute resource.kubernetes.io/pcieRoot; "" if unknown.
	PCIeRoot string
	// Netdev is the name of the Function's netdev while it is on the host; "" while it is in a pod, or if there is
	// none.
	Netdev string
	// LinkUp says whether the PF has a carrier; while the PF's netdev is away, whether it had one. True if that was
	// never seen.
	LinkUp bool
}
