package pool

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// Drivers of the vDPA bus, by what selectors call them.
var vdpaDrivers = map[string]string{"virtio": "virtio_vdpa", "vhost": "vhost_vdpa"}

// selector is a compiled [v1alpha1.FunctionSelector].
type selector struct {
	vendors, devices, drivers []string
	addresses                 []pci.Address
	pfNames                   []indexed
	rootDevices               []indexed
	acpiIndexes               []string
	linkTypes                 []string
	ddpProfiles               []string
	pkeys                     []uint16
	auxTypes                  []string
	options                   Options
}

// indexed is "name" or "name#0-3,7".
type indexed struct {
	name   string
	ranges []indexRange // empty: every index
}

type indexRange struct{ first, last int }

// compile checks a selector; errors name the field.
func compile(s v1alpha1.FunctionSelector) (selector, error) {
	if s.IsRdma && s.VDPAType != "" {
		return selector{}, fmt.Errorf("vdpaType: %q with isRdma: only one of both can be", s.VDPAType)
	}
	if _, ok := vdpaDrivers[s.VDPAType]; !ok && s.VDPAType != "" {
		return selector{}, fmt.Errorf("vdpaType: %q: must be virtio or vhost", s.VDPAType)
	}
	compiled := selector{
		vendors:     lower(s.Vendors),
		devices:     lower(s.Devices),
		drivers:     s.Drivers,
		acpiIndexes: s.ACPIIndexes,
		linkTypes:   s.LinkTypes,
		ddpProfiles: s.DDPProfiles,
		auxTypes:    s.AuxTypes,
		options:     Options{RDMA: s.IsRdma, VDPA: s.VDPAType},
	}
	for name, ids := range map[string][]string{"vendors": s.Vendors, "devices": s.Devices} {
		if _, err := each(name, ids, parsePCIID); err != nil {
			return selector{}, err
		}
	}
	if _, err := each("acpiIndexes", s.ACPIIndexes, strconv.Atoi); err != nil {
		return selector{}, err
	}
	var err error
	if compiled.addresses, err = each("pciAddresses", s.PCIAddresses, pci.Parse); err != nil {
		return selector{}, err
	}
	if compiled.pfNames, err = each("pfNames", s.PFNames, parseIndexed); err != nil {
		return selector{}, err
	}
	if compiled.rootDevices, err = each("rootDevices", s.RootDevices, parseIndexedAddress); err != nil {
		return selector{}, err
	}
	if compiled.pkeys, err = each("pKeys", s.PKeys, parsePKey); err != nil {
		return selector{}, err
	}
	if i := slices.IndexFunc(s.AuxTypes, func(auxType string) bool { return auxType != "sf" }); i >= 0 {
		return selector{}, fmt.Errorf("auxTypes[%d]: %q: must be sf", i, s.AuxTypes[i])
	}
	return compiled, nil
}

// each parses the entries of a field; errors name the first that is wrong.
func each[T any](field string, texts []string, parse func(string) (T, error)) ([]T, error) {
	var out []T
	for i, text := range texts {
		parsed, err := parse(text)
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", field, i, err)
		}
		out = append(out, parsed)
	}
	return out, nil
}

func lower(texts []string) []string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = strings.ToLower(text)
	}
	return out
}

// parsePCIID parses a vendor or device in hex without prefix, "15b3".
func parsePCIID(text string) (uint16, error) {
	id, err := strconv.ParseUint(text, 16, 16)
	if err != nil || len(text) != 4 {
		return 0, fmt.Errorf("%q: must be four digits in hex, such as 15b3", text)
	}
	return uint16(id), nil
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

// parseIndexedAddress is [parseIndexed] for the address of a PF.
func parseIndexedAddress(text string) (indexed, error) {
	pf, err := parseIndexed(text)
	if err != nil {
		return indexed{}, err
	}
	address, err := pci.Parse(pf.name)
	if err != nil {
		return indexed{}, err
	}
	pf.name = string(address)
	return pf, nil
}

// parsePKey parses "0x7fff", which may also be written without leading zeros.
func parsePKey(text string) (uint16, error) {
	digits, ok := strings.CutPrefix(strings.ToLower(text), "0x")
	key, err := strconv.ParseUint(digits, 16, 16)
	if !ok || err != nil {
		return 0, fmt.Errorf("%q: must be 16 bits in hex, such as 0x7fff", text)
	}
	return uint16(key), nil
}

// names compares names as sriov-network-device-plugin does, regardless of case. The kernel tells "eth0" from "ETH0",
// but nobody has both.
func (x indexed) names(name string) bool { return strings.EqualFold(x.name, name) }

func (x indexed) matches(name string, index int) bool {
	return x.names(name) && anyOf(x.ranges, func(r indexRange) bool { return r.first <= index && index <= r.last })
}

// matches says whether every field that is set matches. A PF is no child of itself: pfNames and rootDevices select VFs
// and SFs only.
func (s selector) matches(f function.Function, deviceType v1alpha1.DeviceType) bool {
	return anyOf(s.vendors, func(v string) bool { return v == f.Vendor }) &&
		anyOf(s.devices, func(d string) bool { return d == f.Device }) &&
		anyOf(s.drivers, func(d string) bool { return drives(d, f, deviceType) }) &&
		anyOf(s.addresses, func(a pci.Address) bool { return a == f.ID.Address }) &&
		anyOf(s.pfNames, func(p indexed) bool { return f.Kind != function.PF && p.matches(f.PFName, f.Index) }) &&
		anyOf(s.rootDevices, func(p indexed) bool { return f.Kind != function.PF && p.matches(string(f.PF), f.Index) }) &&
		anyOf(s.acpiIndexes, func(i string) bool { return i == f.ACPIIndex }) &&
		anyOf(s.linkTypes, func(t string) bool { return t == f.LinkType }) &&
		anyOf(s.ddpProfiles, func(p string) bool { return p == f.DDPProfile && p != "" }) &&
		anyOf(s.pkeys, func(k uint16) bool { return hasPKey(f, k) }) &&
		anyOf(s.auxTypes, func(string) bool { return f.Kind == function.SF }) &&
		(!s.options.RDMA || f.RDMA) &&
		(s.options.VDPA == "" || f.VDPA.Driver == vdpaDrivers[s.options.VDPA])
}

// drives says whether a driver is the Function's. In pools of auxNetDevices the PF's counts too: that is the one that
// sriov-network-device-plugin knows of an auxiliary device.
func drives(driver string, f function.Function, deviceType v1alpha1.DeviceType) bool {
	auxiliary := f.Kind == function.SF && deviceType == v1alpha1.DeviceTypeAuxNet
	return driver == f.Driver || auxiliary && driver == f.PFDriver
}

func hasPKey(f function.Function, key uint16) bool {
	has, err := parsePKey(f.PKey)
	return err == nil && has == key
}

// anyOf is true for an empty list: what is not set does not limit.
func anyOf[T any](list []T, matches func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, matches)
}
