// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"
	gocmp "github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
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

// answered returns a scanner, and a function that scans until all cards have answered once.
func answered(t *testing.T, root string) (*scanner, func() map[string]function.Function) {
	t.Helper()
	s := testScanner(root)
	answers := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	s.cards.follow(ctx, func() { answers <- struct{}{} })

	asked := 0
	return s, func() map[string]function.Function {
		for {
			byID := scanned(t, s)
			if len(s.cards.known) <= asked {
				return byID
			}
			for ; asked < len(s.cards.known); asked++ {
				<-answers
			}
		}
	}
}

// TestDataDirect checks that each ConnectX-8 of a GB300 has the root of its own Data Direct
// function, which has the same keyword V3 in its Vital Product Data.
func TestDataDirect(t *testing.T) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(1), Log: testr.New(t)})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, host.Close()) }()
	s, scan := answered(t, host.SysRoot())

	want := map[string][]string{}
	for segment, direct := range map[string]string{
		"0000": "pci0008:00", "0002": "pci0009:00", "0010": "pci0018:00", "0012": "pci0019:00",
	} {
		want[segment+":03:00.0"], want[segment+":03:01.0"] = []string{direct}, []string{direct}
	}
	check := func(when string) {
		t.Helper()
		got := map[string][]string{}
		for id, f := range scan() {
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

			s, scan := answered(t, host.SysRoot())
			for range 2 {
				if got := scan()["0000:03:00.0"].DataDirectRoots; got != nil {
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
		tree := sysfsTree{
			"devices/system/node/online": fmt.Sprintf("0-%d", len(distances)-1),
		}
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
		// The kernel leaves out the columns of nodes that are offline.
		"nodes between them are offline": {system("10 20 12", "12 20 10", "20 10 20", "").add(sysfsTree{
			"devices/system/node/online": "1,3,6", "devices/system/node/node1/distance": "10 20 12",
			"devices/system/node/node6/cpulist": "",
		}), []int{1, 6}},
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

// TestNUMANodesChange checks that each scan reads the NUMA nodes, which may appear, and reports what
// it cannot read.
func TestNUMANodesChange(t *testing.T) {
	root, s := t.TempDir(), (*scanner)(nil)
	host().write(t, root)
	s = testScanner(root)
	for _, step := range []struct {
		name string
		add  sysfsTree
		want []int
		why  bool
	}{
		{"no nodes", sysfsTree{}, nil, false},
		{"one node", sysfsTree{
			"devices/system/node/online": "1", "devices/system/node/node1/distance": "10",
		}, nil, false},
		{"memory of a GPU", sysfsTree{
			"devices/system/node/online": "1-2", "devices/system/node/node1/distance": "10 40",
		}, []int{1, 2}, false},
		{"no numbers", sysfsTree{"devices/system/node/node1/distance": "10 x"}, nil, true},
		{"a column too few", sysfsTree{"devices/system/node/node1/distance": "10"}, nil, true},
		{"an unreadable file of a processor", sysfsTree{
			"devices/system/node/node1/distance": "10 40", "devices/system/node/node1/cpulist/": "",
		}, nil, true},
		{"and all is well", sysfsTree{"devices/system/node/node1/cpulist": ""}, []int{1, 2}, false},
	} {
		step.add.write(t, root)
		got := scanned(t, s)["0000:3b:00.0"].NUMANodes
		why := s.problems[problem{"devices/system/node/node1", reasonDistance}]
		if diff := gocmp.Diff(step.want, got); diff != "" || (why != nil) != step.why ||
			s.unread() != step.why {
			t.Errorf("%s: problems %v; -want +got\n%s", step.name, s.problems, diff)
		}
	}
}

// TestSlowCard checks that a scan does not wait for a card that hangs, that the answer is awaited for
// a time only, and that a card is asked again after it failed to answer.
func TestSlowCard(t *testing.T) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(0)[:1], Log: testr.New(t)})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, host.Close()) }()

	const slow = "0008:03:00.0"
	s := testScanner(host.SysRoot())
	answers, changed := make(chan error), make(chan struct{}, 10)
	s.cards.pause, s.cards.changed = time.Millisecond, func() { changed <- struct{}{} }
	s.readCard = func(device sysfs.Dir) (string, error) {
		if filepath.Base(string(device)) != slow {
			return readCard(device)
		}
		if err := <-answers; err != nil {
			return "", err
		}
		return readCard(device)
	}

	pf := func() function.Function { return scanned(t, s)["0000:03:00.0"] }
	if f := pf(); f.Vendor != nvidia || f.DataDirectRoots != nil || !f.DataDirectAwaited ||
		len(s.problems) > 0 {
		t.Errorf("while the card hangs: %+v, problems %v", f, s.problems)
	}

	failed := errors.New("no answer")
	answers <- failed
	vpd := problem{"bus/pci/devices/" + slow, reasonVPD}
	must.Eventually(t, "the error is reported, and an answer is awaited", func() bool {
		f := pf()
		return f.DataDirectRoots == nil && f.DataDirectAwaited && errors.Is(s.problems[vpd], failed)
	})
	s.cards.giveUp(s.cards.known[slow])
	must.Eventually(t, "the answer is not awaited any more", func() bool {
		f := pf()
		return f.DataDirectRoots == nil && !f.DataDirectAwaited
	})

	answers <- nil
	must.Eventually(t, "the NIC has the other root", func() bool {
		f := pf()
		return slices.Equal(f.DataDirectRoots, []string{"pci0008:00"}) && !f.DataDirectAwaited &&
			len(s.problems) == 0
	})
}

