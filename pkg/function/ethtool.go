// SPDX-License-Identifier: Apache-2.0

package function

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Ethtool has settings of a netdev's driver by group and name. The groups are "features", "private
// flags", "channels", "rings", "coalescing", "pause" and "RSS", and the names are the ones that
// package ethtool reads. A value is "on" or "off" in the first two groups, and a decimal number in
// the next four. See [RSSTable] for the last one.
type Ethtool map[string]map[string]string

// EthtoolGroups returns the groups that a pod may change, in the order in which they are changed.
// The channels come before the rest, because they decide which queues exist.
func EthtoolGroups() []string {
	return []string{
		"private flags", "channels", "rings", "features", "coalescing", "pause", RSSGroup,
	}
}

// Limits of what a pod may ask for: ETH_GSTRING_LEN of linux/ethtool.h, and more settings than a
// group has.
const (
	maxEthtoolName     = 31
	maxEthtoolSettings = 128
)

func (e Ethtool) validate() error {
	var errs []error
	for _, group := range slices.Sorted(maps.Keys(e)) {
		if !slices.Contains(EthtoolGroups(), group) {
			errs = append(errs, fmt.Errorf("ethtool: %q is no group of settings; can be: %s",
				cut(group), strings.Join(EthtoolGroups(), ", ")))
			continue
		}
		if len(e[group]) > maxEthtoolSettings {
			errs = append(errs, fmt.Errorf("ethtool.%s: has %d settings, at most %d may be given",
				ethtoolField(group), len(e[group]), maxEthtoolSettings))
			continue
		}

		if group == RSSGroup {
			errs = append(errs, validateRSS(e[group]))
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(e[group])) {
			if err := validateEthtool(group, name, e[group][name]); err != nil {
				errs = append(errs, fmt.Errorf("ethtool.%s: %q %w", ethtoolField(group), cut(name),
					err))
			}
		}
	}
	return errors.Join(errs...)
}

// ethtoolField returns the field of a configuration that has the settings of a group.
func ethtoolField(group string) string { return strings.Replace(group, " f", "F", 1) }

func validateEthtool(group, name, value string) error {
	isPrintable := func(r rune) bool { return r < unicode.MaxASCII && unicode.IsPrint(r) }
	if name == "" || len(name) > maxEthtoolName ||
		strings.ContainsFunc(name, func(r rune) bool { return !isPrintable(r) }) {
		return fmt.Errorf("has a name that no driver has: must be 1-%d printable characters",
			maxEthtoolName)
	}

	if isFlag := group == "features" || group == "private flags"; isFlag {
		if value != "on" && value != "off" {
			return fmt.Errorf("is %q: must be on or off", cut(value))
		}
		return nil
	}

	if _, err := strconv.ParseUint(value, 10, 32); err != nil {
		return fmt.Errorf("is %q: must be a number", cut(value))
	}
	return nil
}
