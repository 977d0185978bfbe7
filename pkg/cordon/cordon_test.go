// SPDX-License-Identifier: Apache-2.0

package cordon_test

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/cordon"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var server *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../deploy", func(c *kubeapitest.Cluster) { server = c }))
}

const (
	first, second = "0000:3b:00.0", "0000:3b:00.1"
	other         = "0000:5e:00.0"
)

// cluster returns an API server with node1, which has a card with two PFs and another card, and
// node2 with a PF of the first card, as a multi-host card has it.
func cluster(t *testing.T) client.Client {
	t.Helper()
	server.Need(t)
	api, err := kubeapitest.Client(server.Admin())
	must.Succeed(t, err)
	t.Cleanup(func() {
		for _, o := range []client.Object{
			&v1alpha1.XPUNode{}, &v1alpha1.XPU{}, &v1alpha1.XPUPort{}, &resourceapi.ResourceClaim{},
		} {
			must.Succeed(t, api.DeleteAllOf(context.Background(), o, client.InNamespace("default")))
		}
	})

	create := func(node string, pfs ...v1alpha1.XPUNodePF) {
		must.Succeed(t, api.Create(t.Context(), &v1alpha1.XPUNode{
			ObjectMeta: metav1.ObjectMeta{Name: node}, Status: v1alpha1.XPUNodeStatus{PFs: pfs},
		}))
	}
	create("node1",
		v1alpha1.XPUNodePF{Address: first, Name: "ens1f0", Serial: "S1", VFs: 4, VFOffset: 16, VFStride: 1},
		v1alpha1.XPUNodePF{Address: second, Name: "ens1f1", Serial: "S1"},
		v1alpha1.XPUNodePF{Address: other, Serial: "S2"})
	create("node2", v1alpha1.XPUNodePF{Address: first, Name: "eth0", Serial: "S1"})
	for name, pfs := range map[string][]string{"card-a": {first}, "card-b": nil} {
		must.Succeed(t, api.Create(t.Context(), &v1alpha1.XPU{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: v1alpha1.XPUSpec{
				NodeName: "node1", Endpoint: "127.0.0.1:1", Insecure: true, PFs: pfs,
			},
		}))
	}
	return api
}

func cordoned(t *testing.T, api client.Client, node string) (all []string) {
	t.Helper()
	var n v1alpha1.XPUNode
	must.Succeed(t, api.Get(t.Context(), client.ObjectKey{Name: node}, &n))
	for _, c := range n.Spec.Cordons {
		all = append(all, strings.TrimSpace(c.PF+" "+c.Reason))
	}
	return all
}

// TestResolve checks which PFs a name means, and what is said of a name that means none.
func TestResolve(t *testing.T) {
	api := cluster(t)
	for _, test := range []struct {
		kind  cordon.Kind
		name  string
		want  []string
		error string
	}{
		{cordon.Card, "S1", []string{"node1/" + first, "node1/" + second, "node2/" + first}, ""},
		{cordon.Node, "node1", []string{"node1/" + first, "node1/" + second, "node1/" + other}, ""},
		{cordon.PF, "node1/ens1f1", []string{"node1/" + second}, ""},
		{cordon.PF, "node1/" + other, []string{"node1/" + other}, ""},
		{cordon.XPU, "card-a", []string{"node1/" + first}, ""},
		{cordon.XPU, "card-b", []string{"node1/" + second, "node1/" + other}, ""},
		{cordon.Card, "S3", nil, `no agent reports a PF of card "S3"; there is S1, S2`},
		{cordon.Node, "node3", nil, "there is node1, node2"},
		{cordon.PF, first, nil, "node2/0000:3b:00.0"},
		{"switch", "s", nil, "must be card, node, pf or xpu"},
	} {
		targets, err := cordon.Resolve(t.Context(), api, test.kind, test.name)
		var got []string
		for _, target := range targets {
			got = append(got, target.Node+"/"+string(target.PF))
		}
		if !slices.Equal(got, test.want) || (err != nil) != (test.error != "") ||
			err != nil && !strings.Contains(err.Error(), test.error) {
			t.Errorf("%s %s: %q, %v, want %q, %q", test.kind, test.name, got, err, test.want, test.error)
		}
	}
}

