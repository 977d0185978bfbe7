// SPDX-License-Identifier: Apache-2.0

// Package soak runs thousands of pods on a simulated node, by claims and by the device plugin.
// Meanwhile the agent is killed and everything that it works with fails from time to time. The test
// checks that the pods leave nothing behind.
package soak

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

var (
	lives = flag.Int("lives", 300, "pods that live")
	seed  = flag.Uint64("seed", 1, "of what happens when")
)

var (
	// cluster is the API server
	cluster *kubeapitest.Cluster
	// agentProgram is the path of xpu-agent, as it is built for this test
	agentProgram string
)

func TestMain(m *testing.M) {
	os.Exit(netns.Main(func() int {
		code, err := run(m)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}))
}

func run(m *testing.M) (code int, err error) {
	if !netns.Isolated() {
		return m.Run(), nil
	}

	dir, err := os.MkdirTemp("", "soak")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)

	agentProgram = filepath.Join(dir, "xpu-agent")
	build := exec.Command("go", "build", "-tags", "grpcnotrace", "-o", agentProgram,
		"../../cmd/xpu-agent")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return 0, fmt.Errorf("build xpu-agent: %w", err)
	}
	if cluster, err = kubeapitest.Start(filepath.Join("..", "..", "deploy")); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, cluster.Stop()) }()

	return m.Run(), nil
}

const (
	// atOnce is how many pods of each kind live at a time; there are more VFs
	atOnce = 6
	// faultEvery is the average time from the end of a fault to the next fault
	faultEvery = 2 * time.Second
)

// TestSoak checks that after many lives and faults the node is as it was, and that the agent uses
// no more than before. In the first two thirds the agent is killed from time to time. In the last
// third it keeps running, so that the test can see whether it grows.
func TestSoak(test *testing.T) {
	if !netns.Isolated() {
		test.Skip("needs root, for a network namespace of its own")
	}

	t := newReporter(test)

	cluster.Need(t)
	n := newNode(t)
	before := n.hostState()
	s := &soak{node: n, random: rand.New(rand.NewPCG(*seed, 0)), count: map[string]int{},
		taken: map[function.ID]bool{}}
	n.startAgent()
	t.Cleanup(func() { s.explain() })

	must.Succeed(t, n.ready(t.Context()))
	must.Succeed(t, await(t.Context(), "all is offered", n.allOffered))

	atFirst := append(slices.Clone(faults), kill, kill, handoverKilled, clockSet)
	s.live(*lives*2/3, atFirst)
	s.live(*lives/30+2*atOnce, nil) // warms up, until everything that is kept is there
	first := s.sample()
	s.live(*lives/3, faults)
	s.lastLap()
	last := s.sample()

	must.Succeed(t, await(t.Context(), "all is offered again", n.allOffered))
	must.Succeed(t, await(t.Context(), "no claim has files", n.noFiles))
	must.Succeed(t, n.endAgent())
	kept := n.wantNothingLeft()
	after := n.hostState()
	for _, a := range kept {
		if a.Before != nil {
			delete(before, a.Before.Name)
			delete(after, a.Before.Name)
		}
	}

	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("the host's netdevs (-before +now):\n%s", diff)
	}

	s.report(first, last)
}

// soak counts lives and faults.
type soak struct {
	*node
	random *rand.Rand

	mutex  sync.Mutex
	number int // number of the last life
	taken  map[function.ID]bool
	count  map[string]int // number of faults by name
	starts []time.Duration
	ends   []time.Duration
	took   time.Duration
}

// live runs this many pods, half of them by claims and half by the device plugin, during faults.
func (s *soak) live(pods int, among []fault) {
	s.t.Helper()
	begin := time.Now()
	ctx, stop := context.WithCancel(s.t.Context())
	var striking sync.WaitGroup
	if among != nil {
		random := s.fork()
		striking.Go(func() {
			for name, n := range s.strike(ctx, random, faultEvery, among) {
				s.count[name] += n
			}
		})
	}

	var living sync.WaitGroup
	for _, by := range []struct {
		pf    pci.Address
		first int // first host part of the addresses
		live  func(*life, context.Context) error
	}{{claimPF, 1, (*life).claimed}, {pluginPF, 101, (*life).plugIn}} {
		left := make(chan struct{}, pods)
		for range pods / 2 {
			left <- struct{}{}
		}

		close(left)
		for range atOnce {
			random := s.fork()
			living.Go(func() {
				for range left {
					vf := s.take(random, by.pf)
					l := s.newLife(random, way(random), by.pf, vf, by.first+vf)
					if err := errors.Join(by.live(l, ctx), l.betray()); err != nil {
						s.t.Errorf("life %s with %s, way %d: %v", l.name, l.function, l.way, err)
						return
					}
					s.done(l)
				}
			})
		}
	}

	living.Wait()
	stop()
	striking.Wait()
	s.took += time.Since(begin)
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// lastLap runs one more pod on every VF, without faults. What a pod left that failed before it ran
// is removed with the next pod.
func (s *soak) lastLap() {
	s.t.Helper()
	kept, err := s.quarantined()
	must.Succeed(s.t, err)

	for pf, first := range map[pci.Address]int{claimPF: 1, pluginPF: 101} {
		for vf := range vfsOfPF {
			if kept[s.vfs[pf][vf]] != "" {
				continue
			}

			l := s.newLife(s.random, ordinary, pf, vf, first+vf)
			live := l.claimed
			if pf == pluginPF {
				live = l.plugIn
			}

			must.Succeed(s.t, live(s.t.Context()))
			if l.started == 0 {
				s.t.Errorf("pod %s on %s did not run although nothing was wrong",
					l.name, l.function)
			}
		}
	}
}

func (s *soak) fork() *rand.Rand {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return rand.New(rand.NewPCG(s.random.Uint64(), s.random.Uint64()))
}

func (s *soak) newLife(random *rand.Rand, way int, pf pci.Address, vf, host int) *life {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.number++
	return &life{
		node: s.node, random: random, way: way, name: fmt.Sprintf("pod-%d", s.number),
		function: s.vfs[pf][vf],
		address:  netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(host)}), 24),
	}
}

