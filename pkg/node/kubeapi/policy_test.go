// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	c, err := kubeapitest.Client(config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// created creates objects as the administrator, and deletes them when the test ends. It writes the
// nodes of XPUs into their status, as xpu-controller does.
func created(t *testing.T, objects ...client.Object) {
	t.Helper()
	admin := newClient(t, cluster.Admin())
	for _, object := range objects {
		if err := admin.Create(t.Context(), object); err != nil {
			t.Fatal(err)
		}

		if xpu, isXPU := object.(*v1alpha1.XPU); isXPU {
			xpu.Status.NodeName = xpu.Spec.NodeName
			if err := admin.Status().Update(t.Context(), xpu); err != nil {
				t.Fatal(err)
			}
		}

		t.Cleanup(func() {
			if err := admin.Delete(context.WithoutCancel(t.Context()),
				object); client.IgnoreNotFound(err) != nil {
				t.Error(err)
			}
		})
	}
}

func resourceSlice(name, driver, node string) *resourceapi.ResourceSlice {
	return &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{
				Name: node + "/" + name, ResourceSliceCount: 1,
			},
		},
	}
}

// poolOf returns the slice with a pool that has the name of this node.
func poolOf(node string, s *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
	s = s.DeepCopy()
	s.Spec.Pool.Name = node + "/" + s.Name
	return s
}

// TestPoliciesInAnyNamespace checks that the policies hold in every namespace of an installation.
func TestPoliciesInAnyNamespace(t *testing.T) {
	cluster.Need(t)
	const namespace = "network-functions"
	created(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}},
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: namespace},
			RoleRef: rbacv1.RoleRef{
				APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "xpu-agent",
			},
			Subjects: []rbacv1.Subject{
				{Kind: "ServiceAccount", Namespace: namespace, Name: "xpu-agent"},
			},
		}, &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "xpu-agent"},
			RoleRef: rbacv1.RoleRef{
				APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin",
			},
			Subjects: []rbacv1.Subject{
				{Kind: "ServiceAccount", Namespace: namespace, Name: "xpu-agent"},
			},
		})

	agent := newClient(t, cluster.AgentIn(namespace, "policy-a"))
	slice := resourceSlice("policy-4", v1alpha1.GroupName, "policy-a")
	must.Eventually(t, "the role is known", func() bool {
		return agent.Create(t.Context(), slice.DeepCopy(), client.DryRunAll) == nil
	})

	if err := agent.Create(t.Context(),
		resourceSlice("policy-4", v1alpha1.GroupName,
			"policy-b")); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent creates another node's slice: error %v, want the policy's", err)
	}

	own, other := ownPort("policy-a", 5), ownPort("policy-b", 5)
	own.Namespace, other.Namespace = namespace, namespace
	if err := agent.Create(t.Context(), own, client.DryRunAll); err != nil {
		t.Errorf("an agent creates its own XPUPort: %v", err)
	}
	if err := agent.Create(t.Context(), other, client.DryRunAll); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent creates another node's XPUPort: error %v, want the policy's", err)
	}
}

