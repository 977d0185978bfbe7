// SPDX-License-Identifier: Apache-2.0

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

// vdpaDrivers has the drivers of the vDPA bus, by their names in selectors.
var vdpaDrivers = map[string]string{"virtio": "virtio_vdpa", "vhost": "vhost_vdpa"}

// selector is a compiled [v1alpha1.FunctionSelector].
type selector struct {
	// matches reports whether every field that is set matches. pfNames and rootDevices match VFs
	// and SFs only.
	matches func(f function.Function) bool
	// isPF reports whether the selector names the PF. For an SF, it reports whether it names the
	// SF's PF.
	isPF    func(pf function.Function) bool
	options Options
}

// indexed is "name" or "name#0-3,7".
type indexed struct {
	name   string
	ranges []indexRange // empty for every index
}

type indexRange struct{ first, last int }

// compile checks and compiles a selector of a pool of this device type. Errors name the field.
func compile(s v1alpha1.FunctionSelector, deviceType v1alpha1.DeviceType) (selector, error) {
	if s.IsRdma && s.VDPAType != "" {
		return selector{}, fmt.Errorf("vdpaType: %q with isRdma: only one of both can be",
			s.VDPAType)
	}
	if _, ok := vdpaDrivers[s.VDPAType]; !ok && s.VDPAType != "" {
		return selector{}, fmt.Errorf("vdpaType: %q: must be virtio or vhost", s.VDPAType)
	}

	var err error
	vendors := each(&err, "vendors", s.Vendors, parsePCIID)
	devices := each(&err, "devices", s.Devices, parsePCIID)
	addresses := each(&err, "pciAddresses", s.PCIAddresses, pci.Parse)
	pfNames := each(&err, "pfNames", s.PFNames, parseIndexed)
	rootDevices := each(&err, "rootDevices", s.RootDevices, parseIndexedAddress)
	each(&err, "acpiIndexes", s.ACPIIndexes, strconv.Atoi)
	pkeys := each(&err, "pKeys", s.PKeys, parsePKey)
	each(&err, "auxTypes", s.AuxTypes, parseAuxType)

	matches := func(f function.Function) bool {
		return contains(vendors, f.Vendor) &&
			contains(devices, f.Device) &&
			anyOf(s.Drivers, func(d string) bool { return drives(d, f, deviceType) }) &&
			contains(addresses, f.ID.Address) &&
			anyOf(pfNames, func(p indexed) bool {
				return f.Kind != function.PF &&
					p.namesPF(f) && p.has(f.Index)
			}) &&
			anyOf(rootDevices, func(p indexed) bool {
				return f.Kind != function.PF &&
					p.names(string(f.PF)) && p.has(f.Index)
			}) &&
			contains(s.ACPIIndexes, f.ACPIIndex) &&
			contains(s.LinkTypes, f.LinkType) &&
			anyOf(s.DDPProfiles, func(p string) bool { return p == f.DDPProfile && p != "" }) &&
			contains(pkeys, f.PKey) &&
			(len(s.AuxTypes) == 0 || f.Kind == function.SF) &&
			(!s.IsRdma || f.RDMA) &&
			(s.VDPAType == "" || f.VDPA.Driver == vdpaDrivers[s.VDPAType])
	}

	isPF := func(pf function.Function) bool {
		return len(pfNames)+len(rootDevices) > 0 &&
			contains(vendors, pf.Vendor) &&
			anyOf(pfNames, func(p indexed) bool { return p.namesPF(pf) }) &&
			anyOf(rootDevices, func(p indexed) bool { return p.names(string(pf.PF)) })
	}

	return selector{
		matches: matches, isPF: isPF, options: Options{RDMA: s.IsRdma, VDPA: s.VDPAType},
	}, err
}

func compileAll(spec v1alpha1.DevicePoolSpec) ([]selector, error) {
	var selectors []selector
	for i, s := range spec.Selectors {
		compiled, err := compile(s, spec.DeviceType)
		if err != nil {
			return nil, fmt.Errorf("spec.selectors[%d].%w", i, err)
		}
		selectors = append(selectors, compiled)
	}

	return selectors, nil
}

// each parses the entries of a field. For the first invalid entry it sets err, unless err is set
// already.
func each[T any](err *error, field string, texts []string, parse func(string) (T, error)) []T {
	var out []T
	for i, text := range texts {
		parsed, problem := parse(text)
		if problem != nil && *err == nil {
			*err = fmt.Errorf("%s[%d]: %w", field, i, problem)
		}
		out = append(out, parsed)
	}

	return out
}

// parsePCIID parses a vendor or device of four hex digits, "15B3", and returns it in lower case.
func parsePCIID(text string) (string, error) {
	if _, err := strconv.ParseUint(text, 16, 16); err != nil || len(text) != 4 {
		return "", fmt.Errorf("%q: must be four digits in hex, such as 15b3", text)
	}
	return strings.ToLower(text), nil
}

