// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// PrivilegedFields returns the privileged fields that the configuration sets.
func PrivilegedFields(c v1alpha1.InterfaceConfig) []v1alpha1.PrivilegedField {
	var fields []v1alpha1.PrivilegedField
	add := func(set bool, f v1alpha1.PrivilegedField) {
		if set {
			fields = append(fields, f)
		}
	}

	add(c.MAC != "", v1alpha1.FieldMAC)
	tagged := func(n v1alpha1.InterfaceNetwork) bool { return len(n.Addresses) > 0 }
	add(len(c.Addresses) > 0 || slices.ContainsFunc(c.Networks, tagged), v1alpha1.FieldAddresses)
	add(c.Driver != "", v1alpha1.FieldDriver)

	if vf := c.VF; vf != nil {
		add(vf.VLAN != nil || vf.VLANProtocol != "", v1alpha1.FieldVLAN)
		add(vf.QoS != nil, v1alpha1.FieldQoS)
		add(vf.Trust != nil, v1alpha1.FieldTrust)
		add(vf.SpoofCheck != nil, v1alpha1.FieldSpoofCheck)
		add(vf.MinTxRate != nil, v1alpha1.FieldMinTxRate)
		add(vf.MaxTxRate != nil, v1alpha1.FieldMaxTxRate)
		add(vf.LinkState != "", v1alpha1.FieldLinkState)
		add(vf.NodeGUID != "", v1alpha1.FieldNodeGUID)
		add(vf.PortGUID != "", v1alpha1.FieldPortGUID)
	}

	if e := c.Ethtool; e != nil {
		add(len(e.PrivateFlags) > 0, v1alpha1.FieldPrivateFlags)
		add(len(e.Channels) > 0, v1alpha1.FieldChannels)
		add(len(e.Rings) > 0, v1alpha1.FieldRings)
		add(len(e.Pause) > 0, v1alpha1.FieldPause)
	}

	return fields
}

// Allowed returns an error that names the fields which the claim itself sets although the
// DevicePool's spec reserves them for DeviceClasses. The zero spec, for a pool that does not exist,
// allows none.
func (d Device) Allowed(pool v1alpha1.DevicePoolSpec) error {
	joins := len(d.NetworkNames(pool)) > 0
	forbidden := slices.DeleteFunc(slices.Clone(d.Privileged),
		func(f v1alpha1.PrivilegedField) bool {
			return slices.Contains(pool.Allow, f) || f == v1alpha1.FieldAddresses && !joins
		})
	if len(forbidden) == 0 {
		return nil
	}

	return fmt.Errorf("%s: Forbidden: DevicePool %s lets only a DeviceClass set this; have its "+
		"administrator make a class with it, "+
		"or add it to the pool's spec.allow", joined(forbidden), d.ID.DevicePool)
}

func joined(fields []v1alpha1.PrivilegedField) string {
	texts := make([]string, len(fields))
	for i, f := range fields {
		texts[i] = string(f)
	}
	return strings.Join(texts, ", ")
}
