// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Bond makes the interface a port of a bond in the pod (Documentation/networking/bonding.rst). The
// bond has the addresses, routes and rules of the interface: see [Interface.OfBond]. Several
// interfaces of a pod are ports of the bond with one name, and ask for the same bond.
type Bond struct {
	Name string `json:"name"` // of the bond's netdev in the pod, see [ValidateInterfaceName]
	Mode string `json:"mode"` // see [BondModes]
	// MIIMon is the time between two looks at the carrier of a port, in milliseconds. The kernel would
	// not look at all with 0.
	MIIMon int `json:"miimon"`
	// XmitHashPolicy says which headers of a packet choose its port: see [BondHashPolicies]. "" means
	// "layer2".
	XmitHashPolicy string `json:"xmitHashPolicy,omitempty"`
	// LACPRate is how often the partner sends messages: see [LACPRates]. "" means "slow".
	LACPRate string `json:"lacpRate,omitempty"`
	// Primary is set for the port that is the active one whenever it has a carrier.
	Primary bool `json:"primary,omitempty"`
}

// Times between two looks at the carrier of a port, in milliseconds. The kernel would take any number.
const (
	ShortestMIIMon = 10
	LongestMIIMon  = 10000
)

// BondActiveBackup is the mode in which one port carries all frames. Each port keeps its own MAC
// address, and the bond has the MAC address of the active port (fail_over_mac=active).
const BondActiveBackup = "active-backup"

// Other modes of a bond. All ports get the MAC address of the bond.
const (
	bondRoundRobin = "balance-rr"
	bondXOR        = "balance-xor"
	bondBroadcast  = "broadcast"
	BondLACP       = "802.3ad"
	BondTLB        = "balance-tlb"
	bondALB        = "balance-alb"
)

// BondModes returns the modes that a bond can have, in the order of the kernel's numbers.
func BondModes() []string {
	return []string{
		bondRoundRobin, BondActiveBackup, bondXOR, bondBroadcast, BondLACP, BondTLB, bondALB,
	}
}

// BondHashPolicies returns the policies by which the modes balance-xor and 802.3ad choose a port.
func BondHashPolicies() []string {
	return []string{"layer2", "layer2+3", "layer3+4", "encap2+3", "encap3+4", "vlan+srcmac"}
}

// LACPRates returns how often the partner of a bond of mode 802.3ad can send messages: each 30 s, or
// each second.
func LACPRates() []string { return []string{"slow", "fast"} }

// Same reports whether both ask for the same bond. Only one of several ports is the primary one.
func (b Bond) Same(other Bond) bool {
	b.Primary = other.Primary
	return b == other
}

// SetsMAC reports whether the bond gives its MAC address to its ports. b may be nil.
func (b *Bond) SetsMAC() bool { return b != nil && b.Mode != BondActiveBackup }

// OfBond returns what the bond gets of the configuration of its port: everything that is about
// packets. The port keeps what is about the link. The interface must have a bond.
func (i Interface) OfBond() Interface {
	return Interface{
		Name: i.Bond.Name, Addresses: i.Addresses, Routes: i.Routes, Rules: i.Rules,
		Neighbors: i.Neighbors, VRF: i.VRF, AllMulticast: i.AllMulticast, Sysctls: i.Sysctls,
	}
}

// validateBond reports what the kernel would reject or ignore.
func (i Interface) validateBond() error {
	b := i.Bond
	if b == nil {
		return nil
	}

	errs := []error{b.validate(), b.validateFields()}
	if b.Name == i.Name || b.Name == "lo" || b.Name == "eth0" || i.VRF != nil && b.Name == i.VRF.Name {
		errs = append(errs, fmt.Errorf("bond.name %q: is the name of another interface; choose "+
			"another name", b.Name))
	}
	if len(i.VLANs) > 0 {
		errs = append(errs, errors.New("bond: must be absent for a Function with tagged networks"))
	}
	if i.MAC != "" && b.SetsMAC() {
		errs = append(errs, fmt.Errorf("mac: must be absent with bond.mode %s, in which all ports "+
			"have the MAC address of the bond", b.Mode))
	}
	if len(i.Neighbors) > 0 && !b.SetsMAC() {
		errs = append(errs, fmt.Errorf("neighbors: must be absent with bond.mode %s, because the "+
			"kernel drops them when another port becomes active", b.Mode))
	}

	return errors.Join(errs...)
}

func (b *Bond) validate() error {
	var errs []error
	if err := ValidateInterfaceName(b.Name); err != nil {
		errs = append(errs, fmt.Errorf("bond.name: %w", err))
	}
	if !slices.Contains(BondModes(), b.Mode) {
		errs = append(errs, fmt.Errorf("bond.mode %q: must be one of %s", cut(b.Mode),
			strings.Join(BondModes(), ", ")))
	}
	if b.MIIMon < ShortestMIIMon || b.MIIMon > LongestMIIMon {
		errs = append(errs, fmt.Errorf("bond.miimon %d: must be %d-%d", b.MIIMon, ShortestMIIMon,
			LongestMIIMon))
	}
	return errors.Join(errs...)
}

// validateFields reports values that the kernel does not know, and fields that the mode does not
// have (bond_opts of drivers/net/bonding/bond_options.c). The kernel takes some of these and ignores
// them.
func (b *Bond) validateFields() error {
	primary := ""
	if b.Primary {
		primary = "true"
	}

	var errs []error
	for _, f := range []struct {
		field, value  string
		values, modes []string
	}{
		{"xmitHashPolicy", b.XmitHashPolicy, BondHashPolicies(), []string{bondXOR, BondLACP}},
		{"lacpRate", b.LACPRate, LACPRates(), []string{BondLACP}},
		{"primary", primary, []string{"true"}, []string{BondActiveBackup, BondTLB, bondALB}},
	} {
		switch {
		case f.value == "":
		case !slices.Contains(f.modes, b.Mode):
			errs = append(errs, fmt.Errorf("bond.%s: must be absent with mode %s; only %s has it",
				f.field, cut(b.Mode), strings.Join(f.modes, ", ")))
		case !slices.Contains(f.values, f.value):
			errs = append(errs, fmt.Errorf("bond.%s %q: must be one of %s", f.field, cut(f.value),
				strings.Join(f.values, ", ")))
		}
	}

	return errors.Join(errs...)
}
