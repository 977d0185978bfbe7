package sriovdp

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

var (
	hexID     = regexp.MustCompile(`^[0-9a-f]{4}$`)
	number    = regexp.MustCompile(`^[0-9]+$`)
	pkey      = regexp.MustCompile(`^0x[0-9a-f]{4}$`)
	netdev    = regexp.MustCompile(`^[^#\s/]{1,15}$`)
	linkTypes = []string{"ether", "infiniband"}
	vdpaTypes = []string{"virtio", "vhost"}
)

// clean takes out of a selector what can match no device in sriov-network-device-plugin, which compares texts and never
// complains: DevicePools may not have it, or would understand it. matches is false where nothing is left that the
// whole selector could match.
func (c *converter) clean(path string, s v1alpha1.FunctionSelector) (kept v1alpha1.FunctionSelector, matches bool) {
	matches = true
	keep := func(field string, list *[]string, check func(string) (string, error)) {
		var good []string
		for i, text := range *list {
			fixed, err := check(text)
			if err != nil {
				c.warn(fmt.Sprintf("%s.%s[%d]", path, field, i), "%v", err)
			}
			if fixed != "" {
				good = append(good, fixed)
			}
		}
		if len(*list) > 0 && len(good) == 0 {
			matches = false
		}
		*list = good
	}
	keep("vendors", &s.Vendors, like(hexID, "four hex digits in lower case, such as 15b3"))
	keep("devices", &s.Devices, like(hexID, "four hex digits in lower case, such as 101e"))
	keep("drivers", &s.Drivers, like(regexp.MustCompile(`.`), "the name of a driver"))
	keep("pciAddresses", &s.PCIAddresses, canonicalAddress)
	keep("acpiIndexes", &s.ACPIIndexes, like(number, "a number such as 101"))
	keep("pfNames", &s.PFNames, indexed(map[string]bool{}, func(name string) bool { return netdev.MatchString(name) }))
	keep("rootDevices", &s.RootDevices, indexed(map[string]bool{}, func(name string) bool {
		_, err := pci.Parse(name)
		return err == nil
	}))
	keep("linkTypes", &s.LinkTypes, among(linkTypes))
	keep("ddpProfiles", &s.DDPProfiles, like(regexp.MustCompile(`.`), "the name of a package"))
	keep("pKeys", &s.PKeys, like(pkey, "as the kernel writes it, such as 0x7fff"))
	if len(s.DDPProfiles) > 0 {
		c.warn(path+".ddpProfiles",
			"is compared with what devlink tells (driver ice); ddptool is not used, so profiles of X700 cards match nothing")
	}
	if s.VDPAType != "" && !slices.Contains(vdpaTypes, s.VDPAType) {
		c.warn(path+".vdpaType", "%q matches nothing: must be virtio or vhost", s.VDPAType)
		matches = false
	}
	s.AuxTypes = slices.Compact(s.AuxTypes)
	return s, matches
}

func like(pattern *regexp.Regexp, right string) func(string) (string, error) {
	return func(text string) (string, error) {
		if !pattern.MatchString(text) {
			return "", fmt.Errorf("%q matches nothing: must be %s", text, right)
		}
		return text, nil
	}
}

func among(words []string) func(string) (string, error) {
	return func(text string) (string, error) {
		if !slices.Contains(words, text) {
			return "", fmt.Errorf("%q matches nothing: must be %s", text, strings.Join(words, " or "))
		}
		return text, nil
	}
}

func canonicalAddress(text string) (string, error) {
	if address, err := pci.Parse(text); err != nil || string(address) != text {
		return "", fmt.Errorf("%q matches nothing: must be dddd:bb:dd.f in lower-case hex, such as 0000:3b:02.1", text)
	}
	return text, nil
}

// indexed checks "name", "name#2" and "name#0-3,7". Of entries with the same name, only the first is looked at, and of
// its indexes only those before the first that is wrong.
func indexed(seen map[string]bool, isName func(string) bool) func(string) (string, error) {
	return func(text string) (string, error) {
		name, list, limited := strings.Cut(text, "#")
		if !isName(name) {
			return "", fmt.Errorf("%q matches nothing: %q is no name of a PF", text, name)
		}
		if seen[strings.ToLower(name)] {
			return "", fmt.Errorf("%q matches nothing: only the first entry of %s counts; write its indexes there", text, name)
		}
		seen[strings.ToLower(name)] = true
		if !limited {
			return name, nil
		}
		ranges, err := indexRanges(list)
		if len(ranges) == 0 {
			return "", fmt.Errorf("%q matches nothing: %w", text, err)
		}
		if err != nil {
			err = fmt.Errorf("%q matches only indexes %s: %w", text, strings.Join(ranges, ","), err)
		}
		return name + "#" + strings.Join(ranges, ","), err
	}
}

// indexRanges returns the ranges that match something, with an error about the others.
func indexRanges(list string) (ranges []string, err error) {
	var errs []error
	for _, item := range strings.Split(list, ",") {
		first, last, ok := indexRange(item)
		if !ok {
			errs = append(errs, fmt.Errorf("%q is no index or range such as 0-3, and what follows it is not looked at", item))
			break
		}
		switch {
		case first > last:
			errs = append(errs, fmt.Errorf("%q is an empty range", item))
		case first == last:
			ranges = append(ranges, strconv.Itoa(first))
		default:
			ranges = append(ranges, fmt.Sprintf("%d-%d", first, last))
		}
	}
	return ranges, errors.Join(errs...)
}

func indexRange(item string) (first, last int, ok bool) {
	low, high, isRange := strings.Cut(item, "-")
	if !isRange {
		high = low
	}
	first, err := strconv.Atoi(low)
	if err != nil {
		return 0, 0, false
	}
	last, err = strconv.Atoi(high)
	return first, last, err == nil && last >= 0
}
