// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

const migratedMAC = "02:00:00:00:00:51"

// launcher is a pod of the cluster's node that KubeVirt made for a virtual machine, "" for another
// pod.
func (c *cluster) launcher(namespace, name, machine string) *v1alpha1.PodRef {
	c.Helper()
	return c.launcherOn(c.node, namespace, name, machine)
}

func (c *cluster) launcherOn(node, namespace, name, machine string) *v1alpha1.PodRef {
	c.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, GenerateName: name + "-"},
		Spec: corev1.PodSpec{
			NodeName: node, Containers: []corev1.Container{{Name: "compute", Image: "none"}},
		},
	}

	if machine != "" {
		pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: "vm",
			UID: types.UID(machine), Controller: new(true),
		}}
	}

	c.create(pod)
	return &v1alpha1.PodRef{Namespace: namespace, Name: pod.Name, UID: pod.UID}
}

// neverRefused sees that nobody was told of the Port that it is refused, and that its pod does not
// start.
func (c *cluster) neverRefused(port *v1alpha1.XPUPort) {
	c.Helper()
	var list eventsv1.EventList
	if err := c.List(context.Background(), &list); err != nil {
		c.Fatal(err)
	}

	for _, e := range list.Items {
		if e.Regarding.UID == port.UID && e.Type != corev1.EventTypeNormal {
			c.Errorf("event %s of XPUPort %s: %s", e.Reason, port.Name, e.Note)
		}
	}
}

// assignedPort is a Port of a pod with an address of the network's book.
func (c *cluster) assignedPort(n int, mac string, pod *v1alpha1.PodRef) *v1alpha1.XPUPort {
	c.Helper()
	port := c.podPort(vf(n), "blue")
	port.Spec.AssignAddresses, port.Spec.Pod = true, pod
	if mac != "" {
		port.Spec.MAC = mac
	}
	c.create(port)
	return port
}

// hasAddress waits until the Port is up with the address.
func (c *cluster) hasAddress(port *v1alpha1.XPUPort, address string) {
	c.Helper()
	c.portReason(port, v1alpha1.ReasonUp, "")
	if !slices.Equal(port.Status.Addresses, []string{address}) {
		c.Errorf("XPUPort %s has addresses %q, want %s", port.Name, port.Status.Addresses, address)
	}
}

