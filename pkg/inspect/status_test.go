// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// installed returns what a cluster with two nodes and one pool has, and in which nothing is wrong.
func installed() (*appsv1.DaemonSet, *appsv1.Deployment, *coordinationv1.Lease, *v1alpha1.XPUNode,
	*v1alpha1.DevicePool,
) {
	agents := &appsv1.DaemonSet{ObjectMeta: named(inspect.AgentNamespace, "xpu-agent")}
	agents.Status = appsv1.DaemonSetStatus{
		DesiredNumberScheduled: 2, NumberReady: 2, UpdatedNumberScheduled: 2,
	}
	controller := &appsv1.Deployment{ObjectMeta: named(inspect.AgentNamespace, "xpu-controller")}
	controller.Status = appsv1.DeploymentStatus{Replicas: 1, ReadyReplicas: 1, UpdatedReplicas: 1}
	lease := &coordinationv1.Lease{
		ObjectMeta: named(inspect.AgentNamespace, "xpu-controller"),
		Spec:       coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: now}},
	}
	node := &v1alpha1.XPUNode{ObjectMeta: named("", "node1"), Status: v1alpha1.XPUNodeStatus{
		Functions: 16, Agent: &v1alpha1.XPUNodeAgent{Version: "v1"},
	}}
	pool := &v1alpha1.DevicePool{ObjectMeta: named("", "fast"), Status: v1alpha1.DevicePoolStatus{
		Functions: 16, Healthy: 16,
		Conditions: ready(metav1.ConditionTrue, v1alpha1.ReasonPublished, "16 Functions"),
	}}
	return agents, controller, lease, node, pool
}

