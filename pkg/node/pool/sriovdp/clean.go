// SPDX-License-Identifier: Apache-2.0

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
	anything = regexp.MustCompile(`.`).MatchString
	hexID    = regexp.MustCompile(`^[0-9a-f]{4}$`).MatchString
	number   = regexp.MustCompile(`^[0-9]+$`).MatchString
	pkey     = regexp.MustCompile(`^0x[0-9a-f]{4}$`).MatchString
	netdev   = regexp.MustCompile(`^[^#\s/]{1,127}$`).MatchString
	linkType = regexp.MustCompile(`^(ether|infiniband)$`).MatchString
)

// clean removes the entries of a selector that match no device in sriov-network-device-plugin. A
// DevicePool would refuse some of them, and match devices by others. matches is false if the whole
// selector matches nothing.
func (c *converter) clean(
	path string, s v1alpha1.FunctionSelector,
) (kept v1alpha1.FunctionSelector, matches bool) {
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
	keep("drivers", &s.Drivers, like(anything, "the name of a driver"))
	keep("pciAddresses", &s.PCIAddresses,
		like(isCanonicalAddress, "dddd:bb:dd.f in lower-case hex, such as 0000:3b:02.1"))
	keep("acpiIndexes", &s.ACPIIndexes, like(number, "a number such as 101"))
	keep("pfNames", &s.PFNames, indexed(netdev))
	keep("rootDevices", &s.RootDevices, indexed(isAddress))
	keep("linkTypes", &s.LinkTypes, like(linkType, "ether or infiniband"))
	keep("ddpProfiles", &s.DDPProfiles, like(anything, "the name of a package"))
	keep("pKeys", &s.PKeys, like(pkey, "as the kernel writes it, such as 0x7fff"))

	if len(s.DDPProfiles) > 0 {
		c.warn(path+".ddpProfiles",
			"is compared with what devlink tells (driver ice); ddptool is not used, so profiles "+
				"of X700 cards match nothing")
	}

	if !slices.Contains([]string{"", "virtio", "vhost"}, s.VDPAType) {
		c.warn(path+".vdpaType", "%q matches nothing: must be virtio or vhost", s.VDPAType)
		matches = false
	}

	s.AuxTypes = slices.Compact(s.AuxTypes)
	return s, matches
}

// like returns a check for entries that are used unchanged.
func like(right func(string) bool, description string) func(string) (string, error) {
	return func(text string) (string, error) {
		if !right(text) {
			return "", fmt.Errorf("%q matches nothing: must be %s", text, description)
		}
		return text, nil
	}
}

func isAddress(text string) bool {
	_, err := pci.Parse(text)
	return err == nil
}

func isCanonicalAddress(text string) bool {
	return isAddress(text) && text == strings.ToLower(text)
}

// indexed returns a check for entries "name", "name#2" and "name#0-3,7". If several entries have
// the same name, only the first one is used. Only indexes before the first invalid one are used.
func indexed(isName func(string) bool) func(string) (string, error) {
	seen := map[string]bool{}
	return func(text string) (string, error) {
		name, list, limited := strings.Cut(text, "#")
		if !isName(name) {
			return "", fmt.Errorf("%q matches nothing: %q is no name of a PF", text, name)
		}
		if seen[strings.ToLower(name)] {
			return "", fmt.Errorf("%q matches nothing: only the first entry of %s counts; write "+
				"its indexes there", text, name)
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
		low, high, isRange := strings.Cut(item, "-")
		if !isRange {
			high = low
		}

		first, lowErr := strconv.Atoi(low)
		last, highErr := strconv.Atoi(high)
		if lowErr != nil || highErr != nil || last < 0 {
			errs = append(errs,
				fmt.Errorf("%q is no index or range such as 0-3, and what follows it is not "+
					"looked at", item))
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
