// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

func xpu(name, node string, pfs ...string) *v1alpha1.XPU {
	return &v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1alpha1.XPUSpec{
			NodeName: node, PFs: pfs, Endpoint: "192.0.2.1:50151", Insecure: true,
		},
	}
}

func TestXPUAway(t *testing.T) {
	api, told := running(t, "away")
	f := function.Function{ID: functionOf(2), PF: "0000:3b:00.0"}
	if message := api.XPUAway(f); message != "" {
		t.Errorf("XPUAway = %q of a Function without xPU", message)
	}

	card := xpu("away-card", "away", "0000:3b:00.0")
	created(t, card, xpu("away-elsewhere", "away-elsewhere"))

	must.Eventually(t, "the XPU is known", func() bool {
		chosen, err := api.XPUOf(t.Context(), f.PF)
		return err == nil && chosen != nil && chosen.Name == card.Name
	})

	if message := api.XPUAway(f); message != "" {
		t.Errorf("XPUAway = %q before xpu-controller said anything", message)
	}

	for _, step := range []struct {
		status  metav1.ConditionStatus
		reason  string
		message string
		want    string
	}{
		{metav1.ConditionFalse, v1alpha1.ReasonXPUUnavailable, "it does not answer",
			"XPU away-card: XPUUnavailable: it does not answer"},
		{metav1.ConditionTrue, v1alpha1.ReasonConnected, "it answers", ""},
	} {
		before := told.ports.Load()
		card.Status.Conditions = []metav1.Condition{{
			Type: v1alpha1.ConditionReady, Status: step.status, Reason: step.reason,
			Message: step.message, LastTransitionTime: metav1.Now(),
		}}
		if err := newClient(t, cluster.Admin()).Status().Update(t.Context(), card); err != nil {
			t.Fatal(err)
		}

		must.Eventually(t, step.reason+" is known and told", func() bool {
			return api.XPUAway(f) == step.want && told.ports.Load() > before
		})
	}

	card.Spec.AbandonedFunctions = []string{f.ID.String()}
	must.Succeed(t, newClient(t, cluster.Admin()).Update(t.Context(), card))

	must.Eventually(t, "the Function is known to be given up", func() bool {
		return strings.Contains(api.XPUAway(f),
			"XPU away-card: Abandoned: the Function is given up")
	})

	if message := api.XPUAway(function.Function{ID: functionOf(3), PF: f.PF}); message != "" {
		t.Errorf("XPUAway = %q of another Function", message)
	}
	if chosen, err := api.XPUOf(t.Context(), pci.Address("0000:5e:00.0")); err != nil ||
		chosen != nil {
		t.Errorf("XPUOf a PF without one = %+v, %v", chosen, err)
	}
}

// TestXPUAwayOfAnotherCard: an XPU that names no PFs, as its OPI agent never answered, says nothing of
// the PFs that the node's other XPU does not name: it may be of another card.
func TestXPUAwayOfAnotherCard(t *testing.T) {
	api, _ := running(t, "two-cards")
	f := function.Function{ID: functionOf(2), PF: "0000:3b:00.0"}
	silent := xpu("two-cards-silent", "two-cards")
	created(t, silent)
	silent.Status.Conditions = []metav1.Condition{{
		Type: v1alpha1.ConditionReady, Status: metav1.ConditionFalse,
		Reason: v1alpha1.ReasonXPUUnavailable, Message: "it does not answer",
		LastTransitionTime: metav1.Now(),
	}}
	must.Succeed(t, newClient(t, cluster.Admin()).Status().Update(t.Context(), silent))
	must.Eventually(t, "the only XPU serves every PF", func() bool { return api.XPUAway(f) != "" })

	created(t, xpu("two-cards-other", "two-cards", "0000:5e:00.0"))
	must.Eventually(t, "it is not known which XPU serves the PF", func() bool {
		return api.XPUAway(f) == ""
	})
}

// TestOwnPorts checks the Ports that an agent makes itself, with the rights of an agent.
func TestOwnPorts(t *testing.T) {
	api, _ := running(t, "own")
	if err := api.CreatePort(t.Context(), ownPort("own", 2)); !apierrors.IsNotFound(err) {
		t.Errorf("CreatePort on a node that is not there = %v, want NotFound", err)
	}

	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "own"}}
	ofClaim := port("own", 2, "own-claim")
	created(t, node, ofClaim, port("own", 3, "own-claim"))

	must.Eventually(t, "the node is known", func() bool {
		_, err := api.NodeLabels(t.Context())
		return err == nil
	})

	p := ownPort("own", 2)
	if err := api.CreatePort(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if len(p.OwnerReferences) != 1 || p.OwnerReferences[0].UID != node.UID {
		t.Errorf("owners %+v, want the Node", p.OwnerReferences)
	}

	must.Eventually(t, "both Ports of the Function are known, and no other", func() bool {
		ports, err := api.PortsOf(t.Context(), claim.FunctionOf(p.Spec.Function))
		return err == nil && len(ports) == 2
	})

	if ports, err := api.Ports(t.Context()); err != nil || len(ports) != 3 {
		t.Errorf("Ports = %d, %v; want all 3 of the node", len(ports), err)
	}

	key := client.ObjectKeyFromObject(p)
	if err := api.DeletePort(t.Context(), key, "another"); !apierrors.IsConflict(err) {
		t.Errorf("DeletePort of another one by that name = %v, want Conflict", err)
	}
	if err := api.DeletePort(t.Context(), key, p.UID); err != nil {
		t.Fatal(err)
	}
	if err := api.DeletePort(t.Context(), key, ""); err != nil {
		t.Errorf("DeletePort again before the xPU let go of it = %v", err)
	}

	if err := newClient(t, cluster.Admin()).Patch(t.Context(),
		p, client.RawPatch("application/merge-patch+json",
			[]byte(`{"metadata":{"finalizers":null}}`))); err != nil {
		t.Fatal(err)
	}

	if err := api.DeletePort(t.Context(), key, ""); !apierrors.IsNotFound(err) {
		t.Errorf("DeletePort of what is gone = %v, want NotFound", err)
	}
	if err := api.DeletePort(t.Context(), client.ObjectKeyFromObject(ofClaim),
		""); !apierrors.IsForbidden(err) {
		t.Errorf("DeletePort of a claim's = %v, want it to be forbidden", err)
	}
}
