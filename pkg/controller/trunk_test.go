// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"slices"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

const trunkConfig = `{"networks":[{"name":"blue"},{"name":"red","addresses":["10.2.0.7/24"]}]}`

// A Function that joins two networks with tags: its Port, its addresses in both, and what the agent
// gets. Neither network goes while the Port uses it.
func TestTrunk(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	agent.Set(func(b *opitest.Behaviour) { b.Options = true })
	c.xpu("card", agent)
	c.network("blue", 100, "10.1.0.0/24")
	red := c.network("red", 200, "10.2.0.0/24")
	c.change(red, func() { red.Spec.MTU = new(int32(1400)) })
	c.pool("fast", "")

	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: trunkConfig})
	port := c.up(o, vf(0))
	wantNetworks := []v1alpha1.XPUPortNetwork{
		{Name: "blue", Addresses: []string{"10.1.0.2/24"}},
		{Name: "red", Addresses: []string{"10.2.0.7/24"}},
	}
	if diff := gocmp.Diff(wantNetworks, port.Spec.Networks); diff != "" || port.Spec.Network != "" {
		t.Errorf("network %q, networks (-want +got):\n%s", port.Spec.Network, diff)
	}
	wantStatus := []v1alpha1.XPUPortNetworkStatus{
		{Name: "blue", VLAN: 100, Addresses: []string{"10.1.0.2/24"}},
		{Name: "red", VLAN: 200, MTU: 1400, Addresses: []string{"10.2.0.7/24"}},
	}
	if diff := gocmp.Diff(wantStatus, port.Status.Networks); diff != "" {
		t.Errorf("status.networks (-want +got):\n%s", diff)
	}
	if port.Status.MTU != 0 {
		t.Errorf("status.mtu %d, want 0, because the MTU of blue is not known", port.Status.MTU)
	}
	if _, labelled := port.Labels[v1alpha1.LabelNetwork]; labelled {
		t.Errorf("labels %v name one network", port.Labels)
	}

	if got := len(agent.Networks()); got != 2 {
		t.Errorf("the agent has %d networks, want both", got)
	}
	for id, addresses := range agent.AddressesIn(port.Status.BridgePort) {
		if len(addresses) != 1 || !slices.Contains([]string{"10.1.0.2", "10.2.0.7"}, addresses[0]) {
			t.Errorf("addresses %q in %s", addresses, id)
		}
	}

	// The addresses of both networks belong to the Port.
	other := c.claim(want{name: "b", pool: "fast", function: vf(1), config: `{"network":"blue"}`})
	if got := c.up(other, vf(1)).Spec.Addresses; !slices.Equal(got, []string{"10.1.0.3/24"}) {
		t.Errorf("the next Port of blue has %q", got)
	}
	taken := c.claim(want{name: "c", pool: "fast", function: vf(2),
		config: `{"network":"red","addresses":["10.2.0.7/24"]}`})
	c.claimReason(taken, v1alpha1.ConditionProvisioned, v1alpha1.ReasonConflict, "10.2.0.7")

	c.delete(red)
	c.networkReason(red, v1alpha1.ReasonInUse, "1 XPUPorts use it")
	c.delete(o)
	c.delete(port)
	c.gone(port)
	c.gone(red)
	if got := agent.Ports(); len(got) != 1 {
		t.Errorf("the agent still has %q", got)
	}
}

// What keeps a Function from joining tagged networks, and what the claim says of it.
func TestTrunkRefused(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	c.network("blue", 100)
	c.pool("fast", "")

	o := c.claim(want{name: "a", pool: "fast", function: vf(0), config: trunkConfig})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonNetworkNotFound, "XPUNetwork red")
	agent.FailNext("CreateBridgePort", 1000, codes.Unimplemented, "ptype TRUNK: another mode")
	c.network("red", 200, "10.2.0.0/24")
	c.portReason(c.port(o, vf(0)), v1alpha1.ReasonNoTrunks, "name one network")

	c.create(&v1alpha1.XPUNetwork{
		ObjectMeta: metav1.ObjectMeta{Name: "closed"},
		Spec: v1alpha1.XPUNetworkSpec{VLAN: 300, AllowedNamespaces: v1alpha1.AllowedNamespaces{
			From:     v1alpha1.NamespacesFromSelector,
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"nobody": "has it"}},
		}},
	})
	closed := c.claim(want{name: "c", pool: "fast", function: vf(2),
		config: `{"networks":[{"name":"blue"},{"name":"closed"}]}`})
	c.claimReason(closed, v1alpha1.ConditionProvisioned, v1alpha1.ReasonForbidden,
		"XPUNetwork closed")

	both := c.claim(want{name: "b", pool: "fast", function: vf(1),
		config: `{"network":"blue","networks":[{"name":"red"}]}`})
	c.claimReason(both, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig,
		"network and addresses must be absent")
}
