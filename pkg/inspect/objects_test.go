// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
)

var now = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name, CreationTimestamp: metav1.NewTime(now.Add(-time.Hour)),
	}
}

func ready(status metav1.ConditionStatus, reason, message string) []metav1.Condition {
	return []metav1.Condition{
		{Type: v1alpha1.ConditionReady, Status: status, Reason: reason, Message: message},
	}
}

func reader(t *testing.T, objects ...client.Object) client.Reader {
	t.Helper()
	return builder(t, objects...).Build()
}

func builder(t *testing.T, objects ...client.Object) *fake.ClientBuilder {
	t.Helper()
	scheme := runtime.NewScheme()
	builder := runtime.NewSchemeBuilder(corev1.AddToScheme, coordinationv1.AddToScheme,
		appsv1.AddToScheme, resourceapi.AddToScheme, v1alpha1.AddToScheme)
	if err := builder.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	return fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...)
}

// want compares a table with the expected text.
func want(t *testing.T, table inspect.Table, err error, wide bool, text string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}

	var out bytes.Buffer
	if err := table.Write(&out, wide); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.TrimPrefix(text, "\n"), out.String()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestPools(t *testing.T) {
	allocated := &resourceapi.ResourceClaim{ObjectMeta: named("default", "c")}
	allocated.Status.Allocation = &resourceapi.AllocationResult{}
	allocated.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{
		{Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast", Device: "0000-3b-01-0"},
		{Driver: v1alpha1.GroupName, Pool: "node1/0000-3b-00-0/fast", Device: "0000-3b-01-1",
			AdminAccess: new(true)},
		{Driver: "gpu.example.com", Pool: "node1/0000-3b-00-0/fast", Device: "gpu-0"},
	}

	fast := &v1alpha1.DevicePool{
		ObjectMeta: named("", "fast"),
		Spec: v1alpha1.DevicePoolSpec{
			Publish: v1alpha1.PublishDRA, Provision: v1alpha1.ProvisionBeforeBind, Network: "blue",
		},
		Status: v1alpha1.DevicePoolStatus{
			NodeCount: 1, Functions: 16, Healthy: 14,
			Conditions: ready(metav1.ConditionFalse, "Unhealthy",
				"2 of 16 Functions have problems"),
		},
	}

	fast.Generation = 3
	plain := &v1alpha1.DevicePool{ObjectMeta: named("", "plain"), Spec: v1alpha1.DevicePoolSpec{
		Publish: v1alpha1.PublishDevicePlugin, DevicePlugin: &v1alpha1.DevicePluginSpec{
			ResourceName: "nics", ProvisionAt: v1alpha1.ProvisionAtAdd,
		},
	}}

	node := &v1alpha1.XPUNode{ObjectMeta: named("", "node1"),
		Status: v1alpha1.XPUNodeStatus{Pools: []v1alpha1.XPUNodePool{{
			Name: "fast", ObservedGeneration: 2, Functions: 16,
			Problems: []v1alpha1.FunctionProblem{{Functions: 2, Message: "PF ens3f0 has no link"}},
			Shortages: []v1alpha1.Shortage{
				{PF: "0000:3b:00.1", Reason: "OutOfRange", Message: "has 8 VFs at most"},
			},
			Overlapping: []string{"0000:3b:02.0 in plain"},
		}}}}

	pod := func(name, node string, phase corev1.PodPhase) *corev1.Pod {
		const nics = "xpu.opiproject.org/nics"
		asks := corev1.ResourceRequirements{
			Requests: corev1.ResourceList{nics: resource.MustParse("2"), "cpu": resource.MustParse("1")},
		}
		return &corev1.Pod{
			ObjectMeta: named("default", name), Status: corev1.PodStatus{Phase: phase},
			Spec: corev1.PodSpec{
				NodeName: node, Containers: []corev1.Container{{Name: "c", Resources: asks}},
			},
		}
	}

	_, table, err := inspect.Pools(t.Context(), reader(t, fast, plain, node, allocated,
		pod("runs", "node1", corev1.PodRunning), pod("starts", "node2", corev1.PodPending),
		pod("waits", "", corev1.PodPending), pod("ended", "node1", corev1.PodSucceeded),
		pod("failed", "node1", corev1.PodFailed)), now)
	want(t, table, err, true, `
NAME    PUBLISH        PROVISION    NETWORK   NODES   FUNCTIONS   HEALTHY   ALLOCATED   READY     AGE   PRIORITY   RESOURCE
fast    DRA            BeforeBind   blue      1       16          14        1           False     60m   -          -
  Ready Unhealthy: 2 of 16 Functions have problems
  node node1: xpu-agent has not taken the last change of the DevicePool up; is it running there?
  node node1: 2 of 16 Functions: PF ens3f0 has no link
  node node1: PF 0000:3b:00.1: OutOfRange: has 8 VFs at most
  node node1: other pools have 0000:3b:02.0 in plain
plain   DevicePlugin   Add          -         0       0           0         4           Unknown   60m   -          xpu.opiproject.org/nics
  nobody has looked at it yet: is xpu-controller running?
`)

	noPods := builder(t, plain).WithInterceptorFuncs(interceptor.Funcs{
		List: func(
			ctx context.Context, c client.WithWatch, list client.ObjectList, o ...client.ListOption,
		) error {
			if _, isPods := list.(*corev1.PodList); isPods {
				return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", nil)
			}
			return c.List(ctx, list, o...)
		},
	}).Build()
	_, table, err = inspect.Pools(t.Context(), noPods, now)
	want(t, table, err, false, `
NAME    PUBLISH        PROVISION   NETWORK   NODES   FUNCTIONS   HEALTHY   ALLOCATED   READY     AGE
plain   DevicePlugin   Add         -         0       0           0         ?           Unknown   60m
  nobody has looked at it yet: is xpu-controller running?
  how many are allocated is not known, because you may not list pods
`)

	_, table, err = inspect.Pools(t.Context(), reader(t), now)
	want(t, table, err, false, "There are no DevicePools: no Function is offered to pods. See "+
		"docs/tutorial/first-pod.md.\n")
}

func TestPorts(t *testing.T) {
	port := func(
		namespace, name string, spec v1alpha1.XPUPortSpec, conditions []metav1.Condition,
	) *v1alpha1.XPUPort {
		spec.NodeName, spec.XPU, spec.Network, spec.MAC = "node1", "xpu-1", "blue", "02:00:00:00:00:01"
		return &v1alpha1.XPUPort{
			ObjectMeta: named(namespace, name), Spec: spec,
			Status: v1alpha1.XPUPortStatus{Conditions: conditions},
		}
	}

	up := port("default", "node1-0000-3b-01-0", v1alpha1.XPUPortSpec{
		Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:01.0"},
		Claim:    v1alpha1.ClaimRef{Name: "web-nic"},
	}, ready(metav1.ConditionTrue, "Up", ""))

	up.Status.Pod, up.Status.Addresses, up.Status.BridgePort = "web", []string{
		"10.1.0.2/24",
	}, "vf-0000-3b-01-0"

	going := port("default", "node1-0000-3b-01-1", v1alpha1.XPUPortSpec{
		Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:00.0", Subfunction: new(int64(88))},
		Claim:    v1alpha1.ClaimRef{Name: "old"},
	}, ready(metav1.ConditionFalse, "Releasing", "the OPI agent of XPU xpu-1 cannot be reached"))

	going.DeletionTimestamp, going.Finalizers = &metav1.Time{Time: now}, []string{
		v1alpha1.FinalizerPort,
	}

	other := port("xpu-system", "node1-0000-3b-01-2", v1alpha1.XPUPortSpec{
		Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:01.2"},
		Pod:      &v1alpha1.PodRef{Namespace: "shop", Name: "cart"},
	}, ready(metav1.ConditionTrue, "Up", ""))

	ahead := port("xpu-system", "node1-0000-3b-01-3-ahead", v1alpha1.XPUPortSpec{
		Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:01.3"}, Ahead: true,
	}, ready(metav1.ConditionTrue, "Up", ""))
	trunk := port("default", "node1-0000-3b-01-4", v1alpha1.XPUPortSpec{
		Function: v1alpha1.FunctionRef{PCIAddress: "0000:3b:01.4"},
		Claim:    v1alpha1.ClaimRef{Name: "trunk"},
	}, ready(metav1.ConditionTrue, "Up", ""))
	trunk.Spec.Network, trunk.Spec.Networks = "", []v1alpha1.XPUPortNetwork{
		{Name: "blue"}, {Name: "red"},
	}
	trunk.Status.Networks = []v1alpha1.XPUPortNetworkStatus{
		{Name: "blue", VLAN: 10, Addresses: []string{"10.1.0.3/24"}},
		{Name: "red", VLAN: 20, Addresses: []string{"10.2.0.3/24"}},
	}
	_, table, err := inspect.Ports(t.Context(), reader(t, trunk), "", now)
	want(t, table, err, false, `
NAMESPACE   NAME                 NODE    FUNCTION       NETWORK    FOR           ADDRESSES                 READY   AGE
default     node1-0000-3b-01-4   node1   0000:3b:01.4   blue,red   claim trunk   10.1.0.3/24,10.2.0.3/24   True    60m
`)

	all := reader(t, up, going, other, ahead)
	_, table, err = inspect.Ports(t.Context(), all, "", now)
	want(t, table, err, false, `
NAMESPACE    NAME                       NODE    FUNCTION            NETWORK   FOR              ADDRESSES     READY   AGE
default      node1-0000-3b-01-0         node1   0000:3b:01.0        blue      pod web          10.1.0.2/24   True    60m
default      node1-0000-3b-01-1         node1   0000:3b:00.0/sf88   blue      claim old        -             False   60m
  Ready Releasing: the OPI agent of XPU xpu-1 cannot be reached
  is being deleted, and is kept by xpu.opiproject.org/port
xpu-system   node1-0000-3b-01-2         node1   0000:3b:01.2        blue      pod shop/cart    -             True    60m
xpu-system   node1-0000-3b-01-3-ahead   node1   0000:3b:01.3        blue      the next claim   -             True    60m
`)

	_, table, err = inspect.Ports(t.Context(), all, "default", now)
	if err != nil || len(table.Rows) != 2 {
		t.Errorf("%d rows of namespace default, %v; want 2", len(table.Rows), err)
	}
}

func TestNetworksAndXPUs(t *testing.T) {
	network := &v1alpha1.XPUNetwork{
		ObjectMeta: named("", "blue"),
		Spec: v1alpha1.XPUNetworkSpec{
			VLAN: 10, VNI: new(int32(10010)), MTU: new(int32(1400)),
			Subnets: []string{"10.1.0.0/24"}, Routed: &v1alpha1.RoutedNetwork{VRF: "tenants"},
			AllowedNamespaces: v1alpha1.AllowedNamespaces{
				From:     v1alpha1.NamespacesFromSelector,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "shop"}},
			},
		},
		Status: v1alpha1.XPUNetworkStatus{
			XPUs: 2, ReadyXPUs: 1,
			Failures: []v1alpha1.XPUNetworkFailure{
				{XPU: "xpu-2", Message: "VLAN 10 is another network's"},
			},
			Conditions: ready(metav1.ConditionFalse, "Failed", "1 of 2 XPUs does not serve it"),
		},
	}

	xpu := &v1alpha1.XPU{
		ObjectMeta: named("", "xpu-1"),
		Spec:       v1alpha1.XPUSpec{Endpoint: "10.0.0.1:50151", Dialect: v1alpha1.DialectEVPNGW},
		Status: v1alpha1.XPUStatus{
			NodeName: "node1", Serial: "MT1", PFs: []v1alpha1.XPUPF{{Address: "0000:3b:00.0"}},
			Foreign: &v1alpha1.XPUForeign{
				Ports: 1, Gateways: 2, VRFs: 3, Examples: []string{"port other", "VRF theirs"},
			},
			Conditions: append(ready(metav1.ConditionTrue, "Connected", ""),
				metav1.Condition{Type: v1alpha1.ConditionCard, Status: metav1.ConditionFalse,
					Reason: "Contradiction", Message: "the card is node2's\x1b[2J"}),
		},
	}

	port := &v1alpha1.XPUPort{
		ObjectMeta: named("default", "p"),
		Spec:       v1alpha1.XPUPortSpec{XPU: "xpu-1", Network: "blue"},
	}

	all := reader(t, network, xpu, port)
	_, table, err := inspect.Networks(t.Context(), all, now)
	want(t, table, err, true, `
NAME   VLAN   VNI     MTU    SUBNETS       PORTS   XPUS   READY   AGE   NAMESPACES   VRF
blue   10     10010   1400   10.1.0.0/24   1       1/2    False   60m   team=shop    tenants
  Ready Failed: 1 of 2 XPUs does not serve it
  XPU xpu-2: VLAN 10 is another network's
`)

	_, table, err = inspect.XPUs(t.Context(), all, now)
	want(t, table, err, true, `
NAME    NODE    ENDPOINT         SERIAL   PORTS UP   READY   AGE   DIALECT   PFS
xpu-1   node1   10.0.0.1:50151   MT1      0/1        True    60m   evpn-gw   0000:3b:00.0
  Card Contradiction: the card is node2's\x1b[2J
  its OPI agent also has 1 ports, 0 networks, 2 gateways and 3 VRFs that are not this cluster's: port other, VRF theirs
`)
}

