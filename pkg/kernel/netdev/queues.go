// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// deviceFiles are the settings of a netdev as a whole in /sys/class/net
// (Documentation/ABI/testing/sysfs-class-net).
var deviceFiles = []string{"gro_flush_timeout", "napi_defer_hard_irqs", "threaded"}

// queueFile is a setting of each queue (Documentation/ABI/testing/sysfs-class-net-queues).
type queueFile struct {
	direction string // of the queues, "rx" or "tx", as in the name of the directory "rx-0"
	name      string
	// neutral is the value of a queue that nothing was set for. Such a queue is left out of a
	// snapshot.
	neutral string
}

var queueFiles = []queueFile{
	{"rx", "rps_cpus", "0"}, {"rx", "rps_flow_cnt", "0"},
	{"tx", "xps_cpus", "0"}, {"tx", "xps_rxqs", "0"}, {"tx", "tx_maxrate", "0"},
	// DQL_MAX_LIMIT and, for hold_time, 1 s in milliseconds (dql_init in
	// lib/dynamic_queue_limits.c).
	{"tx", "byte_queue_limits/limit_max", "1879048192"}, {"tx", "byte_queue_limits/limit_min", "0"},
	{"tx", "byte_queue_limits/hold_time", "1000"},
}

// maxQueues is how many queues of each direction are looked at. The kernel allows more, but no card
// has them.
const maxQueues = 1024

// sysfsOf is the directory of a netdev of the host. ok is false if sysfs shows another network
// namespace than the host's, with no netdev of that name, or with another one.
func (e *Engine) sysfsOf(l *link) (dir sysfs.Dir, ok bool) {
	dir = sysfs.Root(e.sysRoot).Dir("class/net", l.Name)
	identity, _ := dir.Attributes("ifindex", "address")
	index := strconv.Itoa(l.Identity.Index)
	return dir, identity["ifindex"] == index && identity["address"] == string(l.MAC)
}

func (e *Engine) readSysfs(l *link) map[string]string {
	dir, ok := e.sysfsOf(l)
	if !ok {
		return nil
	}
	settings, _ := dir.Attributes(deviceFiles...)
	return settings
}

func (e *Engine) changeSysfs(l *link, to map[string]string) error {
	dir, ok := e.sysfsOf(l)
	if !ok {
		return errNotInSysfs
	}
	return writeAll(dir, to)
}

var errNotInSysfs = errors.New("sysfs does not show the netdev")

// readQueues reads the settings of all queues. A setting is the text "0=3 7=80" of the queues with
// another value than the neutral one, so that a netdev with many queues has a small record.
func (e *Engine) readQueues(l *link) map[string]string {
	dir, ok := e.sysfsOf(l)
	if !ok {
		return nil
	}

	queues := dir.Dir("queues")
	directories, _, _ := queues.Names()
	count := map[string]int{
		"rx": countQueues("rx", directories), "tx": countQueues("tx", directories),
	}

	// What the first queue does not have, the others do not have either.
	texts, missing := queues.Attributes(queuePaths(0, 1, count, nil)...)
	others, _ := queues.Attributes(queuePaths(1, maxQueues, count, missing)...)
	maps.Copy(texts, others)

	values := map[string]queueValues{}
	for _, f := range queueFiles {
		for queue := range count[f.direction] {
			text, known := texts[f.path(queue)]
			if !known {
				continue
			}
			if values[f.name] == nil {
				values[f.name] = queueValues{}
			}
			values[f.name][queue] = canonical(text)
		}
	}

	return settingTexts(values)
}

// countQueues is how many queues of a direction there are, from the first one on.
func countQueues(direction string, directories []string) (count int) {
	f := queueFile{direction: direction}
	exists := map[string]bool{}
	for _, name := range directories {
		exists[name] = true
	}

	for count < maxQueues && exists[f.directory(count)] {
		count++
	}
	return count
}

// queuePaths are the files of the queues from first to below end, below the directory of the
// queues. It leaves out what the first queue does not have.
func queuePaths(first, end int, count map[string]int, missing map[string]error) (paths []string) {
	for _, f := range queueFiles {
		if missing[f.path(0)] != nil {
			continue
		}
		for queue := first; queue < min(end, count[f.direction]); queue++ {
			paths = append(paths, f.path(queue))
		}
	}
	return paths
}

// settingTexts leaves out the queues that have the neutral value.
func settingTexts(values map[string]queueValues) map[string]string {
	settings := map[string]string{}
	for _, f := range queueFiles {
		if queues, known := values[f.name]; known {
			maps.DeleteFunc(queues, func(_ int, value string) bool { return value == f.neutral })
			settings[f.name] = queues.String()
		}
	}
	return settings
}

// changeQueues gives each queue the value that to has for it, or the neutral one. A queue that has
// it already is not written.
func (e *Engine) changeQueues(l *link, to map[string]string) error {
	dir, ok := e.sysfsOf(l)
	if !ok {
		return errNotInSysfs
	}

	now := e.readQueues(l)

	var errs []error
	for _, f := range queueFiles {
		text, wanted := to[f.name]
		if !wanted {
			continue
		}

		want, err := parseQueues(text)
		if err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}

		have, _ := parseQueues(now[f.name])
		for queue, value := range want.instead(have, f.neutral) {
			errs = append(errs, dir.Dir("queues", f.directory(queue)).Write(f.name, value))
		}
	}

	return errors.Join(errs...)
}

func (f queueFile) directory(queue int) string { return f.direction + "-" + strconv.Itoa(queue) }

func (f queueFile) path(queue int) string { return f.directory(queue) + "/" + f.name }

// canonical drops leading zeros of masks, which sysfs writes in groups: "00000000,0000000f".
func canonical(text string) string {
	trimmed := strings.TrimLeft(text, "0,")
	if trimmed == "" && text != "" {
		return "0"
	}
	return trimmed
}

// queueValues are the values of one setting by the number of the queue.
type queueValues map[int]string

// instead returns what is to be written so that the queues have these values, and the others the
// neutral one, where they have the values of now.
func (v queueValues) instead(now queueValues, neutral string) queueValues {
	changes := queueValues{}
	for queue := range now {
		if _, wanted := v[queue]; !wanted {
			changes[queue] = neutral
		}
	}

	for queue, value := range v {
		if now[queue] != value {
			changes[queue] = value
		}
	}

	return changes
}

// String is the form that [parseQueues] reads, in the order of the queues.
func (v queueValues) String() string {
	var words []string
	for _, queue := range slices.Sorted(maps.Keys(v)) {
		words = append(words, strconv.Itoa(queue)+"="+v[queue])
	}
	return strings.Join(words, " ")
}

// parseQueues reads the text of a setting: "0=3 7=80".
func parseQueues(text string) (queueValues, error) {
	values := queueValues{}
	for _, word := range strings.Fields(text) {
		digits, value, _ := strings.Cut(word, "=")
		queue, err := strconv.Atoi(digits)
		known := err == nil && 0 <= queue && queue < maxQueues && strconv.Itoa(queue) == digits
		if !known || value == "" {
			return nil, fmt.Errorf("%q: must be the number of a queue and a value, as in 0=f", word)
		}
		values[queue] = value
	}

	return values, nil
}