// TestPortsAreTheControllers checks that only xpu-controller creates an XPUPort of a claim, reports
// it as up, and removes its finalizer.
func TestPortsAreTheControllers(t *testing.T) {
	cluster.Need(t)
	created(t, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "policy-tenant"},
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin",
		},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "tenant"}},
	})

	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "tenant", Groups: []string{"system:authenticated"},
	}
	tenant := newClient(t, config)
	must.Eventually(t, "the role is known", func() bool {
		return tenant.List(t.Context(), &v1alpha1.XPUPortList{}) == nil
	})
	if err := tenant.Create(t.Context(),
		port("policy-a", 6, "mine")); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("a tenant creates an XPUPort: error %v, want the policy's", err)
	}

	p := port("policy-a", 6, "ours")
	p.Finalizers = []string{v1alpha1.FinalizerPort}
	created(t, p)

	patch := func(c client.Client, p *v1alpha1.XPUPort, change string) error {
		return c.Patch(t.Context(), p.DeepCopy(),
			client.RawPatch(types.MergePatchType, []byte(change)))
	}

	for what, err := range map[string]error{
		"takes the finalizer away": patch(tenant, p, `{"metadata":{"finalizers":null}}`),
		"adds a finalizer": patch(tenant, p,
			`{"metadata":{"finalizers":["xpu.opiproject.org/port","example.com/mine"]}}`),
		"labels it":    patch(tenant, p, `{"metadata":{"labels":{"a":"b"}}}`),
		"annotates it": patch(tenant, p, `{"metadata":{"annotations":{"a":"b"}}}`),
		"gives it an owner": patch(tenant, p,
			`{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"p","uid":"u"}]}}`),
		"says that it is up": tenant.Status().Patch(t.Context(), p.DeepCopy(),
			client.RawPatch(types.MergePatchType, []byte(`{"status":{"bridgePort":"x"}}`))),
	} {
		if !kubeapitest.DeniedByPolicy(err) {
			t.Errorf("a tenant %s: error %v, want the policy's", what, err)
		}
	}

	admin := newClient(t, cluster.Admin())
	if err := patch(admin, p,
		`{"metadata":{"finalizers":["xpu.opiproject.org/port","example.com/left"]}}`); err != nil {
		t.Fatal(err)
	}
	if err := patch(tenant,
		p, `{"metadata":{"finalizers":["xpu.opiproject.org/port"]}}`); err != nil {
		t.Errorf("somebody takes away a finalizer that is not ours: %v", err)
	}

	config.Impersonate.UserName = "system:serviceaccount:kube-system:generic-garbage-collector"
	config.Impersonate.Groups = []string{
		"system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated",
	}
	if err := patch(newClient(t, config),
		p,
		`{"metadata":{"ownerReferences":null,"finalizers":["xpu.opiproject.org/port","orphan"]}}`); err != nil {
		t.Errorf("the garbage collector: %v", err)
	}

	if err := patch(admin, p, `{"metadata":{"finalizers":null}}`); err != nil {
		t.Errorf("an administrator takes the finalizer away: %v", err)
	}
}

// TestAdministratorsGiveUp checks that neither an agent nor the administrator of a namespace can
// give up a Function.
func TestAdministratorsGiveUp(t *testing.T) {
	cluster.Need(t)
	created(t, xpu("policy-card", "policy-a"), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "policy-namespace-admin"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"},
		Subjects: []rbacv1.Subject{
			{APIGroup: rbacv1.GroupName, Kind: "User", Name: "namespace-admin"},
		},
	})

	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "namespace-admin", Groups: []string{"system:authenticated"},
	}
	patch := client.RawPatch(types.MergePatchType,
		[]byte(`{"spec":{"abandonedFunctions":["0000:3b:02.1"]}}`))
	for who, c := range map[string]client.Client{
		"the administrator of a namespace": newClient(t, config),
		"the node's agent":                 newClient(t, cluster.Agent("policy-a")),
	} {
		card := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "policy-card"}}
		if err := c.Patch(t.Context(), card, patch); !apierrors.IsForbidden(err) {
			t.Errorf("%s gives a Function up: error %v, want it to be forbidden", who, err)
		}
	}

	admin := newClient(t, cluster.Admin())
	must.Succeed(t,
		admin.Patch(t.Context(), &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "policy-card"}},
			patch))
	wrong := client.RawPatch(types.MergePatchType,
		[]byte(`{"spec":{"abandonedFunctions":["all"]}}`))
	err := admin.Patch(t.Context(),
		&v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "policy-card"}}, wrong)
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.abandonedFunctions[0]") {
		t.Errorf("error %v, want one that names the field", err)
	}
}

