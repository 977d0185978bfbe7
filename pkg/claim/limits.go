// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"maps"
	"math"
	"slices"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// Limit bounds a field of an InterfaceConfig. A zero field does not bound.
type Limit struct {
	// Min and Max are the range of a number, or of the numbers in a map; nil means all of int32.
	Min, Max *int64
	// Choices are the values of a string, beside "".
	Choices []string
	// Pattern is what a string matches that is not "", in the syntax of RE2. Must says so in words.
	Pattern, Must string
	// Keys are the keys of a map.
	Keys []string
	// Length is the most bytes of a string.
	Length int
	// Items is the most entries of a list.
	Items int
}

// Limits returns the limits of fields by their paths, such as "vf.vlan", and "rules[].priority" for
// the entries of a list. [ValidateClaim] refuses what is beyond them, and more. They are for checks
// by other means than this package.
func Limits() map[string]Limit {
	between := func(least, most int64) Limit { return Limit{Min: &least, Max: &most} }
	natural, size := between(0, math.MaxInt32), between(1, function.MaxOffload)
	name := Limit{Length: function.MaxName}
	table := between(1, math.MaxInt32)
	guid := Limit{Length: 23, Pattern: function.GUIDPattern, Must: function.MustBeGUID}

	return map[string]Limit{
		"addresses":           {Items: maxAddresses},
		"bond.lacpRate":       {Choices: function.LACPRates()},
		"bond.miimon":         between(function.ShortestMIIMon, function.LongestMIIMon),
		"bond.mode":           {Choices: function.BondModes()},
		"bond.name":           name,
		"bond.xmitHashPolicy": {Choices: function.BondHashPolicies()},
		"driver": {
			Length: v1alpha1.MaxFunctionDriver, Pattern: v1alpha1.FunctionDriverPattern,
			Must: "must be vfio-pci, or one of its variants such as mlx5_vfio_pci",
		},
		"ethtool.channels":         natural,
		"ethtool.coalescing":       natural,
		"ethtool.rings":            natural,
		"ethtool.rss.equal":        between(1, function.MaxRSSQueues),
		"ethtool.rss.hashFunction": {Choices: function.RSSFunctions()},
		"ethtool.rss.hashKey": {
			Length: 3*function.MaxRSSKey - 1, Pattern: hashKeyPattern,
			Must: mustBeKey,
		},
		"ethtool.rss.weights":      {Items: function.MaxRSSQueues},
		"ethtool.rss.weights[]":    between(0, function.MaxRSSWeight),
		"interfaceName":            name,
		"mtu":                      between(minMTU, maxMTU),
		"neighbors":                {Items: function.MaxNeighbors},
		"networks":                 {Items: maxNetworks},
		"networks[].addresses":     {Items: maxAddresses},
		"networks[].interfaceName": name,
		"offload.groIPv4MaxSize":   size,
		"offload.groMaxSize":       size,
		"offload.gsoIPv4MaxSize":   size,
		"offload.gsoMaxSize":       size,
		"routes[].advMSS":          natural,
		"routes[].metric":          natural,
		"routes[].mtu":             natural,
		"routes[].scope":           {Choices: slices.Sorted(maps.Keys(scopes))},
		"routes[].table":           natural,
		"rules":                    {Items: function.MaxRules},
		"rules[].priority":         between(function.LowestPriority, function.HighestPriority),
		"rules[].table":            table,
		"sysctls":                  {Keys: function.SysctlNames()},
		"vf.linkState": {
			Choices: []string{function.LinkAuto, function.LinkDisable, function.LinkEnable},
		},
		"vf.maxTxRate":    natural,
		"vf.minTxRate":    natural,
		"vf.nodeGUID":     guid,
		"vf.portGUID":     guid,
		"vf.qos":          between(0, function.MaxQoS),
		"vf.vlan":         between(0, function.MaxVLAN),
		"vf.vlanProtocol": {Choices: []string{function.VLAN8021Q, function.VLAN8021AD}},
		"vrf.name":        name,
		"vrf.table":       table,
	}
}
