// SPDX-License-Identifier: Apache-2.0

// Package dialects lists the dialects of OPI agents by the names used in XPUs and configurations.
package dialects

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

var all = map[string]opi.Dialect{
	evpngw.Name: evpngw.Dialect,
}

// Names returns the names of all dialects, sorted.
func Names() []string { return slices.Sorted(maps.Keys(all)) }

// Named returns the dialect with this name; "" means evpn-gw.
func Named(name string) (opi.Dialect, error) {
	name = cmp.Or(name, evpngw.Name)
	if dialect, known := all[name]; known {
		return dialect, nil
	}
	return nil, fmt.Errorf("dialect %q: must be one of %q", name, Names())
}