// TestStatus: what is wrong or cannot be read is said, and is not good.
func TestStatus(t *testing.T) {
	for name, test := range map[string]struct {
		change func(*appsv1.DaemonSet, *appsv1.Deployment, *coordinationv1.Lease, *v1alpha1.XPUNode,
			*v1alpha1.DevicePool)
		listing error
		good    bool
		want    string // in the text
	}{
		"all is well": {nil, nil, true,
			"XPUNodes         Good    1, with 16 Functions; agents: 1 with v1"},
		"an agent is not ready": {func(agents *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, _ *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			agents.Status.NumberReady = 1
		}, nil, false, "xpu-agent        Bad     ready on 1 of 2 nodes"},
		"an update is under way": {func(agents *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, _ *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			agents.Status.UpdatedNumberScheduled = 1
		}, nil, false, "ready on 2 of 2 nodes, 1 of them with the present version"},
		"an update has not begun": {func(agents *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, _ *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			agents.Generation = 2
		}, nil, false, "ready on 2 of 2 nodes; a change has not begun yet"},
		"the new controller does not start": {func(_ *appsv1.DaemonSet,
			controller *appsv1.Deployment, _ *coordinationv1.Lease, _ *v1alpha1.XPUNode,
			_ *v1alpha1.DevicePool,
		) {
			controller.Status.Replicas = 2
		}, nil, false, "1 of 1 replicas are ready, 1 of them with the present version"},
		"no controller": {func(_ *appsv1.DaemonSet, controller *appsv1.Deployment,
			lease *coordinationv1.Lease, _ *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			controller.Status = appsv1.DeploymentStatus{}
			lease.Spec.RenewTime.Time = now.Add(-time.Hour)
		}, nil, false, "  xpu-controller has not run for 60m"},
		"a pool": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment, _ *coordinationv1.Lease,
			_ *v1alpha1.XPUNode, pool *v1alpha1.DevicePool,
		) {
			pool.Status.Conditions = ready(metav1.ConditionFalse, v1alpha1.ReasonUnhealthy, "no link")
		}, nil, false, "  fast: Ready Unhealthy: no link"},
		"a pool lacks VFs": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment, _ *coordinationv1.Lease,
			_ *v1alpha1.XPUNode, pool *v1alpha1.DevicePool,
		) {
			pool.Status.Conditions = append(pool.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionSupplied, Status: metav1.ConditionFalse,
				Reason: v1alpha1.ReasonBusy, Message: "node node1: VFs are in use",
			})
		}, nil, false, "  fast: Supplied Busy: node node1: VFs are in use"},
		"a pool's change is not taken up": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, _ *v1alpha1.XPUNode, pool *v1alpha1.DevicePool,
		) {
			pool.Generation, pool.Status.Conditions[0].ObservedGeneration = 2, 1
		}, nil, false, "  fast: its last change has not been taken up yet"},
		"a pool of which other conditions are known only": {func(_ *appsv1.DaemonSet,
			_ *appsv1.Deployment, _ *coordinationv1.Lease, _ *v1alpha1.XPUNode,
			pool *v1alpha1.DevicePool,
		) {
			pool.Status.Conditions[0].Type = v1alpha1.ConditionSupplied
		}, nil, false, "  fast: it is not known whether it is ready"},
		"a pool in a cluster without a feature": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, _ *v1alpha1.XPUNode, pool *v1alpha1.DevicePool,
		) {
			pool.Status.Conditions = append(pool.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionSupported, Status: metav1.ConditionFalse,
				Reason: v1alpha1.ReasonFeatureMissing, Message: "a gate is off",
			})
		}, nil, true, "DevicePools      Good    1 of 1 are ready"},
		"an agent is away": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, node *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			node.Status.Conditions = []metav1.Condition{{
				Type: v1alpha1.ConditionAgentReady, Status: metav1.ConditionFalse,
				Reason: v1alpha1.ReasonAgentAway, Message: "no pod is ready",
			}}
		}, nil, false, "  node1: AgentReady AgentAway: no pod is ready"},
		"nobody knows of an agent": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, node *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			node.Status.Conditions = []metav1.Condition{{
				Type: v1alpha1.ConditionAgentReady, Status: metav1.ConditionUnknown,
				Reason: v1alpha1.ReasonAgentAway, Message: "nobody has said",
			}}
		}, nil, false, "  node1: AgentReady AgentAway: nobody has said"},
		"an inventory was not compared": {func(_ *appsv1.DaemonSet, _ *appsv1.Deployment,
			_ *coordinationv1.Lease, node *v1alpha1.XPUNode, _ *v1alpha1.DevicePool,
		) {
			node.Status.Conditions = append(node.Status.Conditions, metav1.Condition{
				Type: v1alpha1.ConditionInventoryVerified, Status: metav1.ConditionUnknown,
				Reason: v1alpha1.ReasonNotVerified, Message: "there is no result",
			})
		}, nil, true, "XPUNodes         Good"},
		"direct mode": {nil, &meta.NoKindMatchError{}, true, "no such kind: direct mode"},
		"no right": {nil, apierrors.NewForbidden(schema.GroupResource{}, "", nil), false,
			"DevicePools      Unknown   you may not read it"},
	} {
		t.Run(name, func(t *testing.T) {
			agents, controller, lease, node, pool := installed()
			if test.change != nil {
				test.change(agents, controller, lease, node, pool)
			}

			refuse := interceptor.Funcs{List: func(ctx context.Context, w client.WithWatch,
				list client.ObjectList, options ...client.ListOption,
			) error {
				if test.listing != nil {
					return test.listing
				}
				return w.List(ctx, list, options...)
			}}
			reader := builder(t, agents, controller, lease, node, pool).
				WithInterceptorFuncs(refuse).Build()
			got, err := inspect.Status(t.Context(), reader, inspect.AgentNamespace, now)
			must.Succeed(t, err)

			var text strings.Builder
			must.Succeed(t, got.Table().Write(&text, true))
			if got.Good() != test.good || !strings.Contains(text.String(), test.want) {
				t.Errorf("good: %t, want %q in\n%s", got.Good(), test.want, &text)
			}
		})
	}
}

// TestStatusOfNothing: a cluster in which nothing is installed is not good.
func TestStatusOfNothing(t *testing.T) {
	got, err := inspect.Status(t.Context(), reader(t), inspect.AgentNamespace, now)
	must.Succeed(t, err)
	if got.Good() || !strings.Contains(got.Parts[0].Notes[0], "is not installed") {
		t.Errorf("good: %t, %+v", got.Good(), got.Parts[0])
	}
}
