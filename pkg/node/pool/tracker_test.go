// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/testr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// node has a node's Functions and the cluster's declarations, which it also writes.
type node struct {
	mutex       sync.Mutex
	functions   []function.Function
	devicePools []v1alpha1.DevicePool
	labels      map[string]string
	labelsErr   error
	status      *v1alpha1.XPUNodeStatus // nil if there is no XPUNode
	writeErr    error
	writes      int
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

func (n *node) XPUNode(context.Context) (*v1alpha1.XPUNodeStatus, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.status.DeepCopy(), nil
}

func (n *node) WriteXPUNode(_ context.Context, status v1alpha1.XPUNodeStatus) error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.writes++
	if n.writeErr == nil {
		n.status = &status
	}
	return n.writeErr
}

// pools returns the entries of the XPUNode.
func (n *node) pools() []v1alpha1.XPUNodePool {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.status == nil {
		return nil
	}
	return n.status.Pools
}

// takeWrites returns how often the XPUNode was written since the last call.
func (n *node) takeWrites() int {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	writes := n.writes
	n.writes = 0
	return writes
}

// TestTrackerKeepsErrors: it is no change if invalid DevicePools are read again.
func TestTrackerKeepsErrors(t *testing.T) {
	resource := devicePool("prefix", v1alpha1.FunctionSelector{Drivers: []string{"mlx5_core"}})
	resource.Spec.Publish = v1alpha1.PublishDevicePlugin
	resource.Spec.DevicePlugin = &v1alpha1.DevicePluginSpec{ResourcePrefix: "kubernetes.io"}
	n := &node{functions: oneCard(), devicePools: []v1alpha1.DevicePool{
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
		n := &node{functions: oneCard(), labelsErr: errors.New("node node1: not found")}
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
		if pools := look("a DevicePool came", 2); len(pools) != 1 ||
			names(pools[0].Functions) != "0 1" {
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
			n.functions = slices.DeleteFunc(n.functions, func(f function.Function) bool {
				return f.Index == 1
			})
		})

		changes <- struct{}{}
		if pools := look("a Function went", 3); names(pools[0].Functions) != "0" {
			t.Errorf("pools are %+v, want fast with VF 0", pools)
		}
	})
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
		n := &node{functions: oneCard(), devicePools: []v1alpha1.DevicePool{fast}}
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

// TestConsidered: a Function that appeared after the pools were read is not considered yet, whether
// it belongs to a pool or not.
func TestConsidered(t *testing.T) {
	all := oneCard()
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
