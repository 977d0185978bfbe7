// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/simulate"
)

// scanned returns the Functions by their ID, and the problems of a scan.
func scanned(t *testing.T, s *scanner) map[string]function.Function {
	t.Helper()
	functions, err := s.scan()
	must.Succeed(t, err)
	byID := map[string]function.Function{}
	for _, f := range functions {
		byID[f.ID.String()] = f
	}
	return byID
}

// TestDataDirect checks that each ConnectX-8 of a GB300 has the root of its own Data Direct
// function, which has the same keyword V3 in its Vital Product Data.
func TestDataDirect(t *testing.T) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(1), Log: testr.New(t)})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, host.Close()) }()
	s := testScanner(host.SysRoot())

	want := map[string][]string{}
	for segment, direct := range map[string]string{
		"0000": "pci0008:00", "0002": "pci0009:00", "0010": "pci0018:00", "0012": "pci0019:00",
	} {
		want[segment+":03:00.0"], want[segment+":03:01.0"] = []string{direct}, []string{direct}
	}
	check := func(when string) {
		t.Helper()
		got := map[string][]string{}
		for id, f := range scanned(t, s) {
			got[id] = f.DataDirectRoots
		}
		if diff := gocmp.Diff(want, got); diff != "" || len(s.problems) > 0 {
			t.Errorf("%s: problems %v; roots of Data Direct -want +got\n%s", when, s.problems, diff)
		}
	}
	check("at first")
	check("a second time")

	// An SF has what its PF has.
	sf := function.PotentialSF(scanned(t, s)["0000:03:00.0"], 88)
	if diff := gocmp.Diff([]string{"pci0008:00"}, sf.DataDirectRoots); diff != "" {
		t.Errorf("SF: -want +got\n%s", diff)
	}

	must.Succeed(t, os.Remove(onBusOf(host.SysRoot(), "0008:03:00.0")))
	want["0000:03:00.0"], want["0000:03:01.0"] = nil, nil
	check("without a Data Direct function")
}

func onBusOf(root, address string) string { return filepath.Join(root, onBus+address) }

// TestDataDirectUnknown checks that a NIC whose Vital Product Data do not name the card has no
// other root, and that this is reported if they cannot be understood.
func TestDataDirectUnknown(t *testing.T) {
	for name, tt := range map[string]struct {
		vpd     string // of the Data Direct function
		problem problem
	}{
		"another card": {"\x90\x05\x00V3\x02no\x78", problem{}},
		"no card":      {"\x78", problem{}},
		"broken":       {"\x00", problem{"bus/pci/devices/0008:03:00.0", reasonVPD}},
	} {
		t.Run(name, func(t *testing.T) {
			host, err := simulate.New(t.Context(),
				simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(0)[:1], Log: testr.New(t)})
			must.Succeed(t, err)
			defer func() { must.Succeed(t, host.Close()) }()
			vpd := filepath.Join(onBusOf(host.SysRoot(), "0008:03:00.0"), "vpd")
			must.Succeed(t, os.WriteFile(vpd, []byte(tt.vpd), 0o600))

			s := testScanner(host.SysRoot())
			for range 2 {
				if got := scanned(t, s)["0000:03:00.0"].DataDirectRoots; got != nil {
					t.Errorf("roots of Data Direct %v", got)
				}
				if _, has := s.problems[tt.problem]; has != (tt.problem.why != "") ||
					len(s.problems) > 1 {
					t.Errorf("problems %v, want %v", s.problems, tt.problem)
				}
			}
		})
	}
}

// TestNUMANodesNearby checks which NUMA nodes count as near: the others of the socket at the
// smallest distance, as Kubernetes' helper has them.
func TestNUMANodesNearby(t *testing.T) {
	system := func(distances ...string) sysfsTree {
		tree := sysfsTree{}
		for node, distance := range distances {
			dir := fmt.Sprintf("devices/system/node/node%d/", node)
			tree[dir+"distance"], tree[dir+"cpulist"] = distance, fmt.Sprint(node)
			if len(distances) <= 4 {
				tree[fmt.Sprintf("devices/system/cpu/cpu%d/topology/physical_package_id", node)] =
					fmt.Sprint(node / 2)
			}
		}
		return tree
	}
	// Nodes without processors, such as memory of GPUs, may belong to any socket.
	many := slices.Repeat([]string{strings.TrimSpace(strings.Repeat("10 ", 12))}, 12)
	for name, tt := range map[string]struct {
		system sysfsTree
		want   []int
	}{
		"unknown":                 {sysfsTree{}, nil},
		"one node":                {system("10"), nil},
		"two nodes of one socket": {system("10 20", "20 10"), []int{1, 0}},
		"two nodes a socket": {system("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"),
			[]int{1, 0}},
		"another socket is as near": {system("10 20 20 20", "20 10 20 20", "20 20 10 20", "20 20 20 10"),
			[]int{1, 0}},
		"too many to publish": {system(many...), nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			host().add(tt.system).write(t, root)
			got := scanned(t, testScanner(root))
			for _, id := range []string{"0000:3b:00.0", "0000:3b:01.0"} {
				if diff := gocmp.Diff(tt.want, got[id].NUMANodes); diff != "" {
					t.Errorf("%s: -want +got\n%s", id, diff)
				}
			}
		})
	}

	root := t.TempDir()
	host().add(under("0000:3b:00.0", sysfsTree{"numa_node": "-1"})).write(t, root)
	if got := scanned(t, testScanner(root))["0000:3b:00.0"].NUMANodes; got != nil {
		t.Errorf("NUMA nodes %v of a device without one", got)
	}
}
