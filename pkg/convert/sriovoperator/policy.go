// SPDX-License-Identifier: Apache-2.0

// Package sriovoperator converts objects of sriov-network-operator, of its API group
// sriovnetwork.openshift.io, and networks of sriov-cni. The tables are in
// docs/how-to/move-from-sriov-network-operator.md.
package sriovoperator

import (
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

const (
	// Group is the operator's API group.
	Group = "sriovnetwork.openshift.io"
	// DefaultPrefix is the prefix of resources in the operator's chart, operator.resourcePrefix.
	DefaultPrefix = "openshift.io"
	// lastPriority is the operator's priority that comes last; 0 comes first.
	lastPriority = 99
)

// policy has the fields of a SriovNetworkNodePolicy, by the operator's API of August 2026.
type policy struct {
	Metadata metav1.ObjectMeta `json:"metadata"`
	Spec     policySpec        `json:"spec"`
}

type policySpec struct {
	ResourceName      string            `json:"resourceName"`
	NodeSelector      map[string]string `json:"nodeSelector"`
	Priority          int32             `json:"priority"`
	MTU               int32             `json:"mtu"`
	NumVFs            int32             `json:"numVfs"`
	NICSelector       nicSelector       `json:"nicSelector"`
	DeviceType        string            `json:"deviceType"`
	IsRDMA            bool              `json:"isRdma"`
	LinkType          string            `json:"linkType"`
	ESwitchMode       string            `json:"eSwitchMode"`
	VDPAType          string            `json:"vdpaType"`
	ExternallyManaged bool              `json:"externallyManaged"`
	NeedVhostNet      bool              `json:"needVhostNet"`
	ExcludeTopology   bool              `json:"excludeTopology"`
	Bridge            map[string]any    `json:"bridge"`
}

type nicSelector struct {
	Vendor      string   `json:"vendor"`
	DeviceID    string   `json:"deviceID"`
	RootDevices []string `json:"rootDevices"`
	PFNames     []string `json:"pfNames"`
	NetFilter   string   `json:"netFilter"`
}

// namesPFs reports whether the selector says which PFs it means.
func (s nicSelector) namesPFs() bool { return len(s.PFNames)+len(s.RootDevices) > 0 }

// Policy converts a SriovNetworkNodePolicy, as YAML or JSON. The prefix is for its resource.
func Policy(text []byte, prefix string) (pool v1alpha1.DevicePool, notes []string, err error) {
	var p policy
	if err := yaml.Unmarshal(text, &p); err != nil {
		return pool, nil, err
	}
	if p.Spec.ResourceName == "" {
		return pool, nil, fmt.Errorf("spec.resourceName: is missing")
	}
	var strict struct {
		Spec policySpec `json:"spec"`
	}
	if notes, err = unknownFields(text, &strict); err != nil {
		return pool, nil, err
	}

	pool.TypeMeta = metav1.TypeMeta{
		APIVersion: v1alpha1.SchemeGroupVersion.String(), Kind: "DevicePool",
	}
	pool.Name = p.Metadata.Name
	pool.Spec = v1alpha1.DevicePoolSpec{
		NodeSelector: p.Spec.NodeSelector,
		Priority:     lastPriority - p.Spec.Priority,
		Publish:      v1alpha1.PublishDevicePlugin,
		DeviceType:   v1alpha1.DeviceTypeNet,
		DevicePlugin: &v1alpha1.DevicePluginSpec{
			ResourcePrefix: prefix, ResourceName: p.Spec.ResourceName,
			NeedVhostNet: p.Spec.NeedVhostNet, ExcludeTopology: p.Spec.ExcludeTopology,
		},
	}

	selector, more := p.Spec.selector()
	pool.Spec.Selectors = []v1alpha1.FunctionSelector{selector}
	return pool, slices.Concat(notes, more, p.Spec.make(&pool.Spec), p.Spec.leftOut()), nil
}

// unknownFields notes the fields of a spec that have no counterpart in the type.
func unknownFields(text []byte, into any) (notes []string, err error) {
	var object map[string]any
	if err := yaml.Unmarshal(text, &object); err != nil {
		return nil, err
	}
	spec, err := json.Marshal(map[string]any{"spec": object["spec"]})
	if err != nil {
		return nil, err
	}

	unknown, err := kjson.UnmarshalStrict(spec, into)
	if err != nil {
		return nil, err
	}
	for _, one := range unknown {
		notes = append(notes, "left out: "+one.Error())
	}
	return notes, nil
}

// selector converts the part of a policy that selects Functions.
func (p policySpec) selector() (s v1alpha1.FunctionSelector, notes []string) {
	nic := p.NICSelector
	s.PFNames, s.RootDevices = nic.PFNames, nic.RootDevices
	s.VDPAType, s.IsRdma = p.VDPAType, p.IsRDMA
	if nic.Vendor != "" {
		s.Vendors = []string{nic.Vendor}
	}

	switch {
	case nic.DeviceID != "" && nic.namesPFs():
		notes = append(notes, fmt.Sprintf("nicSelector.deviceID %s is left out: it is the id of the "+
			"PF, which is named besides", nic.DeviceID))
	case nic.DeviceID != "":
		notes = append(notes, fmt.Sprintf("nicSelector.deviceID %s is left out: it is the id of the "+
			"PF; write the device ID of its VFs into selectors[0].devices", nic.DeviceID))
	}

	switch p.LinkType {
	case "":
	case "ib", "IB":
		s.LinkTypes = []string{"infiniband"}
	default:
		s.LinkTypes = []string{"ether"}
	}
	if p.IsRDMA && p.VDPAType != "" {
		s.IsRdma = false
		notes = append(notes, "isRdma is left out: it does not go with vdpaType")
	}

	return s, notes
}

// make converts how many VFs there are and what drives them.
func (p policySpec) make(spec *v1alpha1.DevicePoolSpec) (notes []string) {
	switch {
	case p.NumVFs == 0 && !p.ExternallyManaged:
		notes = append(notes, "numVfs 0 makes the PF itself the resource: write its address into "+
			"selectors[0].pciAddresses")
	case p.ExternallyManaged:
	case p.NICSelector.namesPFs():
		spec.NumVFs = ptr.To(p.NumVFs)
	default:
		notes = append(notes, fmt.Sprintf("numVfs %d is left out: a selector must name PFs for it, "+
			"by pfNames or rootDevices", p.NumVFs))
	}

	if p.DeviceType == "vfio-pci" {
		spec.Driver = v1alpha1.DriverVFIO
		return append(notes, "driver vfio-pci is bound while a pod has the VF, and not for good")
	}

	// The operator allows all this to whoever writes a network.
	spec.Allow = []v1alpha1.PrivilegedField{
		v1alpha1.FieldMAC, v1alpha1.FieldVLAN, v1alpha1.FieldQoS, v1alpha1.FieldTrust,
		v1alpha1.FieldSpoofCheck, v1alpha1.FieldMinTxRate, v1alpha1.FieldMaxTxRate,
		v1alpha1.FieldLinkState,
	}
	if slices.Contains([]string{"ib", "IB"}, p.LinkType) {
		spec.Allow = []v1alpha1.PrivilegedField{
			v1alpha1.FieldLinkState, v1alpha1.FieldNodeGUID, v1alpha1.FieldPortGUID,
		}
	}
	return append(notes, "allow has all that networks could set there: take out what they need not")
}

// leftOut notes what has no counterpart in a DevicePool.
func (p policySpec) leftOut() (notes []string) {
	if p.NICSelector.NetFilter != "" {
		notes = append(notes, "nicSelector.netFilter is left out: name devices by pciAddresses, in a "+
			"DevicePool for each kind of node")
	}
	if p.MTU != 0 {
		notes = append(notes, fmt.Sprintf("mtu %d is left out: set it where the host's network is "+
			"configured; pods' interfaces have it of their network", p.MTU))
	}
	if p.ESwitchMode != "" {
		notes = append(notes, fmt.Sprintf("eSwitchMode %s is left out: set it at boot",
			p.ESwitchMode))
	}
	if len(p.Bridge) > 0 {
		notes = append(notes, "bridge is left out: make it yourself, or let the xPU serve the network")
	}
	return notes
}

// Merge puts DevicePools of one resource into one for each set of nodes, because a node has one
// DevicePool for a resource. It keeps the order. Notes name each two that differ too much.
func Merge(pools []v1alpha1.DevicePool) (merged []v1alpha1.DevicePool, notes []string) {
	for _, pool := range pools {
		at := slices.IndexFunc(merged, func(other v1alpha1.DevicePool) bool {
			return sameResource(other.Spec, pool.Spec) && sameButSelectors(other.Spec, pool.Spec)
		})
		if at >= 0 {
			first := &merged[at]
			first.Spec.Selectors = append(first.Spec.Selectors, pool.Spec.Selectors...)
			first.Spec.Priority = max(first.Spec.Priority, pool.Spec.Priority)
			notes = append(notes, fmt.Sprintf("DevicePool %s has the selectors of %s too, because they "+
				"offer the same resource", first.Name, pool.Name))
			continue
		}

		for _, other := range merged {
			if sameResource(other.Spec, pool.Spec) {
				notes = append(notes, fmt.Sprintf("DevicePools %s and %s offer the same resource: on a "+
					"node that both select, only the one with the higher priority does", other.Name, pool.Name))
			}
		}
		merged = append(merged, pool)
	}

	return merged, notes
}

func sameResource(a, b v1alpha1.DevicePoolSpec) bool {
	return a.DevicePlugin.ResourceName == b.DevicePlugin.ResourceName &&
		a.DevicePlugin.ResourcePrefix == b.DevicePlugin.ResourcePrefix
}

func sameButSelectors(a, b v1alpha1.DevicePoolSpec) bool {
	a.Selectors, b.Selectors, a.Priority, b.Priority = nil, nil, 0, 0
	x, errA := yaml.Marshal(a)
	y, errB := yaml.Marshal(b)
	return errA == nil && errB == nil && string(x) == string(y)
}
