// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestStory checks two tenants that use the same names and numbers, and never see each other.
func TestStory(t *testing.T) {
	w := newWorld(t)
	agents := map[string]*opitest.Agent{}
	for _, s := range []*testCluster{w.a, w.b} {
		s.node("node1", "MT-"+s.name)
		s.network("blue", 10, "10.1.0.0/24")
		s.pool("fast", "blue")
		_, agents[s.name] = w.xpu("card-"+s.name, s.name, "MT-"+s.name)
		tenant := w.joins(s, nil)
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
		w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)
	}

	for _, s := range []*testCluster{w.a, w.b} {
		xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-" + s.name}}
		s.waitForReason(xpu, func() []metav1.Condition {
			return xpu.Status.Conditions
		}, v1alpha1.ConditionReady, v1alpha1.ReasonConnected)
		if xpu.Spec.Endpoint != "" || xpu.Status.NodeName != "node1" {
			t.Errorf("%s is told of XPU %+v %+v", s.name, xpu.Spec, xpu.Status)
		}

		o, port := s.claim("nic", "node1", "fast", vf(3))
		s.portIs(port, v1alpha1.ReasonUp)
		want := v1alpha1.XPUPortStatus{
			BridgePort: "c1pf0vf3", Addresses: []string{"10.1.0.2/24"}, Pod: "pod-nic",
		}
		if got := port.Status; got.BridgePort != want.BridgePort ||
			!slices.Equal(got.Addresses, want.Addresses) || got.Pod != want.Pod {
			t.Errorf("%s: status %+v", s.name, got)
		}
		if got := agents[s.name].Ports(); len(got) != 1 {
			t.Errorf("the agent of %s has the ports %v", s.name, got)
		}

		s.delete(o)
		s.delete(port) // like the garbage collector
		s.gone(port)
		if got := agents[s.name].Ports(); len(got) != 0 {
			t.Errorf("%s: its XPUPort is gone, and the agent still has %v", s.name, got)
		}
	}

	var networks v1alpha1.XPUNetworkList
	if err := w.infra.List(t.Context(), &networks); err != nil {
		t.Fatal(err)
	}

	var segments []int32
	for _, network := range networks.Items {
		segments = append(segments, network.Spec.VLAN, *network.Spec.VNI)
	}
	if want := []int32{1000, 10000, 2000, 20000}; !slices.Equal(segments, want) {
		t.Errorf("VLANs and VNIs %v, want %v", segments, want)
	}

	blue, copied := &v1alpha1.XPUNetwork{}, &v1alpha1.XPUNetwork{}
	blue.Name, copied.Name = "blue", scopedNetwork("a", "blue")
	w.a.eventually("the network is changed", func() error {
		if err := w.a.get(blue); err != nil {
			return err
		}
		blue.Spec.MTU, blue.Spec.SourceFilter = ptr.To[int32](1400), v1alpha1.SourceFilterMAC
		return w.a.Update(t.Context(), blue)
	})

	w.infra.eventually("the change is carried over", func() error {
		err := w.infra.get(copied)
		if got := copied.Spec; err == nil &&
			(ptr.Deref(got.MTU, 0) != 1400 || got.SourceFilter != v1alpha1.SourceFilterMAC) {
			err = fmt.Errorf("it is %+v", got)
		}
		return err
	})
}

// TestAgentAway: the tenant's cluster hears for how long the infra cluster has failed to reach an OPI
// agent, and that the agent is back.
func TestAgentAway(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-" + w.a.name}}
	begin := time.Now()
	agent.Kill()
	w.a.xpuIs(xpu.Name, v1alpha1.ReasonXPUUnavailable)
	w.a.eventually("the tenant's XPU says for how long", func() error {
		if err := w.a.get(xpu); err != nil || xpu.Status.AwaySeconds < 2 {
			return fmt.Errorf("awaySeconds %d, %v", xpu.Status.AwaySeconds, err)
		}
		return nil
	})
	if said, is := xpu.Status.AwaySeconds, time.Since(begin).Seconds(); float64(said) > is {
		t.Errorf("awaySeconds %d after %.1f s", said, is)
	}

	must.Succeed(t, agent.Run())
	w.a.xpuIs(xpu.Name, v1alpha1.ReasonConnected)
	must.Succeed(t, w.a.get(xpu))
	if xpu.Status.AwaySeconds != 0 {
		t.Errorf("awaySeconds %d of an agent that answers", xpu.Status.AwaySeconds)
	}
}

// TestAgentAwayOlderTenant: a tenant's cluster whose CRDs do not have awaySeconds hears all else.
func TestAgentAwayOlderTenant(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	w.stopBroker()
	restore := w.a.withoutAwaySeconds()
	t.Cleanup(restore)

	agent.Kill()
	xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-" + w.a.name}}
	w.infra.eventually("the infra cluster says for how long", func() error {
		if err := w.infra.get(xpu); err != nil || xpu.Status.AwaySeconds == 0 {
			return fmt.Errorf("awaySeconds %d, %v", xpu.Status.AwaySeconds, err)
		}
		return nil
	})
	w.startBroker()
	w.a.xpuIs(xpu.Name, v1alpha1.ReasonXPUUnavailable)
}

// withoutAwaySeconds removes the field from the CRD of XPUs.
func (s *testCluster) withoutAwaySeconds() (restore func()) {
	s.Helper()
	crd := &unstructured.Unstructured{}
	crd.SetAPIVersion("apiextensions.k8s.io/v1")
	crd.SetKind("CustomResourceDefinition")
	crd.SetName("xpus.xpu.opiproject.org")
	change := func(change func(status map[string]any)) {
		s.eventually("the CRD is changed", func() error {
			if err := s.get(crd); err != nil {
				return err
			}
			versions := crd.Object["spec"].(map[string]any)["versions"].([]any)
			status, _, err := unstructured.NestedFieldNoCopy(versions[0].(map[string]any), "schema",
				"openAPIV3Schema", "properties", "status", "properties")
			if err != nil {
				return err
			}
			change(status.(map[string]any))
			return s.Update(context.Background(), crd)
		})
	}

	var field any
	change(func(status map[string]any) {
		field = status["awaySeconds"]
		delete(status, "awaySeconds")
	})
	return func() { change(func(status map[string]any) { status["awaySeconds"] = field }) }
}
