// SPDX-License-Identifier: Apache-2.0

package adversary

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// agentsPort returns the Port of a node's n-th VF as the node's agent creates it, for a pod in a
// namespace.
func agentsPort(node string, n int, card, network, namespace string) *v1alpha1.XPUPort {
	return claim.NewPort(kubeapitest.AgentNamespace, vf(n), "plain", v1alpha1.XPUPortSpec{
		NodeName: node, XPU: card, Network: network, MAC: string(claim.DerivedMAC("", node, vf(n))),
		Pod: &v1alpha1.PodRef{Namespace: namespace, Name: "p", UID: "p-uid"},
	})
}

// TestHostileNode checks that an attacker with the credentials of node2's agent can write only
// node2's objects, and gets a port only of its own card, in a network that allows the namespace,
// with an unused MAC address.
func TestHostileNode(t *testing.T) {
	w := newWorld(t, sharedCluster)
	first, second := opitest.Start(t), opitest.Start(t)
	w.create(xpu("card1", "node1", first.Config().Endpoint),
		xpu("card2", "node2", second.Config().Endpoint),
		network("blue", 100, "default"), network("secret", 200, "treasury"), pool("fast"))
	w.claim("victim", "node1", 0, `"network": "blue"`)
	victim := w.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
	hostile, err := kubeapitest.Client(w.cluster.Agent("node2"))
	must.Succeed(t, err)

	status := client.RawPatch(types.MergePatchType,
		[]byte(`{"status":{"functions":7,"bridgePort":"mine"}}`))

	slice := func(node, pool string) *resourceapi.ResourceSlice {
		return &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "hostile"},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: v1alpha1.GroupName, NodeName: &node, Pool: resourceapi.ResourcePool{
					Name: pool, ResourceSliceCount: 1,
				},
			}}
	}

	frozen := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node2"},
		Status: v1alpha1.XPUNodeStatus{
			Pools: []v1alpha1.XPUNodePool{
				{Name: "fast", ObservedGeneration: -1,
					Shortages: []v1alpha1.Shortage{{PF: "x", Reason: "a b"}}},
			},
		}}

	// the API server rejects such an object as invalid instead of forbidden
	invalid := func(err error) error {
		if apierrors.IsInvalid(err) {
			return apierrors.NewForbidden(schema.GroupResource{}, "", err)
		}
		return err
	}

	theirs := agentsPort("node1", 1, "card1", "blue", "default")
	for what, err := range map[string]error{
		"writes node1's slice": hostile.Create(t.Context(),
			slice("node1", "node1/pool")),
		"names its pool after node1": hostile.Create(t.Context(),
			slice("node2", "node1/pool")),
		"writes node1's XPUNode": hostile.Create(t.Context(),
			&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}),
		"freezes a DevicePool's status": invalid(hostile.Create(t.Context(), frozen)),
		"makes a Port of node1":         hostile.Create(t.Context(), theirs),
		"deletes the victim's Port":     hostile.Delete(t.Context(), victim.DeepCopy()),
		"says that the victim's Port is": hostile.Status().Patch(t.Context(),
			victim.DeepCopy(), status),
		"changes a DevicePool": hostile.Status().Patch(t.Context(),
			pool("fast"), status),
		"changes an XPU": hostile.Status().Patch(t.Context(),
			xpu("card1", "", ""), status),
		"opens a network": hostile.Patch(t.Context(), network("secret", 200, ""),
			client.RawPatch(types.MergePatchType,
				[]byte(`{"spec":{"allowedNamespaces":{"from":"All","selector":null}}}`))),
		"reads the controller's secrets": hostile.Get(t.Context(),
			client.ObjectKey{Namespace: kubeapitest.AgentNamespace, Name: "x"}, &corev1.Secret{}),
		"allocates a claim of its own": hostile.Create(t.Context(),
			&resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "mine"},
			}),
		"takes the place of node1's agent": hostile.Delete(t.Context(),
			&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "node1"}}),
	} {
		if !apierrors.IsForbidden(err) && !kubeapitest.DeniedByPolicy(err) {
			t.Errorf("a hostile node %s: error %v, want it to be forbidden", what, err)
		}
	}

	foreign := agentsPort("node2", 0, "card1", "blue", "default") // it has the victim's id
	must.Succeed(t, hostile.Create(t.Context(), foreign))
	w.waitForReady(foreign, &foreign.Status.Conditions, v1alpha1.ReasonNoXPU,
		"belongs to node node1, not to node node2")
	closed := agentsPort("node2", 1, "card2", "secret", "default")
	must.Succeed(t, hostile.Create(t.Context(), closed))
	w.waitForReady(closed, &closed.Status.Conditions, v1alpha1.ReasonForbidden,
		"does not let pods of namespace default join")
	disguised := agentsPort("node2", 2, "card2", "blue", "default")
	disguised.Spec.MAC = victim.Spec.MAC
	must.Succeed(t, hostile.Create(t.Context(), disguised))
	w.waitForReady(disguised, &disguised.Status.Conditions, v1alpha1.ReasonConflict,
		"belongs to XPUPort default/"+victim.Name)

	ahead := func(n int, network, mac string) *v1alpha1.XPUPort {
		p := claim.NewPort(kubeapitest.AgentNamespace, vf(n), "fast", v1alpha1.XPUPortSpec{
			NodeName: "node2", XPU: "card2", Network: network, MAC: mac, Ahead: true,
		})
		must.Succeed(t, hostile.Create(t.Context(), p))
		return p
	}

	thief := ahead(4, "blue", victim.Spec.MAC)
	w.waitForReady(thief, &thief.Status.Conditions, v1alpha1.ReasonForbidden,
		"does not belong to Function")
	unasked := ahead(5, "secret", string(claim.DerivedMAC("", "node2", vf(5))))
	w.waitForReady(unasked, &unasked.Status.Conditions, v1alpha1.ReasonForbidden,
		"does not have Ports made ahead in XPUNetwork secret")
	own := agentsPort("node2", 3, "card2", "blue", "default")
	must.Succeed(t, hostile.Create(t.Context(), own))
	w.waitForReady(own, &own.Status.Conditions, v1alpha1.ReasonUp, "")
	waitForComparisons(t, first)
	if ports := first.Ports(); len(ports) != 1 || ports[0] != victim.Status.BridgePort {
		t.Errorf("node1's card has ports %q, want %s", ports, victim.Status.BridgePort)
	}
	if ports := second.Ports(); len(ports) != 1 || ports[0] != own.Status.BridgePort {
		t.Errorf("node2's card has ports %q, want %s", ports, own.Status.BridgePort)
	}
}