// TestCardPatience checks that a scan follows when a card has had its time to answer.
func TestCardPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const device = "0008:03:00.0"
		c := newAnswers(0)
		var changed atomic.Int32
		hangs := make(chan struct{})
		read := func() (string, error) { <-hangs; return "card", nil }
		c.changed, c.patience = func() { changed.Add(1) }, cardPatience
		_, err := c.of(device, question{}, read)
		must.Succeed(t, err)
		time.Sleep(cardPatience - time.Nanosecond)
		synctest.Wait()
		if !c.awaited(device) || changed.Load() > 0 {
			t.Errorf("awaited %t, changed %d times", c.awaited(device), changed.Load())
		}

		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if c.awaited(device) || changed.Load() != 1 {
			t.Errorf("awaited %t, changed %d times after %s", c.awaited(device), changed.Load(),
				cardPatience)
		}

		close(hangs)
		synctest.Wait()
		if id, err := c.of(device, question{}, read); id != "card" || err != nil ||
			changed.Load() != 2 {
			t.Errorf("card %q, %v, changed %d times after the answer", id, err, changed.Load())
		}
	})
}

// TestWaitForCards checks that the first scan of a program that scans once has the roots.
func TestWaitForCards(t *testing.T) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(0)[:1], Log: testr.New(t)})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, host.Close()) }()
	s := newScanner(Options{SysRoot: host.SysRoot(), WaitForCards: true,
		HostNetdevs: func() (hostuse.Netdevs, error) { return nil, nil }})
	if roots := scanned(t, s)["0000:03:00.0"].DataDirectRoots; len(roots) != 1 {
		t.Errorf("roots %v", roots)
	}
}

// TestUnreadHardware checks that a device is read again at the next scan after one of its files
// could not be read.
func TestUnreadHardware(t *testing.T) {
	host, err := simulate.New(t.Context(),
		simulate.Config{Root: t.TempDir(), Cards: simulate.GB300(0)[:1], Log: testr.New(t)})
	must.Succeed(t, err)
	defer func() { must.Succeed(t, host.Close()) }()
	s := testScanner(host.SysRoot())

	const direct = "0008:03:00.0"
	for _, name := range []string{"vendor", "device"} {
		path := filepath.Join(onBusOf(host.SysRoot(), direct), name)
		good, err := os.ReadFile(path)
		must.Succeed(t, err)
		must.Succeed(t, os.WriteFile(path, nil, 0o600))
		s.known = nil
		if roots := scanned(t, s)["0000:03:00.0"].DataDirectRoots; roots != nil || !s.unread() ||
			s.problems[problem{"bus/pci/devices/" + direct, reasonID}] == nil {
			t.Errorf("without %s: roots %v, problems %v", name, roots, s.problems)
		}

		must.Succeed(t, os.WriteFile(path, good, 0o600))
		must.Eventually(t, "with "+name+" again the NIC has the other root", func() bool {
			return scanned(t, s)["0000:03:00.0"].DataDirectRoots != nil && !s.unread()
		})
	}
}
