package pool

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/pci"
)

// selector is a compiled [v1alpha1.FunctionSelector].
type selector struct {
	vendors, devices, drivers []string
	addresses                 []pci.Address
	pfNames                   []indexed
	rootDevices               []indexed
}

// indexed is "name" or "name#0-3,7".
type indexed struct {
	name   string
	ranges []indexRange // empty: every index
}

type indexRange struct{ first, last int }

// compile checks a selector; errors name the field.
func compile(s v1alpha1.FunctionSelector) (selector, error) {
	compiled := selector{
		vendors: lower(s.Vendors),
		devices: lower(s.Devices),
		drivers: s.Drivers,
	}
	for i, text := range s.PCIAddresses {
		address, err := pci.Parse(text)
		if err != nil {
			return selector{}, fmt.Errorf("pciAddresses[%d]: %w", i, err)
		}
		compiled.addresses = append(compiled.addresses, address)
	}
	for i, text := range s.PFNames {
		pf, err := parseIndexed(text)
		if err != nil {
			return selector{}, fmt.Errorf("pfNames[%d]: %w", i, err)
		}
		compiled.pfNames = append(compiled.pfNames, pf)
	}
	for i, text := range s.RootDevices {
		pf, err := parseIndexed(text)
		if err != nil {
			return selector{}, fmt.Errorf("rootDevices[%d]: %w", i, err)
		}
		address, err := pci.Parse(pf.name)
		if err != nil {
			return selector{}, fmt.Errorf("rootDevices[%d]: %w", i, err)
		}
		pf.name = string(address)
		compiled.rootDevices = append(compiled.rootDevices, pf)
	}
	return compiled, nil
}

func lower(texts []string) []string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = strings.ToLower(text)
	}
	return out
}

// parseIndexed parses "name", "name#2" and "name#0-3,7".
func parseIndexed(text string) (indexed, error) {
	name, list, limited := strings.Cut(text, "#")
	if name == "" {
		return indexed{}, fmt.Errorf("%q: the name before # is missing", text)
	}
	if !limited {
		return indexed{name: name}, nil
	}
	out := indexed{name: name}
	for _, item := range strings.Split(list, ",") {
		low, high, isRange := strings.Cut(item, "-")
		first, err := strconv.Atoi(low)
		if err != nil || first < 0 {
			return indexed{}, fmt.Errorf("%q: %q is not an index or a range such as 0-3", text, item)
		}
		last := first
		if isRange {
			if last, err = strconv.Atoi(high); err != nil || last < first {
				return indexed{}, fmt.Errorf("%q: %q is not a range such as 0-3", text, item)
			}
		}
		out.ranges = append(out.ranges, indexRange{first, last})
	}
	return out, nil
}

func (x indexed) matches(name string, index int) bool {
	if x.name != name {
		return false
	}
	return len(x.ranges) == 0 || slices.ContainsFunc(x.ranges, func(r indexRange) bool { return r.first <= index && index <= r.last })
}

// matches says whether every field that is set matches.
func (s selector) matches(f inventory.Function) bool {
	return anyOf(s.vendors, func(v string) bool { return v == f.Vendor }) &&
		anyOf(s.devices, func(d string) bool { return d == f.Device }) &&
		anyOf(s.drivers, func(d string) bool { return d == f.Driver }) &&
		anyOf(s.addresses, func(a pci.Address) bool { return a == f.ID.Address }) &&
		anyOf(s.pfNames, func(p indexed) bool { return p.matches(f.PFName, f.Index) }) &&
		anyOf(s.rootDevices, func(p indexed) bool { return p.matches(string(f.PF), f.Index) })
}

// anyOf is true for an empty list: what is not set does not limit.
func anyOf[T any](list []T, matches func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, matches)
}