func TestAgentsWriteTheirOwnSlicesOnly(t *testing.T) {
	cluster.Need(t)
	own, other := newClient(t, cluster.Agent("policy-a")), newClient(t, cluster.Agent("policy-b"))
	unbound := newClient(t, cluster.Agent(""))

	taint := func(s *resourceapi.ResourceSlice) *resourceapi.ResourceSlice {
		s = s.DeepCopy()
		s.Spec.Pool.Generation++
		return s
	}

	slice := resourceSlice("policy-1", v1alpha1.GroupName, "policy-a")
	for name, err := range map[string]error{
		"creates another node's": other.Create(t.Context(),
			slice.DeepCopy()),
		"creates one although its token is bound to no node": unbound.Create(t.Context(),
			slice.DeepCopy()),
		"creates another driver's": own.Create(t.Context(),
			resourceSlice("policy-2", "gpu.example.com", "policy-a")),
		"names the pool after another node": own.Create(t.Context(),
			poolOf("policy-b", slice)),
		"names the pool after a node of a similar name": own.Create(t.Context(),
			poolOf("policy-ab", slice)),
	} {
		if !kubeapitest.DeniedByPolicy(err) {
			t.Errorf("an agent that %s: error %v, want the policy's", name, err)
		}
	}

	if err := other.Create(t.Context(), slice.DeepCopy()); err == nil ||
		!strings.Contains(err.Error(),
			`an xpu-agent on node "policy-b" may only write ResourceSlices of that node`) {
		t.Errorf("error %v, want one that says what is allowed", err)
	}

	if err := own.Create(t.Context(), slice); err != nil {
		t.Fatalf("an agent creates its own: %v", err)
	}
	if err := other.Update(t.Context(), taint(slice)); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent updates another node's: error %v, want the policy's", err)
	}
	if err := other.Delete(t.Context(), slice); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent deletes another node's: error %v, want the policy's", err)
	}
	if err := own.Update(t.Context(), taint(slice)); err != nil {
		t.Errorf("an agent updates its own: %v", err)
	}
	if err := own.Delete(t.Context(), slice); err != nil {
		t.Errorf("an agent deletes its own: %v", err)
	}

	admin := newClient(t, cluster.Admin())
	created(t, resourceSlice("policy-3", "gpu.example.com", "policy-b"))
	if err := admin.Get(t.Context(), client.ObjectKey{Name: "policy-3"},
		&resourceapi.ResourceSlice{}); err != nil {
		t.Errorf("others are not concerned: %v", err)
	}
}

func TestAgentsWriteTheirOwnXPUNodeOnly(t *testing.T) {
	cluster.Need(t)
	node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "policy-a"}}
	own, other, unbound := newClient(t, cluster.Agent("policy-a")), newClient(t,
		cluster.Agent("policy-b")), newClient(t, cluster.Agent(""))

	change := func(c client.Client) error {
		return c.Patch(t.Context(), node.DeepCopy(),
			client.RawPatch(types.MergePatchType, []byte(`{"status": {"functions": 7}}`)))
	}

	const message = `an xpu-agent on node "policy-b" may only write the XPUNode of that node`
	if err := other.Create(t.Context(), node.DeepCopy()); !kubeapitest.DeniedByPolicy(err) ||
		!strings.Contains(err.Error(), message) {
		t.Errorf("an agent creates another node's: error %v, want the policy's", err)
	}
	if err := unbound.Create(t.Context(), node.DeepCopy()); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent whose token is bound to no node creates one: error %v, want the "+
			"policy's", err)
	}

	must.Succeed(t, own.Create(t.Context(), node.DeepCopy()))
	t.Cleanup(func() {
		_ = newClient(t, cluster.Admin()).Delete(context.WithoutCancel(t.Context()), node)
	})

	must.Succeed(t, change(own))
	if err := change(other); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent changes another node's: error %v, want the policy's", err)
	}

	pool := devicePool("policy-pool")
	created(t, pool)

	for _, status := range []string{
		`{"spec": {"network": "mine"}}`, `{"status": {"functions": 7}}`,
	} {
		patch := client.RawPatch(types.MergePatchType, []byte(status))
		for _, err := range []error{
			own.Patch(t.Context(), pool.DeepCopy(), patch),
			own.Status().Patch(t.Context(), pool.DeepCopy(), patch),
		} {
			if !apierrors.IsForbidden(err) {
				t.Errorf("an agent writes %s of a DevicePool: error %v, want it to be forbidden",
					status, err)
			}
		}
	}
}