// migrating has a virtual machine's pod with a Port, and a second pod of it whose Port stands by.
func migrating(t *testing.T) (c *cluster, agent *opitest.Agent, source, target *v1alpha1.XPUPort) {
	t.Helper()
	c, agent = withCard(t)
	c.network("blue", 100, "10.1.0.0/29") // .2 to .6
	source = c.assignedPort(0, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.hasAddress(source, "10.1.0.2/29")
	target = c.assignedPort(1, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.standsBy(target, source)
	c.has(agent, "vf-0000-3b-02-0")

	return c, agent, source, target
}

func (c *cluster) standsBy(target, source *v1alpha1.XPUPort) {
	c.Helper()
	c.portReason(target, v1alpha1.ReasonStandby, "pod "+source.Spec.Pod.Name+
		" of the same virtual machine has MAC address "+migratedMAC)
	if want := c.namespace + "/" + source.Name; target.Status.Predecessor != want ||
		!slices.Equal(target.Status.Addresses, source.Status.Addresses) {
		c.Errorf("predecessor %s and addresses %q, want %s and %q", target.Status.Predecessor,
			target.Status.Addresses, want, source.Status.Addresses)
	}
}

// The second pod of a virtual machine gets MAC address, addresses and place in the network when the
// first has ended, and nobody else does in between.
func TestMigration(t *testing.T) {
	c, agent, source, target := migrating(t)
	stranger := c.assignedPort(2, migratedMAC, c.launcher("default", "virt-launcher-vm2", "vm-2"))
	c.portReason(stranger, v1alpha1.ReasonConflict,
		"MAC address "+migratedMAC+" belongs to XPUPort")
	c.writes.reset()
	c.delete(source)
	next := c.assignedPort(3, "", c.launcher("default", "web", ""))
	c.hasAddress(target, "10.1.0.2/29")
	c.hasAddress(next, "10.1.0.3/29")
	c.has(agent, "vf-0000-3b-02-1", "vf-0000-3b-02-3")
	c.portReason(stranger, v1alpha1.ReasonConflict, "belongs to XPUPort "+c.namespace+"/"+
		target.Name)

	// It goes back to where it came from.
	back := c.assignedPort(0, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.standsBy(back, target)
	c.delete(target)
	c.hasAddress(back, "10.1.0.2/29")
	c.delete(back)
	c.gone(back)
	c.portReason(stranger, v1alpha1.ReasonUp, "") // nobody has the MAC address any more
}

// Both nodes have the Function at the same address, so that its port has the same id on both xPUs.
func TestMigrationBetweenEqualNodes(t *testing.T) {
	c, agent := withCard(t)
	second := opitest.Start(t)
	xpu := c.xpuOn("elsewhere", "other-card", second.Config().Endpoint)
	c.eventually("the second XPU is connected", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}
		return hasReason(xpu.Status.Conditions, v1alpha1.ConditionReady,
			v1alpha1.ReasonConnected, "")
	})

	c.network("blue", 100, "10.1.0.0/29")
	source := c.assignedPort(0, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.hasAddress(source, "10.1.0.2/29")

	elsewhere := func(name string) *v1alpha1.XPUPort {
		port := c.podPort(vf(0), "blue")
		port.Name, port.Spec.NodeName, port.Spec.XPU = "elsewhere-0000-3b-02-0", "elsewhere", "other-card"
		port.Spec.MAC, port.Spec.AssignAddresses = migratedMAC, true
		port.Spec.Pod = c.launcherOn("elsewhere", "default", name, "vm-1")
		c.create(port)
		return port
	}

	target := elsewhere("virt-launcher-vm1")
	c.standsBy(target, source)
	c.stop()
	c.start(nil) // compares what the agents have with what they should have
	c.has(agent, "vf-0000-3b-02-0")
	c.delete(source)
	c.hasAddress(target, "10.1.0.2/29")
	c.has(agent)
	c.has(second, "vf-0000-3b-02-0")
	c.neverRefused(source)
	c.neverRefused(target)
}

// A virtual machine does not move to where it cannot be served.
func TestNoStandbyAtAnXPUThatIsAway(t *testing.T) {
	c, _ := withCard(t)
	away := opitest.Start(t)
	c.xpuOn("elsewhere", "other-card", away.Config().Endpoint)
	away.Stop()
	c.network("blue", 100)
	source := c.podPort(vf(0), "blue")
	source.Spec.MAC, source.Spec.Pod = migratedMAC, c.launcher("default",
		"virt-launcher-vm1", "vm-1")
	c.create(source)
	c.portReason(source, v1alpha1.ReasonUp, "")
	target := c.podPort(vf(1), "blue")
	target.Name, target.Spec.NodeName, target.Spec.XPU = "elsewhere-0000-3b-02-1", "elsewhere", "other-card"
	target.Spec.MAC, target.Spec.Pod = migratedMAC, c.launcherOn("elsewhere", "default",
		"virt-launcher-vm1", "vm-1")
	c.create(target)
	c.portReason(target, v1alpha1.ReasonXPUUnavailable,
		"XPU other-card cannot serve the virtual machine")
	if target.Status.Predecessor != "" {
		t.Errorf("it stands by for %s", target.Status.Predecessor)
	}
}

// Of two Ports that stand by, the later one is next, and the other one stays in line.
func TestTwoStandBy(t *testing.T) {
	c, _, source, first := migrating(t)
	second := c.assignedPort(2, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.standsBy(second, source)
	c.delete(source)
	c.hasAddress(second, "10.1.0.2/29")
	c.standsBy(first, second)
	c.delete(second)
	c.hasAddress(first, "10.1.0.2/29")
}

// A migration that is given up leaves the virtual machine what it has.
func TestMigrationGivenUp(t *testing.T) {
	c, agent, source, target := migrating(t)
	asked := agent.Calls("CreateBridgePort")
	c.delete(target)
	c.gone(target)
	c.hasAddress(source, "10.1.0.2/29")
	c.has(agent, "vf-0000-3b-02-0")
	if again := agent.Calls("CreateBridgePort"); again != asked {
		t.Errorf("the agent was asked for %d ports meanwhile", again-asked)
	}

	// What it has is free once its own Port is gone.
	c.delete(source)
	c.gone(source)
	c.hasAddress(c.assignedPort(4, "", c.launcher("default", "web", "")), "10.1.0.2/29")
}

// Only pods that KubeVirt made for one machine, in one namespace, are one virtual machine.
func TestStrangersDoNotStandBy(t *testing.T) {
	c, _ := withCard(t)
	c.xpuOn("elsewhere", "other-card", opitest.Start(t).Config().Endpoint)
	c.network("blue", 100)
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "other-"}}
	c.create(other)
	source := c.podPort(vf(0), "blue")
	source.Spec.MAC, source.Spec.Pod = migratedMAC, c.launcher("default",
		"virt-launcher-vm1", "vm-1")
	c.create(source)
	c.portReason(source, v1alpha1.ReasonUp, "")
	earlier := *c.launcher("default", "virt-launcher-vm1", "vm-1")
	earlier.UID = "of an earlier pod"
	gone := v1alpha1.PodRef{Namespace: "default", Name: "virt-launcher-vm1-gone"}
	for i, pod := range []*v1alpha1.PodRef{
		c.launcher(other.Name, "virt-launcher-vm1", "vm-1"), c.launcher("default", "web", ""),
		&earlier, &gone, nil, source.Spec.Pod,
	} {
		port := c.podPort(vf(i+1), "blue")
		port.Spec.MAC, port.Spec.Pod = migratedMAC, pod
		c.create(port)
		c.portReason(port, v1alpha1.ReasonConflict,
			"MAC address "+migratedMAC+" belongs to XPUPort")
		if port.Status.Predecessor != "" {
			t.Errorf("XPUPort of pod %v stands by for %s", pod, port.Status.Predecessor)
		}
	}

	// Of the machine, but it asks for addresses, and the source has none to leave.
	greedy := c.assignedPort(9, migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1"))
	c.portReason(greedy, v1alpha1.ReasonConflict, "MAC address "+migratedMAC+" belongs to XPUPort")
	// A node that was taken over names a pod that is not there.
	port := c.podPort(vf(0), "blue")
	port.Name, port.Spec.NodeName, port.Spec.XPU = "elsewhere-0000-3b-02-0", "elsewhere", "other-card"
	port.Spec.MAC, port.Spec.Pod = migratedMAC, c.launcher("default", "virt-launcher-vm1", "vm-1")
	c.create(port)
	c.portReason(port, v1alpha1.ReasonConflict, "MAC address "+migratedMAC+" belongs to XPUPort")
}

// A controller that starts in the middle of a migration goes on with it, also if the first pod has
// ended meanwhile.
func TestMigrationOverRestart(t *testing.T) {
	for _, ends := range []bool{false, true} {
		t.Run(fmt.Sprintf("first pod ends meanwhile %t", ends), func(t *testing.T) {
			c, agent, source, target := migrating(t)
			c.stop()

			if ends { // as by a controller that died right after
				agent.Lose("vf-0000-3b-02-0")
				source.Finalizers = nil
				if err := errors.Join(c.Update(t.Context(), source),
					c.Delete(t.Context(), source)); err != nil {
					t.Fatal(err)
				}
			}

			next := c.assignedPort(3, "", c.launcher("default", "web", ""))
			c.start(nil)
			c.hasAddress(next, "10.1.0.3/29")

			if !ends {
				c.standsBy(target, source)
				c.delete(source)
			}

			c.hasAddress(target, "10.1.0.2/29")
			c.has(agent, "vf-0000-3b-02-1", "vf-0000-3b-02-3")
			c.neverRefused(target)
		})
	}
}
