// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"fmt"
	"maps"
	"strconv"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
)

// checkRSS returns an error about an RSS table or key that the card cannot have. The snapshot has
// all settings of the group that the pod wants.
func (e *Engine) checkRSS(before Snapshot, want function.Interface) error {
	rss := want.Ethtool[function.RSSGroup]
	has := before.Settings[ethtoolGroup(function.RSSGroup)]

	if key, wanted := rss[function.RSSKey]; wanted && len(key) != len(has[function.RSSKey]) {
		return fmt.Errorf("netdev %s: ethtool.rss.hashKey: has %d bytes, and the card's key has %d",
			before.Name, len(key)/2, len(has[function.RSSKey])/2)
	}

	table, wanted := rss[function.RSSTable]
	if !wanted {
		return nil
	}
	if queues, known := receiveQueues(before, want); known && queuesOf(table) > queues {
		return fmt.Errorf("netdev %s: ethtool.rss: needs %d queues, and the netdev has %d that "+
			"receive; see ethtool.channels", before.Name, queuesOf(table), queues)
	}
	if len(want.Ethtool["channels"]) > 0 {
		return nil // the channels may change the size
	}
	if _, err := e.resolved(before.Identity.Index, function.RSSGroup, rss); err != nil {
		return fmt.Errorf("netdev %s: %w", before.Name, err)
	}

	return nil
}

// receiveQueues returns the number of queues for received packets that the netdev will have. The
// driver may not say.
func receiveQueues(before Snapshot, want function.Interface) (queues int, known bool) {
	channels := maps.Clone(before.Settings[ethtoolGroup("channels")])
	if channels == nil {
		return 0, false
	}
	maps.Copy(channels, want.Ethtool["channels"])

	for _, kind := range []string{"rx", "combined"} {
		n, _ := strconv.Atoi(channels[kind])
		queues += n
	}

	return queues, queues > 0
}

// queuesOf returns the number of queues that a table of [function.RSSTable] needs.
func queuesOf(table string) int {
	if count, isEqual := strings.CutPrefix(table, function.RSSEqual); isEqual {
		n, _ := strconv.Atoi(count)
		return n
	}

	shares := sharesOf(table)
	for len(shares) > 0 && shares[len(shares)-1] == 0 {
		shares = shares[:len(shares)-1]
	}
	return len(shares)
}

// sharesOf returns the weights of a table of [function.RSSTable], or nil if it has none.
func sharesOf(table string) (shares []int) {
	weights, _ := strings.CutPrefix(table, function.RSSWeights)
	for _, weight := range strings.Fields(weights) {
		share, _ := strconv.Atoi(weight) // valid, see [function.Interface.Validate]
		shares = append(shares, share)
	}
	return shares
}

// resolved returns settings of a group in the form in which the driver's settings are read. It
// makes weights a table of the size that the card has now. It returns an error if the table is too
// short for the shares.
func (e *Engine) resolved(
	index int, group string, settings map[string]string,
) (map[string]string, error) {
	settings = maps.Clone(settings)
	table, hasTable := settings[function.RSSTable]
	if group != function.RSSGroup || !hasTable {
		return settings, nil
	}

	size, err := e.ethtool.TableSize(index)
	if err != nil {
		return nil, err
	}

	if strings.HasPrefix(table, function.RSSEqual) {
		if queues := queuesOf(table); queues > size {
			return nil, fmt.Errorf("ethtool.rss.equal: is %d, and the card's table has %d entries",
				queues, size)
		}
		return settings, nil
	}

	sum, shares := 0, sharesOf(table)
	for _, share := range shares {
		sum += share
	}
	if sum > size {
		return nil, fmt.Errorf("ethtool.rss.weights: their sum is %d, and the card's table has %d "+
			"entries", sum, size)
	}

	settings[function.RSSTable] = ethtool.Spread(shares, size)
	return settings, nil
}
