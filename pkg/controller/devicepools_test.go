// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// reports has the agents of nodes say this about a pool; those of other nodes say nothing any more.
func (c *cluster) reports(pool string, entries map[string]v1alpha1.XPUNodePool) {
	c.Helper()
	for _, name := range []string{"n1", "n2", "n3"} {
		entry, has := entries[name]
		node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: name + "-" + c.namespace}}
		if err := c.get(node); client.IgnoreNotFound(err) != nil {
			c.Fatal(err)
		} else if err == nil && !has {
			c.delete(node)
			continue
		}

		entry.Name = pool
		node.Status.Pools = []v1alpha1.XPUNodePool{entry}
		switch {
		case !has:
		case node.UID == "":
			c.create(node)
		default:
			if err := c.Update(context.Background(), node); err != nil {
				c.Fatal(err)
			}
		}
	}
}

// healthy is an entry of a pool whose Functions are all well.
func healthy(functions int32) v1alpha1.XPUNodePool {
	return v1alpha1.XPUNodePool{Functions: functions, Healthy: functions}
}

func TestDevicePools(t *testing.T) {
	c := newCluster(t, quickPools)
	pool := c.pool("fast", "")
	n1, n2 := "node n1-"+c.namespace, "node n2-"+c.namespace

	reason := func(reason, text string, functions, healthy, nodes int32) {
		t.Helper()
		c.eventually("DevicePool is "+reason, func() error {
			if err := c.get(pool); err != nil {
				return err
			}
			if s := pool.Status; s.Functions != functions || s.Healthy != healthy ||
				s.NodeCount != nodes {
				return fmt.Errorf("status %+v", s)
			}
			return hasReason(pool.Status.Conditions, v1alpha1.ConditionReady, reason, text)
		})
	}

	type nodes = map[string]v1alpha1.XPUNodePool
	reason(v1alpha1.ReasonNoFunctions, "no agent has reported a PF", 0, 0, 0)
	c.reports("fast", nodes{"n1": healthy(8), "n2": healthy(4), "n3": {}})
	reason(v1alpha1.ReasonPublished, "12 Functions on 2 nodes", 12, 12, 2)
	c.reports("fast",
		nodes{"n1": healthy(8), "n2": {Error: "resource a.example/b belongs to DevicePool first"}})
	reason(v1alpha1.ReasonInvalidConfig, n2+": resource a.example/b belongs to DevicePool first",
		8, 8, 1)

	// A pool that works is Ready also where another has some of the Functions that it selects, or
	// some do not work.
	overlapping := v1alpha1.XPUNodePool{
		Functions: 8, Healthy: 8, Overlapping: []string{"0000:3b:02.0 in other"},
	}
	c.reports("fast", nodes{"n1": overlapping})
	reason(v1alpha1.ReasonPublished, "0000:3b:02.0 in other on "+n1, 8, 8, 1)
	c.reports("fast", nodes{"n1": {Overlapping: []string{"0000:3b:02.0 in other"}}})
	reason(v1alpha1.ReasonOverlap, "0000:3b:02.0 in other on "+n1, 0, 0, 0)
	down := []v1alpha1.FunctionProblem{
		{Taint: v1alpha1.TaintLinkDown, Functions: 8, Message: "PF ens1f0 has no link"},
	}
	c.reports("fast", nodes{"n1": {Functions: 16, Healthy: 8, Problems: down}})
	reason(v1alpha1.ReasonPublished, "of which 8 cannot be used now: "+n1+
		": 8 Functions: PF ens1f0 has no link", 16, 8, 1)
	c.reports("fast", nodes{"n1": {Functions: 8, Problems: down}})
	reason(v1alpha1.ReasonUnhealthy, "PF ens1f0 has no link", 8, 0, 1)

	// The network of a pool must exist.
	c.reports("fast", nodes{"n1": healthy(8)})
	c.change(pool, func() { pool.Spec.Network = "blue" })
	reason(v1alpha1.ReasonNetworkNotFound, "XPUNetwork blue does not exist", 8, 8, 1)
	network := c.network("blue", 100)
	reason(v1alpha1.ReasonPublished, "8 Functions", 8, 8, 1)
	c.delete(network)
	reason(v1alpha1.ReasonNetworkNotFound, "XPUNetwork blue does not exist", 8, 8, 1)
	c.change(pool, func() { pool.Spec.Network = "" })

	// It says no more than what the agents saw: kubectl wait compares the generations.
	c.reports("fast", nodes{
		"n1": {ObservedGeneration: 2, Functions: 8, Healthy: 8},
		"n2": {ObservedGeneration: 1, Functions: 8, Healthy: 8},
	})

	reason(v1alpha1.ReasonPublished, "16 Functions", 16, 16, 2)
	if ready := meta.FindStatusCondition(pool.Status.Conditions,
		v1alpha1.ConditionReady); ready.ObservedGeneration != 1 {
		t.Errorf("Ready is about generation %d, want 1, which is all that the agent of n2 saw",
			ready.ObservedGeneration)
	}

	// What nobody saw go.
	c.stop()
	c.reports("fast", nodes{"n2": healthy(4)})
	c.start(quickPools)
	reason(v1alpha1.ReasonPublished, "4 Functions on 1 nodes", 4, 4, 1)
	c.reports("fast", nil)
	reason(v1alpha1.ReasonNoFunctions, "", 0, 0, 0)
}