// take plays the scheduler: it takes a VF that no pod has and that is offered. If no such VF
// exists, it takes any VF that no pod has.
func (s *soak) take(random *rand.Rand, pf pci.Address) int {
	for {
		kept, _ := s.quarantined() // unknown while no agent runs
		if vf, found := s.choose(random, pf, kept); found {
			return vf
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (s *soak) choose(
	random *rand.Rand, pf pci.Address, kept map[function.ID]string,
) (vf int, found bool) {
	healthy := s.plugins.Healthy(resource)
	s.mutex.Lock()
	defer s.mutex.Unlock()

	chosen := -1
	for _, vf := range random.Perm(vfsOfPF) {
		id := s.vfs[pf][vf]
		if s.taken[id] || kept[id] != "" {
			continue
		}
		chosen = vf
		if pf == claimPF || slices.Contains(healthy, id.String()) {
			break
		}
	}

	if chosen < 0 {
		return 0, false
	}

	s.taken[s.vfs[pf][chosen]] = true
	return chosen, true
}

func (s *soak) done(l *life) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	delete(s.taken, l.function)
	if l.started > 0 {
		s.starts, s.ends = append(s.starts, l.started), append(s.ends, l.ended)
	}
}

// sample measures what the agent uses when no pod comes or goes.
func (s *soak) sample() sample {
	s.t.Helper()
	must.Succeed(s.t, await(s.t.Context(), "nothing waits for hooks", func() error {
		waiting, err := metric("xpu_hook_queue_length")
		if err == nil && waiting > 0 {
			err = fmt.Errorf("%v Functions do", waiting)
		}
		return err
	}))

	time.Sleep(3 * time.Second) // lets idle connections and timers end
	values := map[string]float64{}
	for _, name := range []string{
		"go_goroutines", "process_open_fds", heapTarget,
	} {
		value, err := metric(name)
		must.Succeed(s.t, err)
		values[name] = value
	}

	file, err := os.Stat(s.path("state/journal.db"))
	must.Succeed(s.t, err)

	return sample{
		int(values["go_goroutines"]), int(values["process_open_fds"]),
		int(values[heapTarget]), int(file.Size()),
	}
}

// heapTarget is the heap size at which the next garbage collection starts. It is twice what the last
// one found in use. Resident memory depends on when that was, and grew by 18 MB on a busy machine.
const heapTarget = "go_memstats_next_gc_bytes"

// metric returns the value of a metric of the agent without labels.
func metric(name string) (float64, error) {
	text, err := get("/metrics")
	if err != nil {
		return 0, err
	}

	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}

	return 0, fmt.Errorf("metrics have no %s", name)
}

// The agent may use this much more at the end than after a third of the lives, because caches and
// pools differ from moment to moment.
const (
	moreGoroutines  = 10
	moreDescriptors = 6
	moreHeap        = 12 << 20 // bytes
)

// mostJournal bounds the size of the journal's file in bytes at any time. bbolt doubles a file that
// is too small, so its growth is no sign of a leak; after 10 000 lives it has 256 KiB.
const mostJournal = 512 << 10

func (s *soak) report(first, last sample) {
	s.t.Helper()
	if last.goroutines > first.goroutines+moreGoroutines ||
		last.descriptors > first.descriptors+moreDescriptors ||
		last.heap > first.heap+moreHeap || last.journal > mostJournal {
		s.t.Errorf("the agent grew: %s before, %s after", first, last)
	}

	s.t.Logf("%d lives in %s, %d of them ran; the agent was started %d times", s.number,
		s.took.Round(time.Second), len(s.starts), s.node.starts)

	for _, name := range slices.Sorted(maps.Keys(s.count)) {
		s.t.Logf("%5d x %s", s.count[name], name)
	}

	s.t.Logf("from pod to container: median %s, 99 of 100 within %s", quantile(s.starts, 0.5),
		quantile(s.starts, 0.99))
	s.t.Logf("end: median %s, 99 of 100 within %s", quantile(s.ends, 0.5), quantile(s.ends, 0.99))
	s.t.Logf("before the last third: %s", first)
	s.t.Logf("after it:              %s", last)
}

func quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	slices.Sort(d)
	return d[int(float64(len(d)-1)*q)].Round(time.Millisecond)
}