// TestAgentsWriteClaimsOfTheirNodeOnly checks the rule of KEP-4817.
func TestAgentsWriteClaimsOfTheirNodeOnly(t *testing.T) {
	cluster.Need(t)
	const slicePool, device = "policy-a/0000-3b-00-0/fast", "0000-3b-00-2"
	created(t, resourceClaim("policy-claim"))
	admin := newClient(t, cluster.Admin())
	var c resourceapi.ResourceClaim
	if err := admin.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "policy-claim"},
		&c); err != nil {
		t.Fatal(err)
	}

	c.Status.Allocation = &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "nic", Driver: v1alpha1.GroupName, Pool: slicePool, Device: device},
		}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
			MatchFields: []corev1.NodeSelectorRequirement{
				{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn,
					Values: []string{"policy-a"}},
			},
		}}},
	}

	if err := admin.Status().Update(t.Context(), &c); err != nil {
		t.Fatal(err)
	}

	write := func(node string) error {
		changed := c.DeepCopy()
		changed.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
			Driver: v1alpha1.GroupName, Pool: slicePool, Device: device,
			NetworkData: &resourceapi.NetworkDeviceData{InterfaceName: "net1"},
		}}
		return newClient(t, cluster.Agent(node)).Status().Update(t.Context(), changed)
	}

	for _, node := range []string{"policy-b", ""} {
		if err := write(node); err == nil ||
			!strings.Contains(err.Error(), "changing status.devices requires") {
			t.Errorf("the agent of node %q: error %v, want it to lack the permission", node, err)
		}
	}

	if err := write("policy-a"); err != nil {
		t.Errorf("the agent of the claim's node: %v", err)
	}
}

// ownPort returns the XPUPort of VF index of a node that the node's agent makes.
func ownPort(node string, index int) *v1alpha1.XPUPort {
	p := port(node, index, "")
	p.Namespace, p.Finalizers, p.Spec.Claim = kubeapitest.AgentNamespace, []string{
		v1alpha1.FinalizerPort,
	}, v1alpha1.ClaimRef{}
	return p
}

func TestAgentsWriteTheirOwnPortsOnly(t *testing.T) {
	cluster.Need(t)
	own := newClient(t, cluster.Agent("policy-a"))

	for name, test := range map[string]struct {
		node   string
		change func(*v1alpha1.XPUPort)
		want   string
	}{
		"is of another node": {
			"policy-b", func(*v1alpha1.XPUPort) {},
			`an xpu-agent on node "policy-b" may only write XPUPorts of that node`,
		},
		"is bound to no node": {
			"", func(*v1alpha1.XPUPort) {},
			`an xpu-agent on node "" may only write XPUPorts of that node`,
		},
		"makes one of a claim": {"policy-a", func(p *v1alpha1.XPUPort) {
			p.Spec.Claim = port("policy-a", 2, "x").Spec.Claim
		}, "without a claim"},
		"takes another node's name": {"policy-a", func(p *v1alpha1.XPUPort) {
			p.Name = "policy-a-b-0000-3b-00-2"
		}, "must be named policy-a-0000-3b-00-2"},
		"forgets the sfnum": {"policy-a", func(p *v1alpha1.XPUPort) {
			p.Spec.Function.Subfunction = new(int64(88))
		}, "must be named policy-a-0000-3b-00-2-sf88"},
		"takes it ahead by the name of a pod's": {"policy-a", func(p *v1alpha1.XPUPort) {
			p.Spec.Ahead = true
		}, "must be named policy-a-0000-3b-00-2-ahead"},
		"forgets the finalizer": {"policy-a", func(p *v1alpha1.XPUPort) {
			p.Finalizers = nil
		}, "must have the finalizer xpu.opiproject.org/port"},
	} {
		p := ownPort("policy-a", 2)
		test.change(p)
		err := newClient(t, cluster.Agent(test.node)).Create(t.Context(), p)
		if !kubeapitest.DeniedByPolicy(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("an agent that %s: error %v, want the policy's with %q", name, err, test.want)
		}
	}

	elsewhere := ownPort("policy-a", 2)
	elsewhere.Namespace = "default"
	if err := own.Create(t.Context(), elsewhere); !apierrors.IsForbidden(err) {
		t.Errorf("an agent creates one in another namespace: error %v, want it to be forbidden",
			err)
	}

	p := ownPort("policy-a", 2)
	if err := own.Create(t.Context(), p); err != nil {
		t.Fatalf("an agent creates its own: %v", err)
	}

	freed := p.DeepCopy()
	freed.Finalizers = nil
	if err := own.Update(t.Context(), freed); !apierrors.IsForbidden(err) {
		t.Errorf("an agent takes the finalizer away: error %v, want it to be forbidden", err)
	}
	if err := newClient(t, cluster.Agent("policy-b")).Delete(t.Context(),
		p); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("an agent deletes another node's: error %v, want the policy's", err)
	}
	if err := own.Delete(t.Context(), p); err != nil {
		t.Errorf("an agent deletes its own: %v", err)
	}

	if err := newClient(t, cluster.Admin()).Patch(t.Context(),
		p, client.RawPatch("application/merge-patch+json",
			[]byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Errorf("xpu-controller lets go of it: %v", err)
	}

	ofClaim := port("policy-a", 3, "policy-port")
	created(t, ofClaim)
	if err := own.Delete(t.Context(), ofClaim); !apierrors.IsForbidden(err) {
		t.Errorf("an agent deletes that of a claim: error %v, want it to be forbidden", err)
	}
}