func quickPools(o *Options) { o.PoolPause = 50 * time.Millisecond }

// TestManyNodesStart: a thousand XPUNodes that come at once cost a pool as many writes as fit into
// the time.
func TestManyNodesStart(t *testing.T) {
	c := newCluster(t, func(o *Options) { o.PoolPause = time.Second })
	pool := c.pool("fast", "")
	c.writesSettle()
	c.writes.reset()
	begin := time.Now()
	const nodes = 300
	for i := range nodes {
		c.create(&v1alpha1.XPUNode{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d-%s", i, c.namespace)},
			Status: v1alpha1.XPUNodeStatus{
				Pools: []v1alpha1.XPUNodePool{{Name: "fast", Functions: 2, Healthy: 2}},
			},
		})
	}

	c.eventually("all are counted", func() error {
		if err := c.get(pool); err != nil || pool.Status.Functions != 2*nodes {
			return fmt.Errorf("%d Functions, %w", pool.Status.Functions, err)
		}
		return nil
	})

	atMost := int(time.Since(begin)/time.Second) + 1
	if n := len(c.writes.of("DevicePool")); n > atMost {
		t.Errorf("%d writes in %s, want at most %d", n, time.Since(begin), atMost)
	}
}

// TestDevicePoolSupplied: what nodes' agents lack for numVFs is told in a condition of its own.
func TestDevicePoolSupplied(t *testing.T) {
	c := newCluster(t, quickPools)
	pool := c.pool("made", "")
	change := func(change func(), write func(client.Patch) error) {
		t.Helper()
		before := pool.DeepCopy()
		change()
		if err := write(client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}

	n := func(name string) string { return name + "-" + c.namespace }
	type nodes = map[string]v1alpha1.XPUNodePool

	report := func(nodes nodes) {
		t.Helper()
		for name, entry := range nodes {
			entry.ObservedGeneration = cmp.Or(entry.ObservedGeneration, pool.Generation)
			nodes[name] = entry
		}
		c.reports("made", nodes)
	}

	want := func(n *int32) {
		t.Helper()
		change(func() { pool.Spec.NumVFs = n }, func(p client.Patch) error {
			return c.Patch(t.Context(), pool, p)
		})
	}

	reason := func(reason, text string) {
		t.Helper()
		c.eventually("DevicePool is "+reason, func() error {
			if err := c.get(pool); err != nil {
				return err
			}
			return hasReason(pool.Status.Conditions, v1alpha1.ConditionSupplied, reason, text)
		})
	}

	short := func(pf, reason string) v1alpha1.Shortage {
		return v1alpha1.Shortage{PF: pf, Reason: reason, Message: "PF " + pf + " " + reason}
	}

	change(func() {
		pool.Spec.Selectors = []v1alpha1.FunctionSelector{{PFNames: []string{"ens1f0"}}}
	},
		func(p client.Patch) error { return c.Patch(t.Context(), pool, p) })

	want(ptr.To[int32](4))
	reason(v1alpha1.ReasonNoPF, "pfNames")
	report(nodes{
		"n1": {Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonMaking)}},
	})
	reason(v1alpha1.ReasonMaking, "node "+n("n1")+": PF 0000:3b:00.0")

	report(nodes{
		"n1": {Shortages: []v1alpha1.Shortage{
			short("0000:3b:00.0", v1alpha1.ReasonMaking),
			short("0000:3b:00.1", v1alpha1.ReasonInUse),
		}},
		"n2": {Functions: 4},
		"n3": {Shortages: []v1alpha1.Shortage{
			short("0000:3b:00.0", v1alpha1.ReasonBusy), short("0000:3b:00.1", v1alpha1.ReasonBusy),
		}},
	})

	reason(v1alpha1.ReasonInUse, "node "+n("n3")+": PF 0000:3b:00.0 Busy; and 1 more")
	report(nodes{"n1": {Error: "resource a.example/b belongs to DevicePool first"}})
	reason(v1alpha1.ReasonInvalidConfig, "Ready")
	report(nodes{"n1": {Functions: 4}})
	reason(v1alpha1.ReasonAllMade, "every PF")

	// What is said of an older spec does not count, for good or ill.
	old := pool.Generation
	want(ptr.To[int32](6))
	reason(v1alpha1.ReasonMaking,
		fmt.Sprintf("generation %d of the spec has not been seen to yet on nodes %s:",
			old+1, n("n1")))

	report(nodes{
		"n1": {ObservedGeneration: old, Error: "x"},
		"n2": {ObservedGeneration: old,
			Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonBusy)}},
		"n3": {Functions: 6},
	})

	reason(v1alpha1.ReasonMaking, "on nodes "+n("n1")+", "+n("n2")+":")
	report(nodes{
		"n1": {ObservedGeneration: old},
		"n3": {Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonInUse)}},
	})

	reason(v1alpha1.ReasonInUse, "node "+n("n3")+": PF 0000:3b:00.0 InUse; generation")
	report(nodes{"n1": {Functions: 6}})
	reason(v1alpha1.ReasonAllMade, "every PF")
	want(nil)

	c.eventually("DevicePool without numVFs has no condition Supplied", func() error {
		if err := c.get(pool); err != nil {
			return err
		}
		if meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionSupplied) != nil {
			return errors.New("it has")
		}
		return nil
	})
}

// TestNumbersOfStatus: the numbers of a status are there when nothing is counted yet, so that kubectl
// prints 0.
func TestNumbersOfStatus(t *testing.T) {
	c := newCluster(t, quickPools)
	pool, network := c.pool("fast", ""), c.network("blue", 100)
	for o, fields := range map[client.Object][]string{
		pool: {"functions", "healthy"}, network: {"xpus", "readyXPUs"},
	} {
		kind, err := c.GroupVersionKindFor(o)
		must.Succeed(t, err)
		stored := &unstructured.Unstructured{}
		stored.SetGroupVersionKind(kind)
		stored.SetName(o.GetName())
		c.eventually(kind.Kind+" has a status with numbers", func() error {
			if err := c.get(stored); err != nil {
				return err
			}
			for _, field := range fields {
				if n, found, err := unstructured.NestedInt64(stored.Object, "status",
					field); !found || n != 0 {
					return fmt.Errorf("status.%s is %d, %t, %v of %v", field, n, found, err, stored.Object["status"])
				}
			}
			return nil
		})
	}
}
