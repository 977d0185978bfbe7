// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

// podPort is a Port without a claim, as a node's agent makes it.
func (c *cluster) podPort(f function.ID, network string) *v1alpha1.XPUPort {
	return &v1alpha1.XPUPort{
		ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: claim.PortName(c.node, f),
			Finalizers: []string{v1alpha1.FinalizerPort}},
		Spec: v1alpha1.XPUPortSpec{
			NodeName: c.node, Function: claim.FunctionRef(f), XPU: "card", Network: network,
			MAC: string(claim.DerivedMAC("", c.node, f)),
			Pod: &v1alpha1.PodRef{Namespace: "default", Name: "web", UID: "web-1"},
		},
	}
}

func withCard(t *testing.T) (*cluster, *opitest.Agent) {
	t.Helper()
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.xpu("card", agent)
	return c, agent
}

// A Port that an agent made is served as a claim's is, keeps its network, and is nobody else's.
func TestPortOfPod(t *testing.T) {
	c, agent := withCard(t)
	network := c.network("blue", 100)
	c.change(network, func() { network.Spec.MTU = ptr.To(int32(1450)) })
	port := c.podPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonUp, "")
	if port.Status.BridgePort != "vf-0000-3b-02-0" || port.Status.MTU != 1450 {
		t.Errorf("status %+v", port.Status)
	}

	c.delete(network)
	c.networkReason(network, v1alpha1.ReasonInUse, "1 XPUPorts use it, such as "+c.namespace+
		"/"+port.Name)
	c.has(agent, "vf-0000-3b-02-0")
	c.delete(port)
	c.gone(port)
	c.has(agent)
	c.gone(network)
}

// A Port without a claim in another namespace than the agents' was made by nobody who may: it could
// name any pod.
func TestPortOfNoAgent(t *testing.T) {
	c, agent := withCard(t)
	c.network("blue", 100)
	port := c.podPort(vf(0), "blue")
	port.Namespace = "default"
	c.create(port)
	c.portReason(port, v1alpha1.ReasonForbidden, "made by the xpu-agent of its node, in namespace "+
		c.namespace)
	c.has(agent)
}

// watchesLeases gives the controller the right to watch the broker's Lease, which it has in a
// tenant cluster.
func (c *cluster) watchesLeases() {
	c.Helper()
	own := metav1.ObjectMeta{Namespace: c.namespace, Name: "leases"}
	c.create(&rbacv1.Role{ObjectMeta: own, Rules: []rbacv1.PolicyRule{{
		APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"},
		Verbs: []string{"list", "watch"},
	}}})

	c.create(&rbacv1.RoleBinding{
		ObjectMeta: own,
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: own.Name},
		Subjects: []rbacv1.Subject{
			{APIGroup: rbacv1.GroupName, Kind: "User", Name: controllerUserName},
		},
	})
}

// TestFinalizerOfStranger: nobody else's finalizer keeps a Function, whether our own is there still
// or an earlier controller removed it.
func TestFinalizerOfStranger(t *testing.T) {
	for _, role := range []Role{RoleAll, RoleTenant} {
		t.Run(string(role), func(t *testing.T) {
			c := newCluster(t, func(o *Options) { o.Role = role })
			c.watchesLeases()
			var ports []*v1alpha1.XPUPort
			for n, own := range [][]string{{v1alpha1.FinalizerPort}, nil} {
				port := c.podPort(vf(n), "blue")
				port.Finalizers = append(own, "example.com/mine")
				c.create(port)
				c.delete(port)
				ports = append(ports, port)
			}

			if role == RoleTenant { // the broker, when the infra cluster has let go of it
				c.change(ports[0], func() { ports[0].Finalizers = []string{"example.com/mine"} })
			}

			for _, port := range ports {
				c.gone(port)
			}
		})
	}
}

// A claim without a name is none: Ports of pods are not taken for those of claims that are gone.
func TestPortOfPodIsOfNoClaim(t *testing.T) {
	c, agent := withCard(t)
	c.network("blue", 100)
	port := c.podPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonUp, "")
	o := c.blue("a", 1)
	c.up(o, vf(1))
	c.delete(o)
	c.has(agent, "vf-0000-3b-02-0")
	c.stop()
	c.start(nil)
	c.up(c.blue("b", 1), vf(1))
	c.has(agent, "vf-0000-3b-02-0", "vf-0000-3b-02-1")
	if err := c.get(port); err != nil || !port.DeletionTimestamp.IsZero() {
		t.Errorf("XPUPort of the pod: %v, deleted at %v", err, port.DeletionTimestamp)
	}
}

// A claim waits for a Function that a pod still has.
func TestClaimWaitsForPod(t *testing.T) {
	c, _ := withCard(t)
	c.network("blue", 100)
	port := c.podPort(vf(0), "blue")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonUp, "")
	other := &v1alpha1.XPUPort{}
	o := c.claim(want{name: "a", namespace: "default", pool: "fast", function: vf(0),
		config: `{"network":"blue"}`})
	c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonFunctionBusy,
		"still has XPUPort "+c.namespace+"/"+port.Name+" of pod default/web")
	if err := c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: port.Name},
		other); !apierrors.IsNotFound(err) {
		t.Errorf("the claim's XPUPort: %v, want none", err)
	}

	c.delete(port)
	c.up(o, vf(0))
}

