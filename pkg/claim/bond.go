// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// CheckBond returns an error if the device is to be a port of a bond although it joins networks,
// which the spec of its DevicePool may name.
//
// A Port has MAC and IP addresses of its own, and the xPU drops frames with other source addresses. A
// bond sends with the same addresses from all its ports.
func (d Device) CheckBond(pool v1alpha1.DevicePoolSpec) error {
	names := d.NetworkNames(pool)
	if d.Interface.Bond == nil || len(names) == 0 {
		return nil
	}
	return fmt.Errorf("bond.name %q: must be absent for a Function that joins a network (%s), because "+
		"the xPU lets no two Functions send from the same addresses; use a DevicePool without network",
		d.Interface.Bond.Name, names[0])
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
