package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// node is a node's Functions, and the cluster's declarations, which it also writes.
type node struct {
	mutex       sync.Mutex
	functions   []function.Function
	devicePools []v1alpha1.DevicePool
	labels      map[string]string
	labelsErr   error
	writeErrs   map[string]error
	writes      []string
}

func (n *node) set(change func()) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	change()
}

func (n *node) Snapshot() []function.Function {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return slices.Clone(n.functions)
}

func (n *node) Get(id function.ID) (function.Function, bool) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	i := slices.IndexFunc(n.functions, func(f function.Function) bool { return f.ID == id })
	if i < 0 {
		return function.Function{}, false
	}
	return n.functions[i], true
}

func (n *node) DevicePools(context.Context) ([]v1alpha1.DevicePool, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	var out []v1alpha1.DevicePool
	for _, p := range n.devicePools {
		out = append(out, *p.DeepCopy())
	}
	return out, nil
}

func (n *node) NodeLabels(context.Context) (map[string]string, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.labels, n.labelsErr
}

func (n *node) WriteNodeStatus(_ context.Context, devicePool string, entry *v1alpha1.DevicePoolNodeStatus) error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.writes = append(n.writes, devicePool)
	if err := n.writeErrs[devicePool]; err != nil {
		return err
	}
	i := slices.IndexFunc(n.devicePools, func(p v1alpha1.DevicePool) bool { return p.Name == devicePool })
	nodes := slices.DeleteFunc(n.devicePools[i].Status.Nodes, func(s v1alpha1.DevicePoolNodeStatus) bool { return s.Name == "node1" })
	if entry != nil {
		nodes = append(nodes, *entry)
	}
	n.devicePools[i].Status.Nodes = nodes
	return nil
}

// takeWrites returns the DevicePools that were written since it was last called.
func (n *node) takeWrites() []string {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	writes := n.writes
	n.writes = nil
	return writes
}

// TestTrackerKeepsErrors: DevicePools that cannot be used, read again, are no change.
func TestTrackerKeepsErrors(t *testing.T) {
	resource := devicePool("prefix", v1alpha1.FunctionSelector{Drivers: []string{"mlx5_core"}})
	resource.Spec.Publish = v1alpha1.PublishDevicePlugin
	resource.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{ResourcePrefix: "kubernetes.io"}
	n := &node{functions: card(), devicePools: []v1alpha1.DevicePool{
		devicePool("address", v1alpha1.FunctionSelector{PCIAddresses: []string{"3b:00.x"}}),
		devicePool("index", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#x"}}),
		resource,
	}}
	tracker := NewTracker(n, n, nil, testr.New(t))
	for i, want := range []bool{true, false} {
		different, err := tracker.read(t.Context())
		if err != nil || different != want {
			t.Errorf("read %d = %t, %v, want %t", i, different, err, want)
		}
	}
	pools, _ := tracker.Pools()
	for _, p := range pools {
		if p.Err == nil {
			t.Errorf("DevicePool %s has no error", p.Name)
		}
	}
}

func TestTracker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{functions: card(), labelsErr: errors.New("node node1: not found")}
		tracker := NewTracker(n, n, nil, testr.New(t))
		changes, changed := make(chan struct{}), 0
		look := func(what string, wantChanged int) []Pool {
			t.Helper()
			synctest.Wait()
			if changed != wantChanged {
				t.Errorf("%s: changed was called %d times, want %d", what, changed, wantChanged)
			}
			pools, _ := tracker.Pools()
			return pools
		}
		if _, known := tracker.Pools(); known {
			t.Error("the pools are known before they were read")
		}
		go tracker.Run(t.Context(), changes, func() { changed++ })

		look("the node cannot be read", 0)
		if _, known := tracker.Pools(); known {
			t.Error("the pools are known although the node could not be read")
		}
		n.set(func() { n.labelsErr = nil })
		changes <- struct{}{}
		look("no DevicePools: known now", 1)
		if _, known := tracker.Pools(); !known {
			t.Error("the pools are not known after they were read")
		}

		fast := devicePool("fast", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0-1"}})
		fast.Spec.Network = "lab"
		n.set(func() { n.devicePools = []v1alpha1.DevicePool{fast} })
		changes <- struct{}{}
		if pools := look("a DevicePool came", 2); len(pools) != 1 || names(pools[0].Functions) != "0 1" {
			t.Errorf("pools are %+v, want fast with VFs 0 and 1", pools)
		}
		if spec, ok := tracker.DevicePool("fast"); !ok || spec.Network != "lab" {
			t.Errorf("DevicePool(fast) = %+v, %t", spec, ok)
		}
		if spec, ok := tracker.DevicePool("slow"); ok {
			t.Errorf("DevicePool(slow) = %+v, want none", spec)
		}

		n.set(func() { n.devicePools[0].Status.Functions = 2 })
		changes <- struct{}{}
		look("only its status changed", 2)

		n.set(func() { n.labelsErr = errors.New("node node1: not found") })
		changes <- struct{}{}
		if pools := look("the node cannot be read", 2); len(pools) != 1 {
			t.Errorf("pools are %+v, want those that were known", pools)
		}

		n.set(func() {
			n.labelsErr = nil
			n.functions = slices.DeleteFunc(n.functions, func(f function.Function) bool { return f.Index == 1 })
		})
		changes <- struct{}{}
		if pools := look("a Function went", 3); names(pools[0].Functions) != "0" {
			t.Errorf("pools are %+v, want fast with VF 0", pools)
		}
	})
}