func TestAgentsSendEvents(t *testing.T) {
	cluster.Need(t)
	clientset, err := kubernetes.NewForConfig(cluster.Agent("policy-a"))
	if err != nil {
		t.Fatal(err)
	}

	recorder, err := kubeapi.NewRecorder(t.Context(), clientset)
	if err != nil {
		t.Fatal(err)
	}

	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "default", Name: "policy-pod", UID: "policy-pod-uid",
	}}
	recorder.Eventf(pod, nil, corev1.EventTypeWarning, "HookFailed", "Release", "hook %s", "x")
	admin := newClient(t, cluster.Admin())
	must.Eventually(t, "the event is there", func() bool {
		var found eventsv1.EventList
		if err := admin.List(t.Context(), &found, client.InNamespace("default")); err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(found.Items, func(e eventsv1.Event) bool {
			return e.Regarding.Name == "policy-pod" && e.Reason == "HookFailed" &&
				e.Note == "hook x" && e.ReportingController == "xpu-agent"
		})
	})

	// A pod can make the reason of a quarantine long, and the API server would refuse such an event.
	recorder.Eventf(pod, nil, corev1.EventTypeWarning, "TooLong", "Release", "%s",
		strings.Repeat("é", 1000))
	must.Eventually(t, "the event with a long note is there", func() bool {
		var found eventsv1.EventList
		must.Succeed(t, admin.List(t.Context(), &found, client.InNamespace("default")))
		return slices.ContainsFunc(found.Items, func(e eventsv1.Event) bool {
			return e.Reason == "TooLong" && strings.HasPrefix(e.Note, strings.Repeat("é", 500))
		})
	})
}

// allocatedTo returns an allocation as a scheduler writes it, with a setting that only a class may
// make.
func allocatedTo(driver string) *resourceapi.AllocationResult {
	return &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
		Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "nic", Driver: driver, Pool: "node/pool", Device: "d"},
		},
		Config: []resourceapi.DeviceAllocationConfiguration{{
			Source: resourceapi.AllocationConfigSourceClass,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver:     driver,
				Parameters: runtime.RawExtension{Raw: []byte(`{"vf":{"trust":true}}`)},
			}},
		}},
	}}
}

func claimFor(namespace, name string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{
				{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "xpu"}},
			},
		}},
	}
}

