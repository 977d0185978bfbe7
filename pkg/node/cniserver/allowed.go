// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// privileged returns the privileged fields that the request sets, with their names in the network
// configuration. Addresses are privileged only if the interface joins an XPUNetwork.
func (a cniRequest) privileged(joins bool) map[v1alpha1.PrivilegedField]string {
	fields := map[v1alpha1.PrivilegedField]string{}
	add := func(set bool, f v1alpha1.PrivilegedField, name string) {
		if set {
			fields[f] = name
		}
	}

	add(a.mac != "", v1alpha1.FieldMAC, "mac")
	add(joins && a.ipam.result != nil, v1alpha1.FieldAddresses, "ipam")
	add(joins && a.ipam.result == nil && len(a.ipam.addresses) > 0, v1alpha1.FieldAddresses,
		"runtimeConfig.ips")

	if vf := a.vf; vf != nil {
		add(vf.VLAN != nil, v1alpha1.FieldVLAN, "vlan")
		add(vf.QoS != nil, v1alpha1.FieldQoS, "vlanQoS")
		add(vf.Trust != nil, v1alpha1.FieldTrust, "trust")
		add(vf.SpoofCheck != nil, v1alpha1.FieldSpoofCheck, "spoofchk")
		add(vf.MinTxRate != nil, v1alpha1.FieldMinTxRate, "min_tx_rate")
		add(vf.MaxTxRate != nil, v1alpha1.FieldMaxTxRate, "max_tx_rate")
		add(vf.LinkState != "", v1alpha1.FieldLinkState, "link_state")
		add(vf.NodeGUID != "", v1alpha1.FieldNodeGUID, "infinibandGUID")
		add(vf.PortGUID != "", v1alpha1.FieldPortGUID, "infinibandGUID")
	}

	for group, field := range map[string]v1alpha1.PrivilegedField{
		"private flags": v1alpha1.FieldPrivateFlags, "channels": v1alpha1.FieldChannels,
		"rings": v1alpha1.FieldRings, "pause": v1alpha1.FieldPause,
	} {
		add(len(a.wanted.Ethtool[group]) > 0, field, string(field))
	}

	return fields
}

// checkPrivileged refuses a configuration with privileged fields that the DevicePool of the
// Function does not allow. record is the record of the Function. The record of a claim does not say
// whether the interface joins a network, so that it is assumed to.
func (s *Server) checkPrivileged(a cniRequest, record journal.Attachment) error {
	p, known := s.Pools.PoolOf(a.device)
	var names, fields []string
	for field, name := range a.privileged(record.Port != nil || record.Claim.UID != "") {
		if !slices.Contains(p.Spec.Allow, field) {
			names, fields = append(names, name), append(fields, string(field))
		}
	}

	if len(names) == 0 {
		return nil
	}
	if !known && !s.Pools.Considered(a.device) {
		return fail(types.ErrTryAgainLater,
			"Function %s: pools have not been read yet since it came", a.device)
	}

	slices.Sort(names)
	slices.Sort(fields)
	pool := "a DevicePool"
	if known {
		pool = "DevicePool " + p.Name
	}

	return a.conf.invalid("%s: Forbidden: needs %s in spec.allow of %s, which is the "+
		"administrator's",
		strings.Join(slices.Compact(names), ", "), strings.Join(fields, ", "), pool)
}
