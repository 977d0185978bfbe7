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

// deviceFiles are the settings in /sys/class/net that concern a netdev as a whole
// (Documentation/ABI/testing/sysfs-class-net).
var deviceFiles = []string{"gro_flush_timeout", "napi_defer_hard_irqs", "threaded"}

// queueFile is a setting of each queue (Documentation/ABI/testing/sysfs-class-net-queues).
type queueFile struct {
	direction string // "rx" or "tx", as in the name of a queue's directory, "rx-0"
	name      string
	// neutral is the value of a queue for which nothing was set. A snapshot leaves out such a
	// queue.
	neutral string
}

var queueFiles = []queueFile{
	{"rx", "rps_cpus", "0"}, {"rx", "rps_flow_cnt", "0"},
	{"tx", "xps_cpus", "0"}, {"tx", "xps_rxqs", "0"}, {"tx", "tx_maxrate", "0"},
	// The values are DQL_MAX_LIMIT and, for hold_time, 1 s in milliseconds (dql_init of
	// lib/dynamic_queue_limits.c).
	{"tx", "byte_queue_limits/limit_max", "1879048192"}, {"tx", "byte_queue_limits/limit_min", "0"},
	{"tx", "byte_queue_limits/hold_time", "1000"},
}

// maxQueues is the number of queues of each direction that are read. The kernel allows more, but no
// card has them.
const maxQueues = 1024

// sysfsOf returns the directory of a netdev of the host. ok is false if sysfs does not show this
// netdev, because it shows another network namespace.
func (e *Engine) sysfsOf(l *link) (dir sysfs.Dir, ok bool) {
	dir = sysfs.Root(e.sysRoot).Dir("class/net", l.Name)
	identity, _ := dir.Attributes("ifindex", "address")
	index := strconv.Itoa(l.Identity.Index)
	return dir, identity["ifindex"] == index && identity["address"] == string(l.MAC)
}

func readSysfs(r *reading) map[string]string {
	dir, ok := r.sysfs()
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

// readQueues reads the settings of all queues. The text of a setting, such as "0=3 7=80", contains
// only queues whose value is not neutral, so that the record of a netdev with many queues is small.
func readQueues(r *reading) map[string]string {
	dir, ok := r.sysfs()
	if !ok {
		return nil
	}

	queues := dir.Dir("queues")
	directories, _, _ := queues.Names()
	count := map[string]int{
		"rx": countQueues("rx", directories), "tx": countQueues("tx", directories),
	}

	// If the first queue lacks a file, all other queues lack it, too.
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

// countQueues returns the number of queues of a direction that are numbered without gaps.
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

// queuePaths returns the files of the queues from first to end-1, relative to the directory of all
// queues. It leaves out files that the first queue lacks.
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

// settingTexts returns the texts of the settings. It leaves out queues with the neutral value.
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

// changeQueues sets each queue to its value in to, or to the neutral value if to lacks the queue.
// It does not write a value that the queue has already.
func (e *Engine) changeQueues(l *link, to map[string]string) error {
	r := e.newReading(l)
	dir, ok := r.sysfs()
	if !ok {
		return errNotInSysfs
	}

	now := readQueues(r)

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

// canonical drops the leading zeros of a mask, which sysfs writes in groups: "00000000,0000000f".
func canonical(text string) string {
	trimmed := strings.TrimLeft(text, "0,")
	if trimmed == "" && text != "" {
		return "0"
	}
	return trimmed
}

// queueValues holds the values of one setting by the number of the queue.
type queueValues map[int]string

// instead returns the values to write so that the queues get the values of v, and all other queues
// the neutral value. now holds the current values.
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

// String returns the form that [parseQueues] reads, in the order of the queues.
func (v queueValues) String() string {
	var words []string
	for _, queue := range slices.Sorted(maps.Keys(v)) {
		words = append(words, strconv.Itoa(queue)+"="+v[queue])
	}
	return strings.Join(words, " ")
}

// parseQueues reads the text of a setting, such as "0=3 7=80".
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
