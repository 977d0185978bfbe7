// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/nodes"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// agentPod creates the pod of an agent, which is ready.
func (c *cluster) agentPod(node string) *corev1.Pod {
	c.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: c.namespace, Name: "xpu-agent-" + node, Labels: nodes.PodLabels(),
		},
		Spec: corev1.PodSpec{
			NodeName: node, Containers: []corev1.Container{{Name: "xpu-agent", Image: "xpu-agent"}},
		},
	}
	c.create(pod)
	c.Cleanup(func() { c.deletePod(pod) })
	c.setReady(pod, corev1.ConditionTrue)
	return pod
}

func (c *cluster) setReady(pod *corev1.Pod, status corev1.ConditionStatus) {
	c.Helper()
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}
	must.Succeed(c, c.Status().Update(context.Background(), pod))
}

// deletePod deletes a pod at once, because no kubelet ends it.
func (c *cluster) deletePod(pod *corev1.Pod) {
	c.Helper()
	err := c.Delete(context.Background(), pod, client.GracePeriodSeconds(0))
	must.Succeed(c, client.IgnoreNotFound(err))
}

// TestAgentAway: an XPUNode says whether its agent runs, and a pool does not count Functions as
// healthy whose agent is away.
func TestAgentAway(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		quickPools(o)
		o.AgentAwayGrace = time.Second
	})
	pool := c.pool("fast", "")
	c.reports("fast", map[string]v1alpha1.XPUNodePool{"n1": healthy(8), "n2": healthy(4)})
	n1, n2 := "n1-"+c.namespace, "n2-"+c.namespace
	for _, name := range []string{n1, n2} {
		node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		c.change(node, func() {
			node.Status.Agent = &v1alpha1.XPUNodeAgent{Version: "v1", Namespace: c.namespace}
		})
	}

	says := func(reason, text string, healthy int32) {
		t.Helper()
		c.eventually("DevicePool is "+reason, func() error {
			if err := c.get(pool); err != nil {
				return err
			}
			if s := pool.Status; s.Functions != 12 || s.Healthy != healthy {
				return fmt.Errorf("%d of %d are healthy", s.Healthy, s.Functions)
			}
			return hasReason(pool.Status.Conditions, v1alpha1.ConditionReady, reason, text)
		})
	}
	agent := func(node string, status metav1.ConditionStatus, reason string) {
		t.Helper()
		c.eventually("XPUNode "+node+" is "+reason, func() error {
			found := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: node}}
			if err := c.get(found); err != nil {
				return err
			}
			ready := meta.FindStatusCondition(found.Status.Conditions, v1alpha1.ConditionAgentReady)
			if ready == nil || ready.Status != status || ready.Reason != reason {
				return fmt.Errorf("condition %+v", ready)
			}
			return nil
		})
	}

	// Nobody has ever been seen on the nodes.
	says(v1alpha1.ReasonAgentAway, "node "+n1+": no xpu-agent runs there", 0)
	agent(n1, metav1.ConditionFalse, v1alpha1.ReasonAgentAway)

	one, two := c.agentPod(n1), c.agentPod(n2)
	says(v1alpha1.ReasonPublished, "12 Functions on 2 nodes", 12)
	agent(n1, metav1.ConditionTrue, v1alpha1.ReasonRunning)

	// One that is not ready is away, and one of a node is enough.
	c.setReady(one, corev1.ConditionFalse)
	says(v1alpha1.ReasonPublished, "of which 8 cannot be used now: node "+n1, 4)
	c.setReady(one, corev1.ConditionTrue)
	says(v1alpha1.ReasonPublished, "12 Functions on 2 nodes", 12)

	// An agent that does not say where it runs is not judged.
	older := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: n1}}
	c.change(older, func() { older.Status.Agent = nil })
	c.eventually("the condition is gone", func() error {
		if err := c.get(older); err != nil {
			return err
		}
		if meta.FindStatusCondition(older.Status.Conditions, v1alpha1.ConditionAgentReady) != nil {
			return fmt.Errorf("conditions %+v", older.Status.Conditions)
		}
		return nil
	})
	c.change(older, func() {
		older.Status.Agent = &v1alpha1.XPUNodeAgent{Version: "v1", Namespace: c.namespace}
	})

	c.deletePod(two)
	says(v1alpha1.ReasonPublished, "of which 4 cannot be used now: node "+n2, 8)
	agent(n2, metav1.ConditionFalse, v1alpha1.ReasonAgentAway)
	agent(n1, metav1.ConditionTrue, v1alpha1.ReasonRunning)
}
