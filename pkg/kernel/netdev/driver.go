// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// ethtoolGroup returns the name of a group of ethtool among the [Settings].
func ethtoolGroup(name string) string { return "ethtool " + name }

// checkDriver returns an error about driver settings that the pod wants and that the snapshot does
// not have, because such settings could not be restored. Of RSS it also compares the values with
// what the driver says that it can do.
func (e *Engine) checkDriver(before Snapshot, want function.Interface) error {
	const most = 8 // settings that an error names
	var errs []error
	for _, group := range function.EthtoolGroups() {
		has := before.Settings[ethtoolGroup(group)]
		unknown := slices.DeleteFunc(slices.Sorted(maps.Keys(want.Ethtool[group])),
			func(name string) bool { _, known := has[name]; return known })
		if len(unknown) == 0 {
			continue
		}

		choice := "none of this group"
		if len(has) > 0 {
			choice = strings.Join(slices.Sorted(maps.Keys(has)), ", ")
		}
		errs = append(errs, fmt.Errorf("netdev %s: ethtool %s %q: the driver cannot change it; it can "+
			"change %s", before.Name, group, unknown[:min(len(unknown), most)], choice))
	}

	if len(errs) == 0 {
		errs = append(errs, e.checkRSS(before, want))
	}
	return errors.Join(append(errs, checkOffload(before, want.Offload))...)
}

// checkOffload returns an error about a size that the kernel does not report, because the kernel
// ignores it.
func checkOffload(before Snapshot, want *function.Offload) error {
	if want == nil || before.Carried == nil {
		return nil
	}

	has := before.Carried
	var errs []error
	for _, s := range []struct {
		field string
		wants int
		has   uint32
	}{
		{"gsoMaxSize", want.GSOMaxSize, has.GSOMaxSize}, {"groMaxSize", want.GROMaxSize, has.GROMaxSize},
		{"gsoIPv4MaxSize", want.GSOIPv4MaxSize, has.GSOIPv4MaxSize},
		{"groIPv4MaxSize", want.GROIPv4MaxSize, has.GROIPv4MaxSize},
	} {
		if s.wants != 0 && s.has == 0 {
			errs = append(errs, fmt.Errorf("netdev %s: offload.%s: the node's kernel does not have it",
				before.Name, s.field))
		}
	}

	return errors.Join(errs...)
}

// tuneDriver changes the driver settings that the pod wants. It does so on the host before the
// move, because a netdev keeps these settings when it moves. The pod's snapshot has the old values.
func (e *Engine) tuneDriver(
	ctx context.Context, p patience, before Snapshot, want function.Interface,
) error {
	index := before.Identity.Index
	_, spreads := want.Ethtool[function.RSSGroup][function.RSSTable]
	spreads = spreads && len(want.Ethtool["channels"]) > 0
	if spreads {
		e.resetTable(index) // it may refer to channels that the pod does without
	}

	for _, group := range function.EthtoolGroups() {
		to, err := e.resolved(index, group, want.Ethtool[group])
		if err != nil {
			return fmt.Errorf("netdev %s: %w", before.Name, err)
		}
		isReset := group == function.RSSGroup && spreads
		maps.DeleteFunc(to, func(name, value string) bool {
			return before.Settings[ethtoolGroup(group)][name] == value && !isReset
		})
		if len(to) == 0 {
			continue
		}

		err = e.step(ethtoolGroup(group), func() error {
			return p.retry(ctx, busy, func() error { return e.ethtool.Change(index, group, to) })
		})
		if err == nil {
			err = e.checkTuned(index, group, to)
		}
		if err != nil {
			return fmt.Errorf("netdev %s: %w", before.Name, err)
		}
	}

	return nil
}

// checkTuned returns an error if the driver does not have the settings that it accepted.
func (e *Engine) checkTuned(index int, group string, to map[string]string) error {
	now, err := e.ethtool.Read(index, group)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(to)) {
		if now[name] != to[name] {
			return fmt.Errorf("ethtool %s %q: the driver accepted %s, and has %s", group, name,
				setting(to[name]), setting(now[name]))
		}
	}
	return nil
}
