// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/namespace"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// Settings holds what the kernel and the driver keep for a netdev beyond the properties of
// rtnetlink. The keys are the group and the name of a setting, the values are text.
//
// A group or name that is missing is unknown: the kernel or the driver does not have it, or the
// agent that took the snapshot did not read it. A setting that a pod leaves behind may slow down
// the next pod, or change how the netdev behaves on the host, but it never passes a frame to
// another owner.
type Settings map[string]map[string]string

// settingGroup reads and changes the settings of one group on the host.
type settingGroup struct {
	name   string
	source source
	// read returns nil if the group is unknown. It is called in the host's network namespace.
	read   func(r *reading) map[string]string
	change func(l *link, to map[string]string) error
}

// reading is what the groups of a netdev on the host share while they are read.
type reading struct {
	*link
	sysfs func() (sysfs.Dir, bool) // see [Engine.sysfsOf]
}

func (e *Engine) newReading(l *link) *reading {
	return &reading{
		link: l, sysfs: sync.OnceValues(func() (sysfs.Dir, bool) { return e.sysfsOf(l) }),
	}
}

// source is the part of the kernel that answers for a setting. Different sources are read at the
// same time.
type source int

const (
	fromProtocols source = iota // sysctls
	fromDevice                  // sysfs
	fromDriver                  // ethtool
)

// settingGroups returns the groups in the order in which they are changed. The sysctls come first,
// because IPv6 starts when the netdev comes up. The channels of ethtool come before the queues,
// because the channels decide which queues exist.
func (e *Engine) settingGroups() []settingGroup {
	list := []settingGroup{
		e.sysctlGroup("net.ipv4.neigh", "sys/net/ipv4/neigh", neighbourTwins, reportsNone),
		e.sysctlGroup("net.ipv6.neigh", "sys/net/ipv6/neigh", neighbourTwins, reportsNone),
		e.sysctlGroup("net.ipv6.conf", "sys/net/ipv6/conf", confElsewhere(), reportedConf6),
		e.sysctlGroup("net.mpls.conf", "sys/net/mpls/conf", nil, reportsNone),
	}

	for _, name := range ethtool.Groups() {
		list = append(list, settingGroup{
			name: "ethtool " + name, source: fromDriver,
			read: func(r *reading) map[string]string {
				settings, _ := e.ethtool.Read(r.Identity.Index, name)
				return settings
			},
			change: func(l *link, to map[string]string) error {
				return e.ethtool.Change(l.Identity.Index, name, to)
			},
		})
	}

	return append(list,
		settingGroup{"sysfs", fromDevice, readSysfs, e.changeSysfs},
		settingGroup{"queues", fromDevice, readQueues, e.changeQueues},
	)
}

// startReading begins to read groups of a netdev on the host, with one goroutine for each source.
// wait returns the settings, and may be called several times.
func (e *Engine) startReading(l *link, groups []settingGroup) (wait func() Settings) {
	bySource := map[source][]int{}
	for i, g := range groups {
		bySource[g.source] = append(bySource[g.source], i)
	}

	r := e.newReading(l)
	values := make([]map[string]string, len(groups))
	var all sync.WaitGroup
	for _, of := range bySource {
		all.Go(func() {
			_ = namespace.Do(e.host.ns, func() error {
				for _, i := range of {
					values[i] = groups[i].read(r)
				}
				return nil
			})
		})
	}

	return sync.OnceValue(func() Settings {
		all.Wait()
		settings := Settings{}
		for i, g := range groups {
			if len(values[i]) > 0 {
				settings[g.name] = values[i]
			}
		}
		return settings
	})
}

// groupsOf returns the groups that the settings have.
func (e *Engine) groupsOf(settings Settings) []settingGroup {
	return slices.DeleteFunc(slices.Clone(e.settings), func(g settingGroup) bool {
		return settings[g.name] == nil
	})
}