func TestReporter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := devicePool("fast", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0-1"}})
		fast.Status.Nodes = []v1alpha1.DevicePoolNodeStatus{{Name: "node0", Functions: 7}}
		empty := devicePool("empty", v1alpha1.FunctionSelector{PFNames: []string{"ens9"}})
		wide := devicePool("wide", v1alpha1.FunctionSelector{Devices: []string{"101e"}})
		n := &node{functions: card(), devicePools: []v1alpha1.DevicePool{fast, empty, wide}, writeErrs: map[string]error{}}
		tracker := NewTracker(n, n, nil, logr.Discard())
		trackerChanges, reporterChanges := make(chan struct{}, 1), make(chan struct{}, 1)
		declared := make(chan struct{}, 1)
		reporter := &Reporter{Node: "node1", Tracker: tracker, API: n, Log: testr.New(t)}
		go reporter.Run(t.Context(), reporterChanges, declared)
		synctest.Wait()
		if writes := n.takeWrites(); writes != nil {
			t.Errorf("%q were written before the pools were known", writes)
		}
		go tracker.Run(t.Context(), trackerChanges, func() { reporterChanges <- struct{}{} })
		synctest.Wait()
		if diff := cmp.Diff([]string{"fast", "wide"}, n.takeWrites()); diff != "" {
			t.Errorf("first writes: -want +got\n%s", diff)
		}
		want := map[string][]v1alpha1.DevicePoolNodeStatus{
			"fast": {{Name: "node0", Functions: 7}, {Name: "node1", Functions: 2}},
			"wide": {{Name: "node1", Functions: 6, Overlapping: []string{"0000:3b:00.2 in fast", "0000:3b:00.3 in fast"}}},
		}
		for _, p := range n.devicePools {
			if diff := cmp.Diff(want[p.Name], p.Status.Nodes); diff != "" {
				t.Errorf("status of %s: -want +got\n%s", p.Name, diff)
			}
		}

		reporterChanges <- struct{}{}
		synctest.Wait()
		if writes := n.takeWrites(); writes != nil {
			t.Errorf("%q were written although nothing changed", writes)
		}

		// Another spec is a change for itself.
		n.set(func() { n.devicePools[0].Generation, want["fast"][1].ObservedGeneration = 2, 2 })
		trackerChanges <- struct{}{}
		synctest.Wait()
		if diff := cmp.Diff([]string{"fast"}, n.takeWrites()); diff != "" {
			t.Errorf("writes after the spec changed: -want +got\n%s", diff)
		}
		if diff := cmp.Diff(want["fast"], n.devicePools[0].Status.Nodes); diff != "" {
			t.Errorf("status of fast: -want +got\n%s", diff)
		}

		// The controller takes entries away while there is no Node, and they come back with the Node.
		n.set(func() {
			n.labelsErr = apierrors.NewNotFound(schema.GroupResource{}, "node1")
			n.devicePools[0].Status.Nodes = n.devicePools[0].Status.Nodes[:1]
		})
		declared <- struct{}{}
		synctest.Wait()
		if writes := n.takeWrites(); writes != nil {
			t.Errorf("%q were written while there is no Node", writes)
		}
		n.set(func() { n.labelsErr = nil })
		declared <- struct{}{}
		synctest.Wait()
		if diff := cmp.Diff([]string{"fast"}, n.takeWrites()); diff != "" {
			t.Errorf("writes after the Node is back: -want +got\n%s", diff)
		}

		// The last Function goes, and with it the entries; a write that fails is made again and does not keep the
		// others from being made.
		n.set(func() { n.functions, n.writeErrs["fast"] = nil, errors.New("the API server is away") })
		trackerChanges <- struct{}{}
		synctest.Wait()
		if diff := cmp.Diff([]string{"fast", "wide"}, n.takeWrites()); diff != "" {
			t.Errorf("writes after the Functions went: -want +got\n%s", diff)
		}
		n.set(func() { delete(n.writeErrs, "fast") })
		waitFor(retry)
		if diff := cmp.Diff([]string{"fast"}, n.takeWrites()); diff != "" {
			t.Errorf("writes after the retry: -want +got\n%s", diff)
		}
		if diff := cmp.Diff([]v1alpha1.DevicePoolNodeStatus{{Name: "node0", Functions: 7}}, n.devicePools[0].Status.Nodes); diff != "" {
			t.Errorf("status of fast: -want +got\n%s", diff)
		}

		// A DevicePool that goes between the look and the write is no error.
		n.set(func() {
			n.functions = card()
			n.writeErrs["fast"] = apierrors.NewNotFound(schema.GroupResource{}, "fast")
		})
		trackerChanges <- struct{}{}
		synctest.Wait()
		n.takeWrites()
		waitFor(2 * retry)
		if writes := n.takeWrites(); writes != nil {
			t.Errorf("%q were written again although the DevicePool is gone", writes)
		}
	})
}

