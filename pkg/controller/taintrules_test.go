// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/xpus"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// mayTaint gives the controller the rights of deploy/controller/taint-rules.yaml, or only those
// verbs.
func (c *cluster) mayTaint(only ...string) {
	c.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "controller", "taint-rules.yaml"))
	must.Succeed(c, err)
	role := &rbacv1.ClusterRole{}
	first, _, _ := strings.Cut(string(text), "\n---\n")
	must.Succeed(c, yaml.UnmarshalStrict([]byte(first), role))
	role.ObjectMeta = metav1.ObjectMeta{Name: c.namespace + "-taints"}
	if len(only) > 0 {
		role.Rules[0].Verbs = only
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: role.ObjectMeta,
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name,
		},
		Subjects: []rbacv1.Subject{
			{APIGroup: rbacv1.GroupName, Kind: "User", Name: controllerUserName},
		},
	}
	c.create(role)
	c.create(binding)
	c.Cleanup(func() {
		c.delete(binding)
		c.delete(role)
		must.Succeed(c, c.DeleteAllOf(context.Background(), &resourceapi.DeviceTaintRule{}))
	})
}

// reportsPF has the node report a PF and DevicePools.
func (c *cluster) reportsPF(pools ...string) {
	c.Helper()
	var reported []v1alpha1.XPUNodePool
	for _, pool := range pools {
		reported = append(reported, v1alpha1.XPUNodePool{Name: pool})
	}
	c.create(&v1alpha1.XPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: c.node},
		Status: v1alpha1.XPUNodeStatus{
			PFs:   []v1alpha1.XPUNodePF{{Address: string(testPF)}},
			Pools: reported,
		},
	})
}

// rules returns the DeviceTaintRules of the cluster by name.
func (c *cluster) rules() map[string]resourceapi.DeviceTaintRule {
	c.Helper()
	var all resourceapi.DeviceTaintRuleList
	must.Succeed(c, c.List(context.Background(), &all))
	found := map[string]resourceapi.DeviceTaintRule{}
	for _, rule := range all.Items {
		found[rule.Name] = rule
	}
	return found
}

// hasRules waits until the XPU has this many rules, and returns the last one.
func (c *cluster) hasRules(xpu *v1alpha1.XPU, want int) (last resourceapi.DeviceTaintRule) {
	c.Helper()
	c.eventually(fmt.Sprintf("XPU %s has %d rules", xpu.Name, want), func() error {
		found := 0
		for _, rule := range c.rules() {
			if metav1.IsControlledBy(&rule, xpu) {
				found++
				last = rule
			}
		}
		if found != want {
			return fmt.Errorf("it has %d", found)
		}
		return nil
	})
	return last
}

