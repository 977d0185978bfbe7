// Package dialects lists the dialects of OPI agents, by the names that XPUs and configurations call them.
package dialects

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

// Default is that of an agent of which nothing else is said.
const Default = evpngw.Name

var all = map[string]opi.Dialect{
	evpngw.Name: evpngw.Dialect{},
}

// Names are those of all dialects, sorted.
func Names() []string { return slices.Sorted(maps.Keys(all)) }

// Named returns the dialect of this name; "" is [Default].
func Named(name string) (opi.Dialect, error) {
	name = cmp.Or(name, Default)
	if dialect, known := all[name]; known {
		return dialect, nil
	}
	return nil, fmt.Errorf("dialect %q: must be one of %q", name, Names())
}