// explain keeps the logs after a failure, and shows the end of the agent's log.
func (s *soak) explain() {
	if !s.t.Failed() {
		return
	}
	for _, name := range []string{"agent.log", "host.log"} {
		text, err := os.ReadFile(s.path(name))
		kept := filepath.Join(os.TempDir(), "soak-"+name)
		if err := errors.Join(err, os.WriteFile(kept, text, 0o600)); err != nil {
			s.t.Log(err)
			continue
		}

		lines := strings.Split(string(text), "\n")
		s.t.Logf("the end of %s, which is in %s:\n%s", name, kept,
			strings.Join(lines[max(0, len(lines)-60):], "\n"))
	}
}

// allOffered returns an error unless all VFs but the quarantined ones are offered without taints.
func (n *node) allOffered() error {
	kept, err := n.quarantined()
	if err != nil {
		return err
	}

	plugged := slices.DeleteFunc(slices.Clone(n.vfs[pluginPF]), func(id function.ID) bool {
		return kept[id] != ""
	})
	if healthy := n.plugins.Healthy(resource); len(healthy) != len(plugged) {
		return fmt.Errorf("healthy are %v, in quarantine %v", healthy, kept)
	}

	var list resourceapi.ResourceSliceList
	if err := n.admin.List(n.t.Context(), &list); err != nil {
		return err
	}

	devices := 0
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			devices++
			quarantined := slices.ContainsFunc(n.vfs[claimPF], func(id function.ID) bool {
				return id.DeviceName() == d.Name && kept[id] != ""
			})
			if quarantined != (len(d.Taints) > 0) {
				return fmt.Errorf("%s has taints %v", d.Name, d.Taints)
			}
		}
	}

	if devices != vfsOfPF {
		return fmt.Errorf("slices have %d devices", devices)
	}

	return nil
}

// noFiles returns an error if claims still have files. The agent removes files that the kubelet's
// library left within a minute.
func (n *node) noFiles() error {
	files, err := filepath.Glob(n.path("cdi/*"))
	if err == nil && len(files) > 0 {
		err = fmt.Errorf("there are %q", files)
	}
	return err
}

// hostState returns every netdev of the host as the engine sees it, by name.
func (n *node) hostState() map[string]netdev.Snapshot {
	n.t.Helper()
	links, err := netns.Listed(netlink.LinkList)
	must.Succeed(n.t, err)
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(n.t, err)
	defer engine.Close()

	state := map[string]netdev.Snapshot{}
	for _, l := range links {
		s, err := engine.Snapshot(n.t.Context(), netdev.Device{Name: l.Attrs().Name})
		must.Succeed(n.t, err)
		// A veth that was made again has other numbers.
		s.Identity.Index, s.Identity.Peer, s.Identity.PeerNS = 0, 0, 0
		state[s.Name] = s
	}

	return state
}

// wantNothingLeft checks, while no agent runs, that pods left nothing but Functions in quarantine,
// which it returns.
func (n *node) wantNothingLeft() (kept []journal.Attachment) {
	n.t.Helper()
	j, err := journal.Open(n.path("state/journal.db"))
	must.Succeed(n.t, err)
	defer j.Close()

	for _, a := range j.All() {
		if q := a.Quarantine; q != nil {
			n.t.Logf("Function %s is in quarantine: %s: %s", a.Function, q.Reason, q.Message)
			kept = append(kept, a)
			continue
		}
		n.t.Errorf("the journal still has %+v", a)
	}

	for _, pattern := range []string{
		"devinfo/cni/*", "spool/*.json", "cdi/*", "kubelet/plugins/*/dra-device-metadata/*", "ns-*",
	} {
		files, err := filepath.Glob(n.path(pattern))
		must.Succeed(n.t, err)
		for _, file := range files {
			n.t.Errorf("%s is left behind", file)
		}
	}

	// Files of the device plugin stay ten minutes.
	if files, err := filepath.Glob(n.path("devinfo/dp/*")); err != nil || len(files) > vfsOfPF {
		n.t.Errorf("device-info files %q, %v", files, err)
	}

	var ports v1alpha1.XPUPortList
	must.Succeed(n.t, n.admin.List(n.t.Context(), &ports))

	for _, p := range ports.Items {
		n.t.Errorf("XPUPort %s/%s is left behind", p.Namespace, p.Name)
	}

	if ports := n.opi.Ports(); len(ports) > 0 {
		n.t.Errorf("the OPI agent still has ports %v", ports)
	}

	return kept
}