// TestTaintRules: the devices of an XPU are tainted when its OPI agent has not answered for the
// grace, and not before. The rule goes when the agent answers, also if the controller ended in
// between. Rules of others stay.
func TestTaintRules(t *testing.T) {
	agent := opitest.Start(t)
	tainting := func(o *Options) { o.TaintRulesAfter = new(2 * time.Second) }
	c := newCluster(t, tainting)
	c.mayTaint()
	c.pool("fast", "")
	c.reportsPF("fast")
	x := c.xpu("card-1", agent)
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	must.Succeed(t, c.get(x))

	// A rule that only looks like the XPU's.
	theirs := &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "theirs",
			Labels: map[string]string{xpus.LabelXPU: string(x.UID)}},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new("gpu.example.com")},
			Taint: resourceapi.DeviceTaint{Key: "example.com/broken",
				Effect: resourceapi.DeviceTaintEffectNoSchedule},
		},
	}
	c.create(theirs)

	agent.Kill()
	begin := time.Now()
	c.xpuReason(x, v1alpha1.ReasonXPUUnavailable, "")
	rule := c.hasRules(x, 1)
	if early := time.Since(begin); early < 2*time.Second {
		t.Errorf("tainted after %s", early)
	}
	id := claim.PoolID{Node: c.node, PF: testPF, DevicePool: "fast"}
	if s := rule.Spec.DeviceSelector; *s.Driver != v1alpha1.GroupName || *s.Pool != id.String() ||
		s.Device != nil {
		t.Errorf("the rule selects %+v", s)
	}
	if taint := rule.Spec.Taint; taint.Key != v1alpha1.TaintXPUAway ||
		taint.Effect != resourceapi.DeviceTaintEffectNoSchedule {
		t.Errorf("taint %+v", taint)
	}

	// A controller that starts does not know how long the agent has been away. It leaves the rule,
	// and makes it anew once, because somebody changed it.
	c.stop()
	rule.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
	must.Succeed(t, c.Update(context.Background(), &rule))
	c.writes.reset()
	c.start(tainting)
	c.eventually("the rule is what it was", func() error {
		if again := c.hasRules(x, 1); again.Spec.Taint.Effect != "NoSchedule" {
			return fmt.Errorf("effect %s", again.Spec.Taint.Effect)
		}
		return nil
	})
	if diff := cmp.Diff([]string{"delete DeviceTaintRule", "create DeviceTaintRule"},
		c.writes.of("DeviceTaintRule")); diff != "" {
		t.Errorf("writes -want +got:\n%s", diff)
	}

	// The controller ends, and the agent is back before the next one starts.
	c.stop()
	must.Succeed(t, agent.Run())
	c.start(tainting)
	c.hasRules(x, 0)
	if len(c.rules()) != 1 {
		t.Errorf("rules %v, want that of somebody else", c.rules())
	}

	agent.Kill()
	c.hasRules(x, 1)
	must.Succeed(t, agent.Run())
	c.hasRules(x, 0)

	agent.Kill()
	c.hasRules(x, 1)
	c.delete(x)
	c.hasRules(x, 0)
	c.gone(x)
}

// creates waits until the controller has tried to create a rule.
func (c *cluster) creates() {
	c.Helper()
	c.eventually("the controller has tried to create a rule", func() error {
		if made := c.writes.of("DeviceTaintRule"); !slices.Contains(made,
			"create DeviceTaintRule") {
			return fmt.Errorf("writes %q", made)
		}
		return nil
	})
}

// TestTaintRulesWithoutRights: a controller whose role is older works on.
func TestTaintRulesWithoutRights(t *testing.T) {
	agent := opitest.Start(t)
	c := newCluster(t, func(o *Options) { o.TaintRulesAfter = new(time.Millisecond) })
	c.mayTaint("list")
	c.pool("fast", "")
	c.reportsPF("fast")
	x := c.xpu("card-1", agent)
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	agent.Kill()
	c.creates()
	must.Succeed(t, agent.Run())
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	if rules := c.rules(); len(rules) > 0 {
		t.Errorf("rules %v", rules)
	}
}

// TestNameOfAnothersRule: a rule of the name that the XPU's would have stays as it is.
func TestNameOfAnothersRule(t *testing.T) {
	agent := opitest.Start(t)
	c := newCluster(t, func(o *Options) { o.TaintRulesAfter = new(time.Millisecond) })
	c.mayTaint()
	c.pool("fast", "")
	c.reportsPF("fast")
	x := c.xpu("card-1", agent)
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	agent.Kill()
	rule := c.hasRules(x, 1)
	must.Succeed(t, agent.Run())
	c.hasRules(x, 0)

	rule.ObjectMeta = metav1.ObjectMeta{Name: rule.Name}
	c.create(&rule)
	c.writes.reset()
	agent.Kill()
	c.creates()
	must.Succeed(t, agent.Run())
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	if err := c.get(&rule); err != nil || len(rule.OwnerReferences) > 0 {
		t.Errorf("the rule of somebody else: %+v, %v", rule.ObjectMeta, err)
	}
}

