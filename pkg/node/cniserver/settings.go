// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// settings are the fields of a network configuration that are the same as in an InterfaceConfig,
// because sriov-cni has no word for them.
type settings struct {
	AllMulticast *bool                  `json:"allMulticast"`
	Rules        []v1alpha1.RoutingRule `json:"rules"`
	Neighbors    []v1alpha1.Neighbor    `json:"neighbors"`
	VRF          *v1alpha1.VRF          `json:"vrf"`
	Sysctls      map[string]string      `json:"sysctls"`
	Offload      *v1alpha1.Offload      `json:"offload"`
	Ethtool      *v1alpha1.Ethtool      `json:"ethtool"`
}

var settingKeys = []string{
	"allMulticast", "rules", "neighbors", "vrf", "sysctls", "offload", "ethtool",
}

// settings returns an interface with nothing but the settings of the configuration. It refuses
// fields in them that are unknown, because with a typo the pod would run without what it asked for.
func (m *fieldErrors) settings(config json.RawMessage) function.Interface {
	var all map[string]json.RawMessage
	_ = json.Unmarshal(config, &all) // decode has returned the error

	var s settings
	for key, value := range all {
		isKey := func(k string) bool { return strings.EqualFold(k, key) }
		if !slices.ContainsFunc(settingKeys, isKey) {
			continue
		}

		one, _ := json.Marshal(map[string]json.RawMessage{key: value}) // a valid message
		decoder := json.NewDecoder(bytes.NewReader(one))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&s); err != nil {
			m.add("%s: %s", key, short(strings.TrimPrefix(err.Error(), "json: ")))
		}
	}

	wanted, err := claim.Interface(&v1alpha1.InterfaceConfig{
		AllMulticast: s.AllMulticast, Rules: s.Rules, Neighbors: s.Neighbors, VRF: s.VRF,
		Sysctls: s.Sysctls, Offload: s.Offload, Ethtool: s.Ethtool,
	})
	if err != nil {
		m.add("%w", err)
	}

	return wanted
}

// addSettings replaces the settings of an interface that wanted has. Of sysctls, offload and ethtool
// it replaces single settings, as a claim does with those of its class.
func addSettings(i *function.Interface, wanted function.Interface) {
	i.AllMulticast = i.AllMulticast || wanted.AllMulticast
	if len(wanted.Rules) > 0 {
		i.Rules = wanted.Rules
	}
	if len(wanted.Neighbors) > 0 {
		i.Neighbors = wanted.Neighbors
	}

	i.VRF = cmp.Or(wanted.VRF, i.VRF)
	i.Sysctls = joined(i.Sysctls, wanted.Sysctls)
	i.Offload = joinedOffload(i.Offload, wanted.Offload)

	ethtool := maps.Clone(i.Ethtool)
	for group, settings := range wanted.Ethtool {
		if ethtool == nil {
			ethtool = function.Ethtool{}
		}
		ethtool[group] = joined(ethtool[group], settings)
	}
	i.Ethtool = ethtool
}

// joined returns a new map with the entries of both, or nil if there are none. Those of over win.
func joined(base, over map[string]string) map[string]string {
	if len(base)+len(over) == 0 {
		return nil
	}

	all := map[string]string{}
	maps.Copy(all, base)
	maps.Copy(all, over)

	return all
}

// joinedOffload returns the sizes of both. Those of over win.
func joinedOffload(base, over *function.Offload) *function.Offload {
	if base == nil || over == nil {
		return cmp.Or(over, base)
	}
	return &function.Offload{
		GSOMaxSize:     cmp.Or(over.GSOMaxSize, base.GSOMaxSize),
		GROMaxSize:     cmp.Or(over.GROMaxSize, base.GROMaxSize),
		GSOIPv4MaxSize: cmp.Or(over.GSOIPv4MaxSize, base.GSOIPv4MaxSize),
		GROIPv4MaxSize: cmp.Or(over.GROIPv4MaxSize, base.GROIPv4MaxSize),
	}
}
