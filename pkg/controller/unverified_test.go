// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"fmt"
	"maps"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
)

const ownMAC = "00:11:22:33:44:01" // of vf(1)

// dpuOperator starts an agent of dpu-operator, and creates the network blue, its pool and the XPU.
func (c *cluster) dpuOperator(plugin opitest.Plugin) (*opitest.DPUOperator, *v1alpha1.XPU) {
	c.Helper()
	agent := opitest.StartDPUOperator(c.TB, plugin)
	c.network("blue", 10)
	c.pool("fast", "blue")
	xpu := &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "card"},
		Spec: v1alpha1.XPUSpec{
			NodeName: c.node, Endpoint: agent.Config().Endpoint, Insecure: true,
			Dialect: v1alpha1.DialectDPUOperator,
		},
	}
	c.create(xpu)
	return agent, xpu
}

// vfReport is what the node's agent says about the PF and its VFs.
func (c *cluster) vfReport() *v1alpha1.XPUNode {
	c.Helper()
	node := &v1alpha1.XPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: c.node},
		Status: v1alpha1.XPUNodeStatus{PFs: []v1alpha1.XPUNodePF{{
			Address: string(testPF), VFOffset: 16, VFStride: 1, TotalVFs: 64,
			VFMACs: []string{"", ownMAC},
		}}},
	}
	c.create(node)
	return node
}

// hasVLANs waits until the agent has exactly these ports, by name, in these VLANs.
func (c *cluster) hasVLANs(agent *opitest.DPUOperator, want map[string]string) {
	c.Helper()
	c.eventually("the agent's ports", func() error {
		if got := agent.Ports(); !maps.Equal(got, want) {
			return fmt.Errorf("it has %v, want %v", got, want)
		}
		return nil
	})
}

// TestUnverifiedAgent takes claims through their lives at agents that report nothing and know a VF
// by its number and its permanent MAC address.
func TestUnverifiedAgent(t *testing.T) {
	for _, plugin := range []opitest.Plugin{opitest.NetSec, opitest.Marvell, opitest.IPU} {
		t.Run(string(plugin), func(t *testing.T) {
			c := newCluster(t, nil)
			agent, xpu := c.dpuOperator(plugin)

			o := c.claim(want{name: "a", pool: "fast", function: vf(1)})
			c.claimReason(o, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig, "vfMACs")
			c.vfReport()
			port := c.up(o, vf(1))
			if port.Spec.MAC != ownMAC || port.Status.BridgePort != "pf0vf1" {
				t.Errorf("MAC %s, port %s; want %s, pf0vf1", port.Spec.MAC,
					port.Status.BridgePort, ownMAC)
			}
			c.hasVLANs(agent, map[string]string{"host0-1": "10"})

			c.eventually("the XPU says what is not known", func() error {
				if err := c.get(xpu); err != nil {
					return err
				}
				return hasReason(xpu.Status.Conditions, v1alpha1.ConditionVerified,
					v1alpha1.ReasonNotReported, "do not report their ports")
			})

			// A card that was reset gets its ports again.
			agent.Stop()
			agent.Forget()
			if err := agent.Run(); err != nil {
				t.Fatal(err)
			}
			c.hasVLANs(agent, map[string]string{"host0-1": "10"})

			// A deletion that fails keeps the Function.
			agent.Refuse("delete host0-1", "exit status 1")
			c.delete(o)
			c.portReason(port, v1alpha1.ReasonReleasing, "exit status 1")
			agent.Refuse("delete host0-1", "")
			c.gone(port)
			c.hasVLANs(agent, map[string]string{})
		})
	}
}

// TestPermanentMACs checks what is refused if the XPU knows Functions by their permanent addresses.
func TestPermanentMACs(t *testing.T) {
	c := newCluster(t, nil)
	agent, xpu := c.dpuOperator(opitest.IPU)
	c.vfReport()

	other := c.claim(want{name: "other", pool: "fast", function: vf(1),
		config: `{"mac":"02:00:00:00:00:01"}`})
	c.claimReason(other, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig, "leave mac out")
	unknown := c.claim(want{name: "unknown", pool: "fast", function: vf(0)})
	c.claimReason(unknown, v1alpha1.ConditionProvisioned, v1alpha1.ReasonInvalidConfig,
		"does not have that of Function 0000:3b:02.0")
	own := c.claim(want{name: "own", pool: "fast", function: vf(1),
		config: `{"mac":"` + ownMAC + `"}`})
	c.deallocate(other)
	c.up(own, vf(1))
	c.hasVLANs(agent, map[string]string{"host0-1": "10"})

	c.told("XPU", "card", "Insecure")

	// An XPU whose agent reports its ports has no such condition.
	c.delete(own)
	c.gone(c.port(own, vf(1)))
	c.change(xpu, func() { xpu.Spec.Dialect = v1alpha1.DialectEVPNGW })
	c.eventually("the condition Verified goes", func() error {
		if err := c.get(xpu); err != nil {
			return err
		}
		if meta.FindStatusCondition(xpu.Status.Conditions, v1alpha1.ConditionVerified) != nil {
			return fmt.Errorf("it is there")
		}
		return nil
	})
}

// TestE2000 checks that a Port at opi-intel-bridge, which computes the vport from the MAC address,
// has the permanent address of its Function.
func TestE2000(t *testing.T) {
	c := newCluster(t, nil)
	agent := opitest.Start(t)
	c.network("blue", 10)
	c.pool("fast", "blue")
	c.create(&v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "card"},
		Spec: v1alpha1.XPUSpec{
			NodeName: c.node, Endpoint: agent.Config().Endpoint, Insecure: true,
			Dialect: v1alpha1.DialectIntelE2000,
		},
	})
	c.vfReport()

	o := c.claim(want{name: "a", pool: "fast", function: vf(1)})
	if port := c.up(o, vf(1)); port.Spec.MAC != ownMAC {
		t.Errorf("MAC %s, want %s", port.Spec.MAC, ownMAC)
	}
	c.has(agent, "vf-0000-3b-02-1")
}