// TestTableOfOthers checks that foreign text in a cell or note cannot forge further cells or lines.
func TestTableOfOthers(t *testing.T) {
	table := inspect.Table{Header: []string{"NODE", "STATE"}, Rows: []inspect.Row{
		{Cells: []string{"node1\nnode2\tOK", ""}, Notes: []string{"away\r\nnode3   OK"}},
		{Cells: []string{"node4\u202e", "fails\x9b"}},
	}}
	want(t, table, nil, true, `
NODE               STATE
node1\nnode2\tOK   -
  away\r\nnode3   OK
node4\u202e        fails\x9b
`)
}

// TestControllerAway: a leader that has not renewed its Lease is away. Without a Lease nothing is
// known.
func TestControllerAway(t *testing.T) {
	lease := func(renewed time.Time) *coordinationv1.Lease {
		return &coordinationv1.Lease{
			ObjectMeta: named(inspect.AgentNamespace, "xpu-controller"),
			Spec:       coordinationv1.LeaseSpec{RenewTime: &metav1.MicroTime{Time: renewed}},
		}
	}
	for name, test := range map[string]struct {
		objects []client.Object
		want    string
	}{
		"runs": {[]client.Object{lease(now.Add(-10 * time.Second))}, ""},
		"away": {[]client.Object{lease(now.Add(-6 * time.Minute))},
			"xpu-controller has not run for 6m: conditions, and what follows from them, are as old"},
		"no Lease": {nil, ""},
	} {
		got, err := inspect.ControllerAway(t.Context(), reader(t, test.objects...),
			inspect.AgentNamespace, now)
		if err != nil || got != test.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, test.want)
		}
	}
}