func TestReporterListsAFewOverlaps(t *testing.T) {
	var overlaps []string
	for range maxListed + 5 {
		overlaps = append(overlaps, "0000:3b:00.2 in fast")
	}
	entry := (&Reporter{Node: "node1"}).entry(Pool{Name: "wide", Overlaps: overlaps}, Supply{})
	if entry == nil || entry.Functions != 0 || len(entry.Overlapping) != maxListed {
		t.Errorf("entry = %+v, want %d overlaps", entry, maxListed)
	}
}

func TestReporterTellsOfProblems(t *testing.T) {
	entry := (&Reporter{Node: "node1"}).entry(
		Pool{Name: "wide", Err: errors.New("resource a.example/b is that of DevicePool fast")}, Supply{})
	if entry == nil || entry.Problem != "resource a.example/b is that of DevicePool fast" {
		t.Errorf("entry = %+v, want the problem", entry)
	}
}

// waitFor lets the bubble's clock run.
func waitFor(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestPoolOf: every Function of a pool is found, and no other.
func TestPoolOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := devicePool("fast", v1alpha1.FunctionSelector{PFNames: []string{"ens3f0#0-1"}})
		n := &node{functions: card(), devicePools: []v1alpha1.DevicePool{fast}}
		tracker := NewTracker(n, n, nil, testr.New(t))
		if p, ok := tracker.PoolOf(n.functions[1].ID); ok {
			t.Errorf("%s is in pool %s before the pools were read", n.functions[1].ID, p.Name)
		}
		go tracker.Run(t.Context(), nil, func() {})
		synctest.Wait()
		pools, _ := tracker.Pools()
		if len(pools) != 1 || len(pools[0].Functions) == 0 {
			t.Fatalf("pools are %+v", pools)
		}
		in := map[function.ID]bool{}
		for _, f := range pools[0].Functions {
			in[f.ID] = true
		}
		for _, f := range n.functions {
			if p, ok := tracker.PoolOf(f.ID); ok != in[f.ID] || ok && p.Name != "fast" {
				t.Errorf("%s: pool %q, %v; want %v", f.ID, p.Name, ok, in[f.ID])
			}
		}
	})
}

// TestConsidered: a Function that came after the pools were read was not looked at, whether it belongs to one or not.
func TestConsidered(t *testing.T) {
	all := card()
	n := &node{functions: all[:len(all)-1], devicePools: []v1alpha1.DevicePool{
		devicePool("fast", v1alpha1.FunctionSelector{Drivers: []string{"mlx5_core"}}),
	}}
	tracker := NewTracker(n, n, nil, testr.New(t))
	late := all[len(all)-1].ID
	if tracker.Considered(all[0].ID) {
		t.Error("a Function was looked at before the pools were read")
	}
	read := func() {
		t.Helper()
		if _, err := tracker.read(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	read()
	for _, f := range n.functions {
		if !tracker.Considered(f.ID) {
			t.Errorf("Function %s was not looked at", f.ID)
		}
	}
	n.set(func() { n.functions = all })
	if tracker.Considered(late) {
		t.Errorf("Function %s was looked at before it came", late)
	}
	read()
	if !tracker.Considered(late) {
		t.Errorf("Function %s was not looked at", late)
	}
}
