// Package dialects lists the dialects of OPI agents, by the names that XPUs and configurations call them.
package dialects

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/opiproject/xpu-device-plugin/pkg/opi"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/evpngw"
)

// Default is that of an agent of which nothing else is said.
const Default = evpngw.Name

var all = [...]struct {
	name    string
	dialect opi.Dialect
}{
	{evpngw.Name, evpngw.Dialect{}},
}

// Names are those of all dialects.
func Names() []string {
	names := make([]string, 0, len(all))
	for _, d := range all {
		names = append(names, d.name)
	}
	return names
}

// Named returns the dialect of this name; "" is [Default].
func Named(name string) (opi.Dialect, error) {
	name = cmp.Or(name, Default)
	for _, d := range all {
		if d.name == name {
			return d.dialect, nil
		}
	}
	return nil, fmt.Errorf("dialect %q: must be one of %q", name, slices.Sorted(slices.Values(Names())))
}
