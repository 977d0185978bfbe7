// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"k8s.io/apimachinery/pkg/util/sets"
)

// Stats measures the load that a cluster puts on its API server.
type Stats struct {
	Nodes, Pools, Slices, Devices, Claims int
	Bytes                                 int // of all ResourceSlices, as JSON
	LargestSlice                          int // in bytes
	// WritesPerLink is the maximum number of ResourceSlices that change when the link of one PF
	// does, because its devices get a taint: all slices with devices of a pool.
	WritesPerLink int
	BytesPerLink  int // size of these ResourceSlices
}

// Stats computes the statistics.
func (c *Cluster) Stats() (Stats, error) {
	type poolID struct{ driver, name string }
	s := Stats{Nodes: len(c.Nodes), Slices: len(c.Slices), Claims: len(c.Claims)}
	pools, writes, bytes := sets.New[poolID](), map[poolID]int{}, map[poolID]int{}
	for _, slice := range c.Slices {
		content, err := json.Marshal(slice)
		if err != nil {
			return Stats{}, fmt.Errorf("ResourceSlice %s: %w", slice.Name, err)
		}

		s.Bytes += len(content)
		s.LargestSlice = max(s.LargestSlice, len(content))
		s.Devices += len(slice.Spec.Devices)
		id := poolID{slice.Spec.Driver, slice.Spec.Pool.Name}
		pools.Insert(id)

		if len(slice.Spec.Devices) > 0 {
			writes[id]++
			bytes[id] += len(content)
		}

		s.WritesPerLink, s.BytesPerLink = max(s.WritesPerLink,
			writes[id]), max(s.BytesPerLink, bytes[id])
	}

	s.Pools = len(pools)
	return s, nil
}

// Text writes the statistics for people.
func (s Stats) Text(to io.Writer) error {
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, row := range []struct {
		number int
		what   string
	}{
		{s.Nodes, "Nodes"}, {s.Pools, "pools"}, {s.Slices, "ResourceSlices"},
		{s.Devices, "devices"}, {s.Claims, "ResourceClaims with devices"},
		{s.Bytes, "bytes of ResourceSlices, as JSON"}, {s.LargestSlice, "bytes of the largest"},
		{s.WritesPerLink, "ResourceSlices written when a link of a PF changes"},
		{s.BytesPerLink, "bytes of those"},
	} {
		fmt.Fprintf(table, "%d\t %s\n", row.number, row.what)
	}

	return table.Flush()
}