// TestNodesOfAgents: a node whose agent is away is among the nodes, because it is asked in vain. In
// direct mode and without rights only agents' pods are known, of which one may not run.
func TestNodesOfAgents(t *testing.T) {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: inspect.AgentNamespace, Name: "xpu-agent-x",
			Labels: map[string]string{"app.kubernetes.io/name": "xpu-agent"}},
		Spec:   corev1.PodSpec{NodeName: "runs"},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	starts := pod.DeepCopy()
	starts.Name, starts.Spec.NodeName, starts.Status.Phase = "xpu-agent-y", "starts", corev1.PodPending
	unscheduled := starts.DeepCopy()
	unscheduled.Name, unscheduled.Spec.NodeName = "xpu-agent-z", ""
	away := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "away"}}
	for name, test := range map[string]struct {
		refused error
		want    string
	}{
		"XPUNodes":     {nil, "away runs starts"},
		"no such kind": {&meta.NoKindMatchError{}, "runs starts"},
		"no right":     {apierrors.NewForbidden(schema.GroupResource{}, "", nil), "runs starts"},
	} {
		reader := builder(t, pod, starts, unscheduled, away).
			WithInterceptorFuncs(interceptor.Funcs{List: func(ctx context.Context,
				w client.WithWatch, list client.ObjectList, options ...client.ListOption,
			) error {
				if _, isNodes := list.(*v1alpha1.XPUNodeList); isNodes && test.refused != nil {
					return test.refused
				}
				return w.List(ctx, list, options...)
			}}).Build()
		agents := inspect.Agents{Reader: reader, Namespace: inspect.AgentNamespace}
		nodes, err := agents.Nodes(t.Context())
		if got := strings.Join(nodes, " "); err != nil || got != test.want {
			t.Errorf("%s: nodes %q, error %v, want %q", name, got, err, test.want)
		}
	}
}