// Of two Ports of one Function, which nobody should make, one is served, and the other neither
// disturbs it nor takes it along when it goes, nor stands in the way of the next one of the node's
// agent.
func TestTwoPortsOfOneFunction(t *testing.T) {
	c, agent := withCard(t)
	c.network("blue", 100)
	c.network("green", 200)
	first := c.podPort(vf(0), "blue")
	c.create(first)
	c.portReason(first, v1alpha1.ReasonUp, "")
	second := c.podPort(vf(0), "green")
	second.Namespace, second.Spec.Pod = "default", nil
	c.create(second)
	c.portReason(second, v1alpha1.ReasonFunctionBusy, "still has XPUPort "+c.namespace+"/"+
		first.Name+" of pod default/web")
	created := agent.Calls("CreateBridgePort")

	third := second.DeepCopy()
	c.delete(second)
	c.gone(second)
	c.has(agent, "vf-0000-3b-02-0")

	third.ResourceVersion, third.UID, third.Finalizers = "", "", []string{v1alpha1.FinalizerPort}
	c.create(third)
	c.portReason(third, v1alpha1.ReasonFunctionBusy, "")
	if again := agent.Calls("CreateBridgePort"); again != created {
		t.Errorf("%d ports were made for one that must wait", again-created)
	}

	c.delete(first)
	c.gone(first)
	c.portReason(third, v1alpha1.ReasonForbidden, "")
	c.has(agent)

	fourth := c.podPort(vf(0), "blue")
	c.create(fourth)
	c.portReason(fourth, v1alpha1.ReasonUp, "")
	c.has(agent, "vf-0000-3b-02-0")
}

// A Port that names the XPU of another node gets nothing of it: a Function of that node may have
// the same address, and its port the same id.
func TestPortOnXPUOfAnotherNode(t *testing.T) {
	c, agent := withCard(t)
	c.network("blue", 100)
	c.network("red", 200)
	victim := c.podPort(vf(0), "blue")
	c.create(victim)
	c.portReason(victim, v1alpha1.ReasonUp, "")
	created, deleted := agent.Calls("CreateBridgePort"), agent.Calls("DeleteBridgePort")

	intruder := c.podPort(vf(0), "red")
	intruder.Name, intruder.Spec.NodeName = "elsewhere-0000-3b-02-0", "elsewhere"
	c.create(intruder)
	c.portReason(intruder, v1alpha1.ReasonNoXPU, "XPU card belongs to node "+c.node+
		", not to node elsewhere")
	c.delete(intruder)
	c.gone(intruder)
	if agent.Calls("CreateBridgePort") != created || agent.Calls("DeleteBridgePort") != deleted {
		t.Error("the agent was asked to change a port")
	}

	c.has(agent, "vf-0000-3b-02-0")
}

func TestPortIsForOneUser(t *testing.T) {
	c := newCluster(t, nil)
	port := c.podPort(vf(0), "blue")
	port.Spec.Claim = v1alpha1.ClaimRef{Name: "a", UID: "uid", Request: "nic"}
	err := c.Create(context.Background(), port)
	if !apierrors.IsInvalid(err) ||
		!strings.Contains(err.Error(), "a port is for a claim or for a pod") {
		t.Errorf("error %v, want it to be invalid", err)
	}
}

// TestAddressesOfPods: claims and pods of the device plugin have one book of addresses and MAC
// addresses.
func TestAddressesOfPods(t *testing.T) {
	c, _ := withCard(t)
	c.network("blue", 100, "10.1.0.0/29") // .2 to .6

	assigned := func(n int, addresses ...string) *v1alpha1.XPUPort {
		port := c.podPort(vf(n), "blue")
		port.Spec.AssignAddresses, port.Spec.Addresses = true, addresses
		c.create(port)
		return port
	}

	is := func(port *v1alpha1.XPUPort, want string) {
		t.Helper()
		c.portReason(port, v1alpha1.ReasonUp, "")
		if got := port.Status.Addresses; len(got) != 1 || got[0] != want {
			t.Errorf("XPUPort %s has addresses %q, want %s", port.Name, got, want)
		}
	}

	first := assigned(0)
	is(first, "10.1.0.2/29")
	if got := c.up(c.blue("a", 1), vf(1)).Spec.Addresses; len(got) != 1 || got[0] != "10.1.0.3/29" {
		t.Errorf("the claim has addresses %q, want 10.1.0.3/29", got)
	}

	is(assigned(2, "10.1.0.6/29"), "10.1.0.6/29")
	c.portReason(assigned(3, "10.1.0.3/29"), v1alpha1.ReasonConflict, "is in use by XPUPort "+
		c.namespace)
	c.portReason(assigned(4, "10.1.0.1/29"), v1alpha1.ReasonInvalidConfig, "is a gateway's")
	same := c.podPort(vf(5), "blue")
	same.Spec.MAC = first.Spec.MAC
	c.create(same)
	c.portReason(same, v1alpha1.ReasonConflict, "MAC address "+first.Spec.MAC+" belongs to XPUPort")

	// Another controller knows what is taken.
	c.stop()
	c.start(nil)
	is(assigned(6), "10.1.0.4/29")
	c.portReason(same, v1alpha1.ReasonConflict, "MAC address "+first.Spec.MAC+" belongs to XPUPort")
	is(assigned(7), "10.1.0.5/29")
	last := assigned(8)
	c.portReason(last, v1alpha1.ReasonNoFreeAddress, "subnet 10.1.0.0/29")
	c.delete(first)
	c.gone(first)
	is(last, "10.1.0.2/29")

	c.network("plain", 200)
	none := c.podPort(vf(9), "plain")
	none.Spec.AssignAddresses = true
	c.create(none)
	c.portReason(none, v1alpha1.ReasonInvalidConfig, "XPUNetwork plain has no subnets")
}
