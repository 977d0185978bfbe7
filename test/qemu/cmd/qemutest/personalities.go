// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/test/qemu/zoo"
)

// played returns the names of the personalities to play, separated by commas. By default it is a
// third of them, a different one each day, so that three days have all.
func played(asked string, full bool, now time.Time) (string, error) {
	all, err := zoo.All()
	if err != nil {
		return "", err
	}

	switch {
	case asked == "all", asked == "" && full:
	case asked == "third", asked == "":
		const day = 24 * 60 * 60
		all = zoo.Third(all, int(now.Unix()/day))
	default:
		return asked, known(strings.Split(asked, ","), all)
	}

	var names []string
	for _, p := range all {
		names = append(names, p.Name)
	}

	return strings.Join(names, ","), nil
}

// known returns an error for the first name without a personality.
func known(names []string, all []personality.Personality) error {
	for _, name := range names {
		if !slices.ContainsFunc(all, func(p personality.Personality) bool {
			return p.Name == name
		}) {
			return fmt.Errorf("-personalities: there is no %q: test/qemu/zoo has all", name)
		}
	}
	return nil
}
