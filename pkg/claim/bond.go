// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// CheckBond returns an error if the device joins a network, which the spec of its DevicePool may
// name, and is to be a port of a bond that gives its MAC address to its ports. The xPU lets each
// Function send from its own MAC address only, and drops all other frames.
func (d Device) CheckBond(pool v1alpha1.DevicePoolSpec) error {
	if d.Interface.Bond != nil && len(d.Config.Networks) > 0 {
		return errors.New("bond: must be absent for a Function with tagged networks; use network")
	}

	names := d.NetworkNames(pool)
	if !d.Interface.Bond.SetsMAC() || len(names) == 0 {
		return nil
	}
	return fmt.Errorf("bond.mode %s: must be %s for a Function that joins a network (%s), because the "+
		"xPU lets each Function send from its own MAC address only; or use a DevicePool without network",
		d.Interface.Bond.Mode, function.BondActiveBackup, names[0])
}

// CheckBondPort returns an error if the device and another port of its bond do not join the same
// network. pool and otherPool are the specs of their DevicePools.
func (d Device) CheckBondPort(
	pool v1alpha1.DevicePoolSpec, other Device, otherPool v1alpha1.DevicePoolSpec,
) error {
	own, others := d.NetworkNames(pool), other.NetworkNames(otherPool)
	if slices.Equal(own, others) {
		return nil
	}
	return fmt.Errorf("bond.name %q: request %s joins %s, and request %s joins %s; give all Functions "+
		"of the bond the same network", d.Interface.Bond.Name, d.Request, networkText(own),
		other.Request, networkText(others))
}

func networkText(names []string) string {
	if len(names) == 0 {
		return "no network"
	}
	return "network " + strings.Join(names, ", ")
}

// BondPorts returns the other devices that are ports of the device's bond.
func (d Device) BondPorts(devices []Device) (others []Device) {
	for _, other := range devices {
		bond := other.Interface.Bond
		if d.Interface.Bond != nil && bond != nil && bond.Name == d.Interface.Bond.Name &&
			other.Function != d.Function {
			others = append(others, other)
		}
	}
	return others
}

// checkBonds sets the ConfigErr of devices that are ports of one bond and do not ask for the same.
func checkBonds(devices []Device) {
	first := map[string]int{}    // index of the first port of each bond
	primary := map[string]bool{} // bonds with a primary port
	for n := range devices {
		d := &devices[n]
		if d.ConfigErr != nil || d.Interface.Bond == nil {
			continue
		}

		name := d.Interface.Bond.Name
		i, more := first[name]
		switch {
		case !more:
			first[name] = n
		case !sameOfBond(d.Interface, devices[i].Interface):
			d.ConfigErr = fmt.Errorf("bond.name %q: request %s has a bond of this name with another "+
				"configuration; give both requests the same bond, mtu, addresses, routes, rules, "+
				"neighbors, vrf, allMulticast and sysctls", name, devices[i].Request)
		case d.Interface.Bond.Primary && primary[name]:
			d.ConfigErr = errors.New("bond.primary: another Function of the bond has it too; give it to " +
				"one request for one device")
		}
		primary[name] = primary[name] || d.Interface.Bond.Primary
	}
}

// sameOfBond reports whether two ports ask for the same bond.
func sameOfBond(a, b function.Interface) bool {
	return a.Bond.Same(*b.Bond) && a.MTU == b.MTU && reflect.DeepEqual(a.OfBond(), b.OfBond())
}
