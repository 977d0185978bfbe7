// SPDX-License-Identifier: Apache-2.0

// Package dialects lists the dialects of OPI agents by the names used in XPUs and configurations.
package dialects

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/dpuoperator"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

// All returns all dialects, sorted by name.
func All() []opi.Dialect {
	return []opi.Dialect{dpuoperator.Dialect(), evpngw.Dialect(), evpngw.E2000()}
}

// Names returns the names of all dialects, sorted.
func Names() (names []string) {
	for _, d := range All() {
		names = append(names, d.Name)
	}
	return names
}

// Named returns the dialect with this name; "" means evpn-gw.
func Named(name string) (opi.Dialect, error) {
	name = cmp.Or(name, evpngw.Name)
	all := All()
	i := slices.IndexFunc(all, func(d opi.Dialect) bool { return d.Name == name })
	if i < 0 {
		return opi.Dialect{}, fmt.Errorf("dialect %q: must be one of %q", name, Names())
	}
	return all[i], nil
}
