// SPDX-License-Identifier: Apache-2.0

package addresses

import (
	"net/netip"

	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
)

// bondOf identifies a bond in one allocation of its claim, "" for a Port without a bond. Ports of
// two allocations share nothing, because the Ports of the earlier one may still be there.
func bondOf(port *v1alpha1.XPUPort) string {
	bond := model.BondKey(port)
	if bond == "" {
		return ""
	}
	return bond + "/" + port.Annotations[AnnotationAllocation]
}

// joinBond records the addresses of a Port for the other Ports of its bond.
func (b *book) joinBond(key types.NamespacedName, port *v1alpha1.XPUPort) {
	bond := bondOf(port)
	if before := b.bond[key]; before != bond {
		b.leaveBond(key)
	}
	if bond == "" {
		return
	}
	if b.bonds[bond] == nil {
		b.bonds[bond] = map[types.NamespacedName][]string{}
	}
	b.bonds[bond][key], b.bond[key] = b.of(port), bond
}

// leaveBond forgets a Port of a bond. It returns another Port of the bond, if there is one.
func (b *book) leaveBond(key types.NamespacedName) (fellow types.NamespacedName, left bool) {
	bond, has := b.bond[key]
	if !has {
		return fellow, false
	}

	delete(b.bond, key)
	delete(b.bonds[bond], key)
	for fellow = range b.bonds[bond] {
		return fellow, true
	}

	delete(b.bonds, bond)
	return fellow, false
}

// shares reports whether the holder of an address is a Port of the same bond as this Port.
func (b *book) shares(holder types.NamespacedName, port *v1alpha1.XPUPort) bool {
	bond := bondOf(port)
	return bond != "" && b.bond[holder] == bond
}

// ofBond returns the addresses of the Port's bond, none if the book has no other Port of it.
func (b *book) ofBond(port *v1alpha1.XPUPort) (addresses []netip.Prefix) {
	for _, texts := range b.bonds[bondOf(port)] {
		for _, text := range texts {
			if address, err := netip.ParsePrefix(text); err == nil {
				addresses = append(addresses, address)
			}
		}
		return addresses
	}
	return nil
}
