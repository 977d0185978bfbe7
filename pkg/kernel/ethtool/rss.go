// SPDX-License-Identifier: Apache-2.0

package ethtool

import (
	"errors"
	"fmt"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/attribute"
)

// changeRSS changes settings of the group RSS. An "equal" table is first the kernel's own for all
// channels, because the number of channels can be reduced only with this one
// (ethtool_check_max_channel of net/ethtool/common.c). If it does not spread packets over so many
// queues, the table is written entry by entry.
func (c *Conn) changeRSS(g group, index int, to map[string]string) error {
	if err := c.sendRSS(g, index, to); err != nil || !strings.HasPrefix(to["table"], equal) {
		return err
	}

	now, size, err := c.readTable(index)
	if err != nil || now == to["table"] {
		return err
	}

	var queues int
	if _, err := fmt.Sscanf(to["table"], equal+"%d", &queues); err != nil || queues < 1 {
		return fmt.Errorf("table %q: must have a number of queues", to["table"])
	}
	spread := make([]int, size)
	for i := range spread {
		spread[i] = i % queues
	}

	return c.sendRSS(g, index, map[string]string{"table": strings.Trim(fmt.Sprint(spread), "[]")})
}

// sendRSS changes settings by netlink, or by ioctl if the kernel cannot change them by netlink.
func (c *Conn) sendRSS(g group, index int, to map[string]string) error {
	err := c.change(g, index, to)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = c.ioctlRSS(index, to)
	}
	return err
}

// readTable returns the RSS table, and its number of entries.
func (c *Conn) readTable(index int) (text string, size int, err error) {
	answer, err := c.send(unix.ETHTOOL_MSG_RSS_GET, index)
	if err != nil {
		return "", 0, err
	}
	attrs, err := attribute.Parse(answer)
	if err != nil {
		return "", 0, err
	}
	return table{}.decode(field{name: "table", kind: rssTable}, attrs)["table"],
		len(attrs[rssTable]) / 4, nil
}

// TableSize returns the number of entries of the RSS table of the netdev with the index. It may
// change with the number of channels. The error matches EOPNOTSUPP if there is no table.
func (c *Conn) TableSize(index int) (int, error) {
	_, size, err := c.readTable(index)
	if err == nil && size == 0 {
		err = unix.EOPNOTSUPP
	}
	if err != nil {
		return 0, fmt.Errorf("ethtool RSS table: %w", err)
	}
	return size, nil
}

// Spread returns the RSS table of a size that gives each queue its share of the entries, in the
// form of [Conn.Read]. The shares begin with queue 0. Their sum must be more than 0. It is the
// table of ethtool -X weight: the last entry of each queue is rounded down (fill_indir_table of
// ethtool.c).
func Spread(shares []int, size int) string {
	sum := 0
	for _, share := range shares {
		sum += share
	}

	var entries []byte
	queue, passed := 0, shares[0]
	for i := range size {
		for i >= size*passed/sum {
			queue++
			passed += shares[queue]
		}
		entries = append(entries, nl.Uint32Attr(uint32(queue))...)
	}

	f := field{name: "table", kind: rssTable}
	return table{}.decode(f, attribute.Set{rssTable: entries})["table"]
}
