package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

func TestDevicePools(t *testing.T) {
	c := newCluster(t, nil)
	c.nodes("n1", "n2", "n3")
	pool := c.pool("fast", "")
	reason := func(reason, text string) {
		t.Helper()
		c.eventually("DevicePool is "+reason, func() error {
			if err := c.get(pool); err != nil {
				return err
			}
			return hasReason(pool.Status.Conditions, v1alpha1.ConditionReady, reason, text)
		})
	}
	report := func(nodes ...v1alpha1.DevicePoolNodeStatus) {
		t.Helper()
		before := pool.DeepCopy()
		pool.Status.Nodes = nodes
		if err := c.Status().Patch(t.Context(), pool, client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	reason(v1alpha1.ReasonNoFunctions, "spec.selectors")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Functions: 8}, v1alpha1.DevicePoolNodeStatus{Name: "n2", Functions: 4}, v1alpha1.DevicePoolNodeStatus{Name: "n3"})
	reason(v1alpha1.ReasonPublished, "12 Functions on 2 nodes")
	if pool.Status.Functions != 12 || len(pool.Status.Nodes) != 3 {
		t.Errorf("status %+v", pool.Status)
	}
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Functions: 8}, v1alpha1.DevicePoolNodeStatus{Name: "n2", Problem: "resource a.example/b is that of DevicePool first"})
	reason(v1alpha1.ReasonInvalidConfig, "node n2: resource a.example/b is that of DevicePool first")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Functions: 8, Overlapping: []string{"0000:3b:02.0 in other"}})
	reason(v1alpha1.ReasonOverlap, "0000:3b:02.0 in other on node n1")

	// It says no more than what the agents saw: kubectl wait compares the generations.
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", ObservedGeneration: 2, Functions: 8},
		v1alpha1.DevicePoolNodeStatus{Name: "n2", ObservedGeneration: 1, Functions: 8})
	reason(v1alpha1.ReasonPublished, "16 Functions")
	if ready := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady); ready.ObservedGeneration != 1 {
		t.Errorf("Ready is about generation %d, want 1, which is all that the agent of n2 saw", ready.ObservedGeneration)
	}
}

// agentReports writes an agent's entry of a DevicePool, nil for none, as the real one does.
func (c *cluster) agentReports(node, pool string, entry *v1alpha1.DevicePoolNodeStatus) {
	c.Helper()
	nodes := []any{}
	if entry != nil {
		fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(entry)
		if err != nil {
			c.Fatal(err)
		}
		nodes = append(nodes, fields)
	}
	o := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v1alpha1.SchemeGroupVersion.String(), "kind": "DevicePool",
		"metadata": map[string]any{"name": pool}, "status": map[string]any{"nodes": nodes},
	}}
	if err := c.Status().Apply(context.Background(), client.ApplyConfigurationFromUnstructured(o),
		client.FieldOwner("xpu-agent/"+node), client.ForceOwnership); err != nil {
		c.Fatal(err)
	}
}

// TestDevicePoolOfDeletedNode: what the agent of a deleted Node said last goes with the Node, also where nobody saw
// that, and the other agents own their entries as before.
func TestDevicePoolOfDeletedNode(t *testing.T) {
	c := newCluster(t, nil)
	nodes := c.nodes("n1", "n2", "n3")
	pool := c.pool("fast", "")
	have := func(names ...string) {
		t.Helper()
		c.eventually(fmt.Sprintf("entries of %q", names), func() error {
			if err := c.get(pool); err != nil {
				return err
			}
			var got []string
			for _, entry := range pool.Status.Nodes {
				got = append(got, entry.Name)
			}
			want := fmt.Sprintf("%d Functions on %d nodes", 4*len(names), len(names))
			ready := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady)
			if !slices.Equal(got, names) || ready == nil || len(names) > 0 && ready.Message != want {
				return fmt.Errorf("entries of %q, Ready %+v", got, ready)
			}
			return nil
		})
	}
	report := func(node string) {
		t.Helper()
		c.agentReports(node, "fast", &v1alpha1.DevicePoolNodeStatus{Name: node, ObservedGeneration: 1, Functions: 4})
	}
	for _, node := range nodes {
		report(node.GetName())
	}
	have("n1", "n2", "n3")
	c.delete(nodes[0])
	have("n2", "n3")
	c.stop()
	c.delete(nodes[1])
	c.start(nil)
	have("n3")
	for _, manager := range pool.ManagedFields {
		if manager.Manager == "xpu-agent/n1" || manager.Manager == "xpu-agent/n2" {
			t.Errorf("%s still owns %s", manager.Manager, manager.FieldsV1)
		}
	}

	c.nodes("n1") // a Node that comes back
	report("n1")
	have("n3", "n1")
	c.agentReports("n1", "fast", nil)
	c.agentReports("n3", "fast", nil)
	have()
}

