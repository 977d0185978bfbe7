// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"

	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/cpuset"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// numaDirectory has the NUMA nodes, below the root of sysfs.
const numaDirectory = "devices/system/node"

// furthest is the distance of nodes that do not reach each other (ACPI 6.5, 5.2.17).
const furthest = "255"

// findNUMANodes sets the NUMA nodes near each Function. Each scan reads the nodes anew, because
// nodes may appear: the memory of a GPU is one that its driver brings online.
func (s *scanner) findNUMANodes() {
	near := map[int][]int{}
	for _, h := range s.known {
		if h.Class == "" || h.NUMANode < 0 {
			continue
		}

		nodes, known := near[h.NUMANode]
		if !known {
			var err error
			nodes, err = nodesNear(s.sysfs, h.NUMANode)
			s.report(s.sysfs.Dir(numaDirectory, fmt.Sprint("node", h.NUMANode)), reasonDistance, err)
			near[h.NUMANode] = nodes
		}
		h.NUMANodes = nodes
	}
}

// nodesNear returns the NUMA nodes near a node, which comes first, or nil if there are no others. It
// returns an error if a file about them cannot be read: Kubernetes' helper would take that for an
// answer.
func nodesNear(root sysfs.Root, node int) ([]int, error) {
	files := &numaFiles{ReadLinkFS: os.DirFS(string(root)).(fs.ReadLinkFS)}
	attribute, err := deviceattribute.GetNUMANodeAttribute(node, deviceattribute.ListAttribute,
		deviceattribute.WithFS(files))
	if err := cmp.Or(files.err, err); err != nil {
		return nil, err
	}

	var near []int
	for _, value := range attribute.Value.IntValues {
		if files.online.Contains(int(value)) {
			near = append(near, int(value))
		}
	}
	if len(near) < 2 || len(near) > mostListed || near[0] != node {
		return nil, nil
	}
	return near, nil
}

// numaFiles is the sysfs that Kubernetes' helper reads. It notes errors that the helper swallows, and
// has a column for each node in a row of distances.
type numaFiles struct {
	fs.ReadLinkFS
	online cpuset.CPUSet // nodes
	err    error         // the first one
}

// ReadFile implements [fs.ReadFileFS]. A file that does not exist is an answer: kernels without NUMA
// have no distances, and memory nodes have no processors.
func (f *numaFiles) ReadFile(name string) ([]byte, error) {
	data, err := fs.ReadFile(f.ReadLinkFS, name)
	if err == nil && path.Base(name) == "distance" {
		data, err = f.columns(data)
	}

	if err != nil && !errors.Is(err, fs.ErrNotExist) && f.err == nil {
		f.err = err
	}
	return data, err
}

// columns returns a row of distances with a column for each node. The kernel leaves out nodes that
// are offline (node_read_distance in drivers/base/node.c), and the helper takes columns for nodes.
func (f *numaFiles) columns(row []byte) ([]byte, error) {
	text, err := fs.ReadFile(f.ReadLinkFS, numaDirectory+"/online")
	if err != nil {
		return nil, fmt.Errorf("nodes: %v", err) // not fs.ErrNotExist: the row says nothing then
	}
	if f.online, err = cpuset.Parse(strings.TrimSpace(string(text))); err != nil {
		return nil, fmt.Errorf("nodes online: %w", err)
	}

	nodes, distances := f.online.List(), strings.Fields(string(row))
	if len(nodes) == 0 || len(nodes) != len(distances) || nodes[len(nodes)-1] > maxNUMANode {
		return nil, fmt.Errorf("%d distances of nodes %s", len(distances), f.online)
	}

	all := make([]string, nodes[len(nodes)-1]+1)
	for i := range all {
		all[i] = furthest
	}
	for i, node := range nodes {
		if _, err := strconv.ParseUint(distances[i], 10, 8); err != nil {
			return nil, fmt.Errorf("distance %q: must be a number to %s", distances[i], furthest)
		}
		all[node] = distances[i]
	}
	return []byte(strings.Join(all, " ")), nil
}