func parseAuxType(text string) (string, error) {
	if text != "sf" {
		return "", fmt.Errorf("%q: must be sf", text)
	}
	return text, nil
}

// maxAltName is the length of the longest altname (ALTIFNAMSIZ in include/linux/netdevice.h, which
// counts the zero byte too).
const maxAltName = 127

// parseIndexed parses "name", "name#2" and "name#0-3,7".
func parseIndexed(text string) (indexed, error) {
	name, list, limited := strings.Cut(text, "#")
	if name == "" {
		return indexed{}, fmt.Errorf("%q: the name before # is missing", text)
	}
	if len(name) > maxAltName {
		return indexed{}, fmt.Errorf("%q: the name before # must have at most %d characters", text,
			maxAltName)
	}

	out := indexed{name: name}
	if !limited {
		return out, nil
	}

	for _, item := range strings.Split(list, ",") {
		low, high, isRange := strings.Cut(item, "-")
		first, err := strconv.Atoi(low)
		if err != nil || first < 0 {
			return indexed{}, fmt.Errorf("%q: %q is not an index or a range such as 0-3",
				text, item)
		}

		last := first
		if isRange {
			if last, err = strconv.Atoi(high); err != nil {
				return indexed{}, fmt.Errorf("%q: %q is not a range such as 0-3", text, item)
			}
			if last < first {
				return indexed{}, fmt.Errorf("%q: a range of VF indexes must go from the smaller "+
					"to the larger one, such as #3-7", text)
			}
		}

		out.ranges = append(out.ranges, indexRange{first, last})
	}

	return out, nil
}

// within reports whether a PF with this many VFs has all VFs that are named. It returns true for a
// text that cannot be parsed.
func within(text string, numVFs int) bool {
	named, err := parseIndexed(text)
	return err != nil || !slices.ContainsFunc(named.ranges, func(r indexRange) bool {
		return r.first >= numVFs || r.last >= numVFs
	})
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

// parsePKey parses a partition key, and returns it in the kernel's form, "0x7fff".
func parsePKey(text string) (string, error) {
	digits, ok := strings.CutPrefix(strings.ToLower(text), "0x")
	key, err := strconv.ParseUint(digits, 16, 16)
	if !ok || err != nil {
		return "", fmt.Errorf("%q: must be 16 bits in hex, such as 0x7fff", text)
	}
	return fmt.Sprintf("0x%04x", key), nil
}

// names reports whether the names are equal. It ignores the case of letters, as
// sriov-network-device-plugin does.
func (x indexed) names(name string) bool { return strings.EqualFold(x.name, name) }

// namesPF reports whether the Function's PF has the name, as the name or an altname of its netdev.
func (x indexed) namesPF(f function.Function) bool {
	return x.names(f.PFName) || slices.ContainsFunc(f.PFAltNames, x.names)
}

func (x indexed) has(index int) bool {
	return anyOf(x.ranges, func(r indexRange) bool { return r.first <= index && index <= r.last })
}

// checkAltNames returns an error for the first entry of pfNames that is an altname of one PF and
// also a name or altname of another, because it does not say which is meant. The kernel gives a
// name to one netdev only, but selectors ignore the case of letters, and a netdev in a pod's network
// namespace keeps its names, which the host may give to another one.
func checkAltNames(spec v1alpha1.DevicePoolSpec, functions []function.Function) error {
	for i, s := range spec.Selectors {
		for j, text := range s.PFNames {
			if named, err := parseIndexed(text); err == nil {
				if err := named.single(functions); err != nil {
					return fmt.Errorf("spec.selectors[%d].pfNames[%d]: %w", i, j, err)
				}
			}
		}
	}
	return nil
}

// single returns an error if the name fits several PFs, and one of them by an altname.
func (x indexed) single(functions []function.Function) error {
	var pfs []string
	altName := false
	for _, f := range functions {
		if f.Kind == function.PF && x.namesPF(f) {
			pfs = append(pfs, string(f.PF))
			altName = altName || !x.names(f.PFName)
		}
	}

	if altName && len(pfs) > 1 {
		return fmt.Errorf("%q: is a name of the netdevs of PFs %s: name the PF by rootDevices",
			x.name, strings.Join(pfs, " and "))
	}
	return nil
}

// drives reports whether the Function has the driver. An SF in a pool of auxNetDevices also has the
// driver of its PF, which sriov-network-device-plugin compares.
func drives(driver string, f function.Function, deviceType v1alpha1.DeviceType) bool {
	auxiliary := f.Kind == function.SF && deviceType == v1alpha1.DeviceTypeAuxNet
	return f.HasDriver(driver) || auxiliary && driver == f.PFDriver
}

// contains is [anyOf] for entries that are compared by equality.
func contains[T comparable](list []T, value T) bool {
	return anyOf(list, func(entry T) bool { return entry == value })
}

// anyOf reports whether one entry of the list matches. An empty list matches, because a field that
// is not set does not restrict.
func anyOf[T any](list []T, matches func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, matches)
}