// readAgain begins to read the settings of a netdev on the host that before has, too. last holds
// their values before restored was restored. readAgain reads only the groups of restored, because
// only these may have changed. After the restore of an ethtool setting it reads all groups, because
// such a setting affects other settings and the queues. The caller must call wait.
func (e *Engine) readAgain(
	l *link, before, last Settings, restored []property,
) (wait func() Settings) {
	groups := e.groupsOf(before)
	ofEthtool := func(p property) bool { return strings.HasPrefix(p.group, "ethtool ") }
	if slices.ContainsFunc(restored, ofEthtool) {
		return e.startReading(l, groups)
	}

	again := slices.DeleteFunc(groups, func(g settingGroup) bool {
		return !slices.ContainsFunc(restored, func(p property) bool { return p.group == g.name })
	})
	read := e.startReading(l, again)

	return func() Settings {
		settings := maps.Clone(last)
		for _, g := range again {
			delete(settings, g.name)
		}
		maps.Copy(settings, read())
		return settings
	}
}

// undoSettings restores the settings among the properties that differ, with one change for each
// group. It continues after a refusal. It returns the refusals by the names of the properties.
func (e *Engine) undoSettings(before, now Snapshot, left []property) map[string]error {
	refused := map[string]error{}
	left = e.freeChannels(before, now.Identity.Index, left)
	for _, g := range e.settings {
		to := map[string]string{}
		for _, p := range left {
			if p.group == g.name {
				to[p.key] = string(p.value.(setting))
			}
		}

		if len(to) == 0 {
			continue
		}

		e.trace(g.name + " " + strings.Join(slices.Sorted(maps.Keys(to)), ", "))
		for name, err := range g.restore(&link{Snapshot: now}, to) {
			refused[g.name+" "+name] = err
		}
	}

	return refused
}

// freeChannels resets the RSS table if channels are about to be restored, because the kernel
// refuses to take a channel away that a configured table refers to. It returns what is left to
// restore, which then has the table of before, too.
func (e *Engine) freeChannels(before Snapshot, index int, left []property) []property {
	ofChannels := func(p property) bool { return p.group == ethtoolGroup("channels") }
	if !slices.ContainsFunc(left, ofChannels) {
		return left
	}

	e.resetTable(index)
	isTable := func(p property) bool { return p.name == tableName }
	if slices.ContainsFunc(left, isTable) {
		return left
	}
	for _, p := range before.Settings.properties() {
		if isTable(p) {
			left = append(slices.Clone(left), p)
		}
	}
	return left
}

// tableName is the name of the property of the RSS table.
const tableName = "ethtool " + function.RSSGroup + " " + function.RSSTable

// resetTable makes the RSS table the kernel's own for all channels. The driver changes this table
// with the channels. A refusal is not reported, because the change of the table or of the channels
// that follows reports it. A driver may also have no table.
func (e *Engine) resetTable(index int) {
	e.trace("reset RSS table")
	_ = e.ethtool.Change(index, function.RSSGroup, map[string]string{function.RSSTable: ""})
}

// restore changes several settings at once. If the driver refuses them together, restore changes
// them one by one, so that one refusal does not prevent the others. It returns the refusals by
// name.
func (g settingGroup) restore(l *link, to map[string]string) map[string]error {
	err := g.change(l, to)
	if err == nil {
		return nil
	}

	refused := map[string]error{}
	for name, value := range to {
		if len(to) > 1 {
			err = g.change(l, map[string]string{name: value})
		}
		if err != nil {
			refused[name] = fmt.Errorf("%s %s: %w", g.name, name, err)
		}
	}

	return refused
}

// setting is the value of a setting, with a short form for messages.
type setting string

// String returns the value. It shortens a value that is too long for a message.
func (s setting) String() string {
	const longest = 60
	if len(s) > longest {
		return string(s[:longest]) + "..."
	}
	if s == "" {
		return "unset"
	}
	return string(s)
}

// unlike returns the groups that do not have equal values in other.
func (s Settings) unlike(other Settings) Settings {
	groups := Settings{}
	for name, values := range s {
		if !maps.Equal(values, other[name]) {
			groups[name] = values
		}
	}
	return groups
}

// properties lists the settings in alphabetical order.
func (s Settings) properties() []property {
	var list []property
	for _, group := range slices.Sorted(maps.Keys(s)) {
		for _, name := range slices.Sorted(maps.Keys(s[group])) {
			list = append(list, property{
				name: group + " " + name, value: setting(s[group][name]), group: group, key: name,
			})
		}
	}

	return list
}