// TestDevicePoolSupplied: what nodes' agents lack for numVFs is told in a condition of its own.
func TestDevicePoolSupplied(t *testing.T) {
	c := newCluster(t, nil)
	c.nodes("n1", "n2", "n3")
	pool := c.pool("made", "")
	change := func(change func(), write func(client.Patch) error) {
		t.Helper()
		before := pool.DeepCopy()
		change()
		if err := write(client.MergeFrom(before)); err != nil {
			t.Fatal(err)
		}
	}
	report := func(nodes ...v1alpha1.DevicePoolNodeStatus) {
		t.Helper()
		for i := range nodes {
			nodes[i].ObservedGeneration = cmp.Or(nodes[i].ObservedGeneration, pool.Generation)
		}
		change(func() { pool.Status.Nodes = nodes }, func(p client.Patch) error { return c.Status().Patch(t.Context(), pool, p) })
	}
	want := func(n *int32) {
		t.Helper()
		change(func() { pool.Spec.NumVFs = n }, func(p client.Patch) error { return c.Patch(t.Context(), pool, p) })
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
	change(func() { pool.Spec.Selectors = []v1alpha1.FunctionSelector{{PFNames: []string{"ens1f0"}}} },
		func(p client.Patch) error { return c.Patch(t.Context(), pool, p) })
	want(ptr.To[int32](4))
	reason(v1alpha1.ReasonNoPF, "pfNames")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonMaking)}})
	reason(v1alpha1.ReasonMaking, "node n1: PF 0000:3b:00.0")
	report(
		v1alpha1.DevicePoolNodeStatus{Name: "n1", Shortages: []v1alpha1.Shortage{
			short("0000:3b:00.0", v1alpha1.ReasonMaking), short("0000:3b:00.1", v1alpha1.ReasonInUse),
		}},
		v1alpha1.DevicePoolNodeStatus{Name: "n2", Functions: 4},
		v1alpha1.DevicePoolNodeStatus{Name: "n3", Shortages: []v1alpha1.Shortage{
			short("0000:3b:00.0", v1alpha1.ReasonBusy), short("0000:3b:00.1", v1alpha1.ReasonBusy),
		}},
	)
	reason(v1alpha1.ReasonInUse, "node n3: PF 0000:3b:00.0 Busy; and 1 more")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Problem: "resource a.example/b is that of DevicePool first"})
	reason(v1alpha1.ReasonInvalidConfig, "Ready")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Functions: 4})
	reason(v1alpha1.ReasonAllMade, "every PF")

	// What is said of an older spec does not count, for good or ill.
	old := pool.Generation
	want(ptr.To[int32](6))
	reason(v1alpha1.ReasonMaking, fmt.Sprintf("generation %d of the spec has not been seen to yet on nodes n1:", old+1))
	report(
		v1alpha1.DevicePoolNodeStatus{Name: "n1", ObservedGeneration: old, Problem: "x"},
		v1alpha1.DevicePoolNodeStatus{Name: "n2", ObservedGeneration: old,
			Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonBusy)}},
		v1alpha1.DevicePoolNodeStatus{Name: "n3", Functions: 6},
	)
	reason(v1alpha1.ReasonMaking, "on nodes n1, n2:")
	report(
		v1alpha1.DevicePoolNodeStatus{Name: "n1", ObservedGeneration: old},
		v1alpha1.DevicePoolNodeStatus{Name: "n3",
			Shortages: []v1alpha1.Shortage{short("0000:3b:00.0", v1alpha1.ReasonInUse)}},
	)
	reason(v1alpha1.ReasonInUse, "node n3: PF 0000:3b:00.0 InUse; generation")
	report(v1alpha1.DevicePoolNodeStatus{Name: "n1", Functions: 6})
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
