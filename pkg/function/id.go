// SPDX-License-Identifier: Apache-2.0

package function

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// ID identifies a Function of a node, independent of its netdev's name and location. It is
// comparable.
type ID struct {
	Address pci.Address // PCI address of the Function; of an SF its PF's
	// "" for a PF or VF; for an SF "sf" and the sfnum in decimal: "sf88"
	Subfunction string
}

// SubfunctionID returns the ID of the SF with this sfnum at the PF with this address.
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

// String returns "0000:3b:02.1", or "0000:3b:00.0/sf88" for an SF.
func (id ID) String() string {
	if id.Subfunction == "" {
		return string(id.Address)
	}
	return string(id.Address) + "/" + id.Subfunction
}

// DeviceName returns the ID as a DNS label: "0000-3b-02-1", or "0000-3b-00-0-sf88" for an SF.
func (id ID) DeviceName() string {
	return strings.NewReplacer(":", "-", ".", "-", "/", "-").Replace(id.String())
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

func newID(
	s, address, subfunction string, isSF bool, parse func(string) (pci.Address, error),
) (ID, error) {
	a, err := parse(address)
	if err != nil {
		return ID{}, err
	}

	id := ID{Address: a, Subfunction: subfunction}
	if !isSF {
		return id, nil
	}
	if n, ok := id.SFNum(); !ok || SubfunctionID(a, n) != id {
		return ID{}, fmt.Errorf("Function %q: %q must be sf and a number, such as sf88", s,
			subfunction)
	}

	return id, nil
}

// MarshalText encodes the ID like [ID.String].
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText decodes the ID like [ParseID].
func (id *ID) UnmarshalText(text []byte) (err error) {
	*id, err = ParseID(string(text))
	return err
}