// TestSet checks that cordons come and go, each once, and that those of others stay.
func TestSet(t *testing.T) {
	api := cluster(t)
	card, err := cordon.Resolve(t.Context(), api, cordon.Card, "S1")
	must.Succeed(t, err)
	whole, err := cordon.Resolve(t.Context(), api, cordon.Node, "node1")
	must.Succeed(t, err)

	set := func(targets []cordon.Target, on bool, reason string, want int) {
		t.Helper()
		changed, err := cordon.Set(t.Context(), api, targets, on, reason)
		must.Succeed(t, err)
		if len(changed) != want {
			t.Errorf("%d changed: %v, want %d", len(changed), changed, want)
		}
	}
	is := func(node string, want ...string) {
		t.Helper()
		if got := cordoned(t, api, node); !slices.Equal(got, want) {
			t.Errorf("cordons of %s %q, want %q", node, got, want)
		}
	}

	set(card, true, "new firmware", 3)
	is("node1", first+" new firmware", second+" new firmware")
	is("node2", first+" new firmware")
	set(card, true, "new firmware", 0)
	set(whole, true, "", 3)
	is("node1", first, second, other)
	set(card, false, "", 3)
	is("node1", other)
	is("node2")
	set(card, false, "", 0)

	// The card of a cordoned PF is taken out.
	set(whole, true, "", 2)
	var node v1alpha1.XPUNode
	must.Succeed(t, api.Get(t.Context(), client.ObjectKey{Name: "node1"}, &node))
	node.Status.PFs = node.Status.PFs[:2]
	must.Succeed(t, api.Update(t.Context(), &node))
	gone, err := cordon.Resolve(t.Context(), api, cordon.PF, "node1/"+other)
	must.Succeed(t, err)
	set(gone, false, "", 1)
	is("node1", first, second)
}

// TestCopies checks that nobody believes that a tenant's card is cordoned from the infra cluster.
func TestCopies(t *testing.T) {
	api := cluster(t)
	var node v1alpha1.XPUNode
	must.Succeed(t, api.Get(t.Context(), client.ObjectKey{Name: "node1"}, &node))
	node.Labels = map[string]string{v1alpha1.LabelTenant: "a"}
	must.Succeed(t, api.Update(t.Context(), &node))
	_, err := cordon.Resolve(t.Context(), api, cordon.XPU, "card-a")
	if err == nil || !strings.Contains(err.Error(), "in the cluster of XPUTenant a") {
		t.Errorf("error %v of an XPU of a tenant", err)
	}
}

// TestUsers checks that pods are found by their claims and by XPUPorts.
func TestUsers(t *testing.T) {
	api := cluster(t)
	targets, err := cordon.Resolve(t.Context(), api, cordon.XPU, "card-a")
	must.Succeed(t, err)

	allocate := func(name, pf, device string, admin bool, pods ...string) {
		c := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{
					Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nic"},
				}},
			}},
		}
		must.Succeed(t, api.Create(t.Context(), c))
		result := resourceapi.DeviceRequestAllocationResult{
			Request: "nic", Driver: v1alpha1.GroupName, Device: device,
			Pool: claim.PoolID{Node: "node1", PF: "0000:3b:00.0", DevicePool: "fast"}.String(),
		}
		if pf == other {
			result.Pool = claim.PoolID{Node: "node1", PF: other, DevicePool: "fast"}.String()
		}
		if admin {
			result.AdminAccess = &admin
		}
		c.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{result},
		}}
		for _, pod := range pods {
			c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
				Resource: "pods", Name: pod, UID: "u",
			})
		}
		if name == "shared" {
			c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{
				APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "workers", UID: "u",
			}}
		}
		must.Succeed(t, api.Status().Update(t.Context(), c))
	}
	allocate("shared", first, "0000-3b-02-2", false)
	allocate("web", first, "0000-3b-02-0", false, "web-1")
	allocate("idle", first, "0000-3b-02-1", false)
	allocate("elsewhere", other, "0000-5e-02-0", false, "x")

	for name, address := range map[string]string{"ours": "0000:3b:02.3", "beyond": "0000:3b:02.4"} {
		port := &v1alpha1.XPUPort{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: v1alpha1.XPUPortSpec{
				NodeName: "node1", XPU: "card-a", Network: "blue", MAC: "02:00:00:00:00:01",
				Function: v1alpha1.FunctionRef{PCIAddress: address},
				Pod:      &v1alpha1.PodRef{Namespace: "red", Name: "dpdk-" + name, UID: "u"},
			},
		}
		must.Succeed(t, api.Create(t.Context(), port))
	}

	users, err := cordon.Users(t.Context(), api, targets)
	must.Succeed(t, err)
	var got []string
	for _, user := range users {
		got = append(got, user.String())
	}
	want := []string{
		"0000-3b-02-0: pod default/web-1, by claim web",
		"0000-3b-02-1: claim default/idle, which no pod uses yet",
		"0000-3b-02-2: podgroups default/workers, by claim shared",
		"0000:3b:02.3: pod red/dpdk-ours, by an extended resource",
	}
	if !slices.Equal(got, want) {
		t.Errorf("users\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