// TestTaintRulesStay: the rules of an XPU that is away stay while its node reports less than before,
// and after the controller started again. They go when another XPU serves the PF, or when they are
// turned off.
func TestTaintRulesStay(t *testing.T) {
	agent := opitest.Start(t)
	tainting := func(o *Options) { o.TaintRulesAfter = new(time.Millisecond) }
	c := newCluster(t, tainting)
	c.mayTaint()
	c.pool("fast", "")
	c.create(&v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: c.namespace + "-plugin"},
		Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDevicePlugin,
			Selectors: []v1alpha1.FunctionSelector{{Vendors: []string{"15b3"}}}},
	})
	c.reportsPF("fast", c.namespace+"-plugin")
	x := c.xpu("card-1", agent)
	c.xpuReason(x, v1alpha1.ReasonConnected, "")
	agent.Kill()
	c.hasRules(x, 1)

	// The card resets: the node does not report the PF, and then nothing at all. A controller that
	// starts looks at the rules, and mends one that somebody changed, which shows that it has looked.
	for _, reset := range []func(){
		func() {
			node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: c.node}}
			must.Succeed(t, c.get(node))
			node.Status.PFs = nil
			must.Succeed(t, c.Update(context.Background(), node))
		},
		func() { c.delete(&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: c.node}}) },
	} {
		c.stop()
		reset()
		rule := c.hasRules(x, 1)
		rule.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
		must.Succeed(t, c.Update(context.Background(), &rule))
		c.start(tainting)
		c.eventually("the rule is what it was", func() error {
			if again := c.hasRules(x, 1); again.Spec.Taint.Effect != "NoSchedule" {
				return fmt.Errorf("effect %s", again.Spec.Taint.Effect)
			}
			return nil
		})
	}

	c.stop()
	c.start(func(o *Options) { o.TaintRulesAfter = new(time.Duration(0)) })
	c.hasRules(x, 0)
}

// TestTaintRulesOfTenant: in a tenant cluster the devices of an XPU are tainted when the infra
// cluster says that it has failed to reach the agent for long enough. Time that only passes taints
// nothing, and neither does what a broker that is away has said before.
func TestTaintRulesOfTenant(t *testing.T) {
	c := newCluster(t, func(o *Options) {
		o.Role, o.TaintRulesAfter, o.BrokerGrace = RoleTenant, new(5*time.Minute), time.Hour
	})
	c.watchesLeases()
	c.mayTaint()
	c.pool("fast", "")
	c.reportsPF("fast")
	x := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-1"},
		Spec: v1alpha1.XPUSpec{NodeName: c.node}}
	c.create(x)
	says := func(reason string, away time.Duration) {
		t.Helper()
		x.Status.AwaySeconds = int32(away.Seconds())
		x.Status.Conditions = []metav1.Condition{
			reconciling.NewCondition(v1alpha1.ConditionReady, x.Generation, reason, "as it is"),
		}
		x.Status.Conditions[0].LastTransitionTime = metav1.NewTime(time.Now().Add(-time.Hour))
		must.Succeed(t, c.Status().Update(context.Background(), x))
	}

	says(v1alpha1.ReasonXPUUnavailable, 4*time.Minute)
	says(v1alpha1.ReasonBrokerAway, 10*time.Minute)
	says(v1alpha1.ReasonXPUUnavailable, 0)
	says(v1alpha1.ReasonXPUUnavailable, 5*time.Minute)
	rule := c.hasRules(x, 1)
	id := claim.PoolID{Node: c.node, PF: testPF, DevicePool: "fast"}
	if s := rule.Spec.DeviceSelector; *s.Pool != id.String() {
		t.Errorf("the rule selects %+v", s)
	}
	if diff := cmp.Diff([]string{"create DeviceTaintRule"},
		c.writes.of("DeviceTaintRule")); diff != "" {
		t.Errorf("writes -want +got:\n%s", diff)
	}

	says(v1alpha1.ReasonConnected, 0)
	c.hasRules(x, 0)
}