// TestNamesakesOfOthers checks that ServiceAccounts of other programs that have the names of this
// project's ServiceAccounts may do what their roles allow.
func TestNamesakesOfOthers(t *testing.T) {
	cluster.Need(t)
	const namespace, driver = "gpu-operator", "gpu.example.com"
	created(t, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}})

	created(t, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: namespace},
		Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{"resource.k8s.io"}, Resources: []string{"*"}, Verbs: []string{"*"},
		}}})

	for _, name := range []string{"xpu-agent", "xpu-controller", "xpu-broker"} {
		created(t, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: namespace + "-" + name},
			RoleRef: rbacv1.RoleRef{
				APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: namespace,
			},
			Subjects: []rbacv1.Subject{
				{Kind: "ServiceAccount", Namespace: namespace, Name: name},
			},
		})

		config := cluster.Admin()
		config.Impersonate = rest.ImpersonationConfig{
			UserName: "system:serviceaccount:" + namespace + ":" + name,
			Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace,
				"system:authenticated"},
		}

		other := newClient(t, config)
		must.Eventually(t, "the role is known", func() bool {
			return other.List(t.Context(), &resourceapi.ResourceSliceList{}) == nil
		})

		slice, claim := resourceSlice("policy-"+name, driver, "node1"), claimFor("default",
			"policy-"+name)
		created(t, claim)
		if err := other.Create(t.Context(), slice); err != nil {
			t.Errorf("another driver's %s makes a slice: %v", name, err)
		}

		claim.Status.Allocation = allocatedTo(driver)
		if err := other.Status().Update(t.Context(), claim); err != nil {
			t.Errorf("another driver's %s allocates: %v", name, err)
		}
		if err := other.Delete(t.Context(), slice); err != nil {
			t.Errorf("another driver's %s deletes its slice: %v", name, err)
		}

		if name == "xpu-agent" {
			err := other.Create(t.Context(),
				resourceSlice("policy-ours", v1alpha1.GroupName, "node1"))
			if !kubeapitest.DeniedByPolicy(err) {
				t.Errorf("another driver's agent makes a slice of ours: error %v, want the "+
					"policy's", err)
			}
		}
	}
}

// TestTaintRulesOfController: xpu-controller taints devices of this driver only, never so that pods
// end, and deletes its own rules only.
func TestTaintRulesOfController(t *testing.T) {
	cluster.Need(t)
	rule := func(change func(*resourceapi.DeviceTaintRule)) *resourceapi.DeviceTaintRule {
		r := &resourceapi.DeviceTaintRule{
			ObjectMeta: metav1.ObjectMeta{Name: "rule",
				Labels: map[string]string{v1alpha1.GroupName + "/xpu-uid": "uid"}},
			Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(v1alpha1.GroupName)},
				Taint: resourceapi.DeviceTaint{Key: v1alpha1.TaintXPUAway,
					Effect: resourceapi.DeviceTaintEffectNoSchedule},
			},
		}
		change(r)
		return r
	}

	controller := newClient(t, cluster.Controller())
	for name, r := range map[string]*resourceapi.DeviceTaintRule{
		"NoExecute": rule(func(r *resourceapi.DeviceTaintRule) {
			r.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNoExecute
		}),
		"another driver": rule(func(r *resourceapi.DeviceTaintRule) {
			r.Spec.DeviceSelector.Driver = new("gpu.example.com")
		}),
		"all drivers": rule(func(r *resourceapi.DeviceTaintRule) { r.Spec.DeviceSelector = nil }),
		"no label":    rule(func(r *resourceapi.DeviceTaintRule) { r.Labels = nil }),
	} {
		err := controller.Create(t.Context(), r, client.DryRunAll)
		if !kubeapitest.DeniedByPolicy(err) {
			t.Errorf("%s: %v, want a refusal", name, err)
		}
	}

	others := rule(func(r *resourceapi.DeviceTaintRule) { r.Name, r.Labels = "others", nil })
	created(t, others)
	if err := controller.Delete(t.Context(), others); !kubeapitest.DeniedByPolicy(err) {
		t.Errorf("deletion of a rule of others: %v, want a refusal", err)
	}
	own := rule(func(*resourceapi.DeviceTaintRule) {})
	must.Succeed(t, controller.Create(t.Context(), own))
	must.Succeed(t, controller.Delete(t.Context(), own))
}
