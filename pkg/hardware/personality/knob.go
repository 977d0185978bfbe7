// SPDX-License-Identifier: Apache-2.0

package personality

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Kind is the type of a knob's values.
type Kind string

// Kinds of knobs. The value of an Answer is "ok", "ignore" (success without effect) or the name of
// an errno.
const (
	Answer       Kind = "answer"
	Milliseconds Kind = "ms"        // at most a minute
	Number       Kind = "number"    // from 0
	Condition    Kind = "condition" // "nothing", "up" (the PF), "carrier", or its speed in Mbit/s
	Told         Kind = "told"      // "value", "unknown", "own" (the VF's), "speed", or a number
	Follow       Kind = "follow"    // "never", "now", "open" or "reset"
	Switch       Kind = "switch"    // "no" or "yes"
	Source       Kind = "source"    // of a VF's carrier: "pf", which must be up, or "port"
)

// OK and Ignore are the answers of a driver that carries out a request, and of one that reports
// success without an effect.
const (
	OK     = "ok"
	Ignore = "ignore"
)

// words are the values of kinds without numbers.
var words = map[Kind][]string{
	Answer: {
		OK, Ignore, "EPERM", "ENOENT", "EIO", "EAGAIN", "EACCES", "EBUSY", "ENODEV", "EINVAL",
		"ENOSPC", "ERANGE", "EOPNOTSUPP", "EPROTONOSUPPORT", "EADDRNOTAVAIL", "ENXIO", "ENOMEM",
		"ENOSYS", "EPROTO", "EALREADY", "ENETDOWN",
		"ETIMEDOUT", "ENOTSUPP",
	},
	Condition: {"nothing", "carrier", "up"},
	Told:      {"value", "unknown", "own", "speed"},
	Follow:    {"never", "now", "open", "reset"},
	Switch:    {"no", "yes"},
	Source:    {"pf", "port"},
}

// least and most bound the numbers of a kind.
var least, most = map[Kind]int{Condition: 10}, map[Kind]int{Milliseconds: 60_000}

// numbers are the kinds with numeric values.
var numbers = []Kind{Milliseconds, Number, Condition, Told}

// Knob is a knob of test/qemu/simnic; personality.h there has the same table.
type Knob struct {
	Name    string
	Kind    Kind
	Default string
	About   string
}

// Fields are the settings that a PF enforces for a VF, by the names of their knobs.
var Fields = []string{"mac", "vlan", "qos", "min", "max", "spoofchk", "trust", "link"}

// aspects are the knobs that each field has: "<field>", or "<field>.<aspect>".
var aspects = []Knob{
	{"", Answer, OK, "the answer to a value"},
	{".zero", Answer, OK, "the answer to none: zeros, off, auto"},
	{".same", Answer, OK, "the answer to the value that there is already"},
	{".delay", Milliseconds, "0", "time from the answer to the effect"},
	{".reset", Milliseconds, "0", "time that the VF then resets for"},
	{".needs", Condition, "nothing", "what the answer needs"},
	{".unmet", Answer, "EINVAL", "the answer without that"},
	{".tell", Told, "value", "what is told"},
	{".tell-none", Told, "value", "what is told where there is none"},
}

// others are the knobs that belong to no field.
var others = []Knob{
	{"vlan.ad", Answer, "EPROTONOSUPPORT", "the answer to 802.1ad"},
	{"vlan.proto-told", Switch, "yes", "whether the VLAN's protocol is told"},
	{"qos.alone", Answer, OK, "the answer to a QoS without a VLAN"},
	{"link.enable", Answer, OK, `the answer to link state "enable"`},
	{"mac.follow", Follow, "never", "when the VF's netdev takes the MAC that the PF set"},
	{"set.busy", Answer, OK, "the answer to each field while the VF resets"},
	{"set.wait", Milliseconds, "0", "time that the PF waits before for the end of the reset"},
	{"set.down", Answer, OK, "the answer to each field while the PF is down"},
	{"operations", Switch, "yes", "whether the PF's driver has operations for VFs at all"},
	{"get", Answer, OK, "the answer to who asks about a VF; an error leaves the VF out"},
	{"get.busy", Answer, OK, "the same while the VF resets"},
	{"get.any", Answer, OK, "the same while any VF resets"},
	{"get.wait", Milliseconds, "0", "time that the PF waits before for the end of the VF's reset"},
	{"get.down", Answer, OK, "the same while the PF is down"},
	{"vf.mac.admin", Answer, "EPERM",
		"the answer to a VF that wants another MAC than the administrative one"},
	{"vf.mac.equal", Answer, OK, "the answer to a VF that wants the administrative one"},
	{"vf.mac.trusted", Switch, "yes", "whether a trusted VF may have another"},
	{"vf.mac.through", Switch, "no", "whether a VF's own MAC becomes the administrative one"},
	{"vf.mac.busy", Answer, OK, "the answer to a VF that wants a MAC while it resets"},
	{"vf.mac.wait", Milliseconds, "0", "time that the VF waits before for the end of the reset"},
	{"vf.up.busy", Answer, OK, "the answer to a VF that is set up while it resets"},
	{"vf.mtu.reset", Milliseconds,
		"0", "time that a VF resets for which is up and gets another MTU"},
	{"numvfs", Answer, OK, `the answer to a number of VFs; "ignore" makes none`},
	{"numvfs.down", Answer, OK, "the same while the PF is down"},
	{"numvfs.most", Number, "0", "VFs that are made at most, 0 for as many as are asked for"},
	{"numvfs.late", Milliseconds, "0", "time from a VF's device to its netdev"},
	{"carrier", Source, "pf", "where a VF's carrier comes from"},
	{"speed", Number, "25000", "of the link, in Mbit/s"},
}

// Knobs returns all knobs.
func Knobs() []Knob {
	var all []Knob
	for _, field := range Fields {
		for _, k := range aspects {
			k.Name = field + k.Name
			all = append(all, k)
		}
	}
	return append(all, others...)
}

func byName(name string) (Knob, bool) {
	all := Knobs()
	i := slices.IndexFunc(all, func(k Knob) bool { return k.Name == name })
	if i < 0 {
		return Knob{}, false
	}
	return all[i], true
}

func (s Setting) validate() error {
	k, ok := byName(s.Knob)
	if !ok {
		return fmt.Errorf("knob %q does not exist", s.Knob)
	}

	if slices.Contains(words[k.Kind], s.Value) {
		return nil
	}
	if !slices.Contains(numbers, k.Kind) {
		return fmt.Errorf("knob %s: %q must be one of %s",
			s.Knob, s.Value, strings.Join(words[k.Kind], ", "))
	}

	n, err := strconv.ParseUint(s.Value, 10, 31)
	limit, limited := most[k.Kind]
	if err != nil || int(n) < least[k.Kind] || limited && int(n) > limit {
		return fmt.Errorf("knob %s: %q is no %s", s.Knob, s.Value, k.Kind)
	}

	return nil
}
