// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// forceDelete removes an object, including its finalizers.
func (s *testCluster) forceDelete(o client.Object) {
	s.Helper()
	s.eventually(fmt.Sprintf("remove %T %s by force", o, o.GetName()), func() error {
		if err := s.get(o); err != nil {
			return client.IgnoreNotFound(err)
		}

		before := o.DeepCopyObject().(client.Object)
		o.SetFinalizers(nil)
		if err := s.Patch(context.Background(), o, client.MergeFrom(before)); err != nil {
			return err
		}
		return client.IgnoreNotFound(s.Delete(context.Background(), o))
	})
}

// TestByHand checks that objects deleted by hand are created again, or are deleted in both
// clusters.
func TestByHand(t *testing.T) {
	w := newWorld(t)
	_, agent := w.scene(w.a, nil)
	_, port := w.a.claim("nic", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)
	copied := w.copied("a", port)
	t.Run("XPUPort of the infra cluster", func(t *testing.T) {
		if err := w.infra.get(copied); err != nil {
			t.Fatal(err)
		}
		w.infra.delete(copied)
		w.infra.gone(copied)
		w.infra.portIs(copied, v1alpha1.ReasonUp)
		w.a.portIs(port, v1alpha1.ReasonUp)
		w.serves(agent, "c1pf0vf0")
	})

	t.Run("XPUPort of the infra cluster by force", func(t *testing.T) {
		w.infra.forceDelete(copied)
		w.infra.portIs(copied, v1alpha1.ReasonUp)
		w.a.portIs(port, v1alpha1.ReasonUp)
	})

	t.Run("XPU of the tenant's cluster", func(t *testing.T) {
		xpu := &v1alpha1.XPU{ObjectMeta: metav1.ObjectMeta{Name: "card-a"}}
		if err := w.a.get(xpu); err != nil {
			t.Fatal(err)
		}
		w.a.delete(xpu)
		w.a.gone(xpu)
		w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
	})

	t.Run("XPUNode of the infra cluster", func(t *testing.T) {
		node := &v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a.node1"}}
		if err := w.infra.get(node); err != nil {
			t.Fatal(err)
		}
		w.infra.delete(node)
		w.infra.gone(node)
		w.infra.eventually("it comes back", func() error { return w.infra.get(node) })
		w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
	})

	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	t.Run("XPUNetwork of the infra cluster", func(t *testing.T) {
		made := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "a.blue"}}
		w.infra.networkIs(made, v1alpha1.ReasonUp)
		vlan := made.Spec.VLAN
		w.infra.forceDelete(made)
		w.infra.networkIs(made, v1alpha1.ReasonUp)
		if made.Spec.VLAN != vlan {
			t.Errorf("it comes back with VLAN %d, not %d", made.Spec.VLAN, vlan)
		}
		w.a.networkIs(network, v1alpha1.ReasonUp)
	})

	t.Run("XPUNetwork that is in use", func(t *testing.T) {
		w.a.delete(network)
		w.a.networkIs(network, v1alpha1.ReasonInUse)
	})

	t.Run("XPUPort of the tenant's cluster by force", func(t *testing.T) {
		uid := port.UID
		w.a.forceDelete(port)

		w.infra.eventually("another one stands for the next", func() error {
			err := w.infra.get(copied)
			if err == nil && copied.Annotations[v1alpha1.AnnotationOriginUID] == string(uid) {
				err = fmt.Errorf("it still stands for the one that is gone")
			}
			return client.IgnoreNotFound(err)
		})

		w.serves(agent) // the network is being deleted, so it gets no new copy
		w.a.gone(network)
	})
}

// TestBrokerAway checks that a stopped broker delays changes, which is reported, and loses or leaks
// nothing.
func TestBrokerAway(t *testing.T) {
	w := newWorld(t)
	tenant, agent := w.scene(w.a, nil)
	claim, stays := w.a.claim("stays", "node1", "fast", vf(0))
	_, goes := w.a.claim("goes", "node1", "fast", vf(1))
	w.a.portIs(stays, v1alpha1.ReasonUp)
	w.a.portIs(goes, v1alpha1.ReasonUp)
	w.stopBroker()
	w.a.xpuIs("card-a", v1alpha1.ReasonBrokerAway)
	_, waits := w.a.claim("waits", "node1", "fast", vf(2))
	w.a.portIs(waits, v1alpha1.ReasonBrokerAway)
	w.a.portIs(stays, v1alpha1.ReasonUp)
	w.a.forceDelete(goes)
	w.a.delete(claim)
	w.a.delete(stays)
	if err := w.infra.get(tenant); err != nil {
		t.Fatal(err)
	}

	w.serves(agent, "c1pf0vf0", "c1pf0vf1")
	w.startBroker()
	w.a.portIs(waits, v1alpha1.ReasonUp)
	w.a.gone(stays)
	w.a.xpuIs("card-a", v1alpha1.ReasonConnected)

	w.infra.eventually("only what is wanted is served", func() error {
		for _, id := range agent.Ports() {
			if id == "c1pf0vf0" {
				return fmt.Errorf("the agent has %v", agent.Ports())
			}
		}
		return nil
	})
}

// TestTenantAway checks that the copies of an unreachable tenant stay unchanged, whether its API
// server refuses connections, hangs or drops watches, and that other tenants are not affected.
func TestTenantAway(t *testing.T) {
	w := newWorld(t)
	w.a.link = newLink(t, w.a.Config.Host)
	w.a.link.set(linkHangs)
	w.a.node("node1", "MT-a")
	tenant := w.joins(w.a, nil) // it hangs while joining
	_, other := w.scene(w.b, nil)
	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonUnreachable)
	w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonFrozen)
	w.a.link.set(linkUp)
	w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)

	w.a.network("blue", 10, "10.1.0.0/24")
	w.a.pool("fast", "blue")
	_, agent := w.xpu("card-a", "a", "MT-a")
	w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
	_, port := w.a.claim("nic", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)

	for n, mode := range []linkMode{linkDown, linkHangs} {
		w.a.link.set(mode)
		w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonUnreachable)
		w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonFrozen)
		w.a.xpuIs("card-a", v1alpha1.ReasonBrokerAway)
		o, meanwhile := w.a.claim(fmt.Sprint("meanwhile-", n), "node1", "fast", vf(1+n))
		w.a.portIs(meanwhile, v1alpha1.ReasonBrokerAway)
		_, unaware := w.b.claim(fmt.Sprint("unaware-", n), "node1", "fast", vf(1+n))
		w.b.portIs(unaware, v1alpha1.ReasonUp)
		w.infra.delete(w.copied("a", port)) // by hand: it cannot be created again now
		w.a.link.set(linkUp)
		w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)
		w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
		w.a.portIs(meanwhile, v1alpha1.ReasonUp)
		w.a.delete(o)
		w.a.delete(meanwhile)
		w.a.gone(meanwhile)
		w.serves(agent, "c1pf0vf0")
	}

	t.Run("dropped watches", func(t *testing.T) {
		w.a.link.set(linkUp) // closes the connections
		o, quick := w.a.claim("dropped", "node1", "fast", vf(5))
		w.a.portIs(quick, v1alpha1.ReasonUp)
		w.a.link.set(linkUp)
		w.a.delete(o)
		w.a.delete(quick)
		w.a.gone(quick)
	})

	w.serves(other, "c1pf0vf1", "c1pf0vf2")
}

// TestInfraAway checks that tenants' changes wait while the infra cluster's API server is away, at
// any step, and that nothing is lost.
func TestInfraAway(t *testing.T) {
	w := newWorld(t)
	w.stopBroker()
	w.infra.link = newLink(t, w.infra.Config.Host)
	w.startBroker()
	_, agent := w.scene(w.a, nil)
	stays, port := w.a.claim("stays", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)

	for n, mode := range []linkMode{linkDown, linkHangs} {
		w.infra.link.set(mode)
		o, comes := w.a.claim(fmt.Sprint("comes-", n), "node1", "fast", vf(1+n)) // while it is away
		w.a.eventually("its XPUPort is made", func() error { return w.a.get(comes) })
		w.infra.link.set(linkUp)
		w.a.portIs(comes, v1alpha1.ReasonUp)
		w.infra.link.set(mode)
		w.a.delete(o)
		w.a.delete(comes)
		if err := w.a.get(comes); err != nil {
			t.Errorf("the XPUPort is gone while nobody can say that the xPU has let go: %v", err)
		}

		w.infra.link.set(linkUp)
		w.a.gone(comes)
		w.serves(agent, "c1pf0vf0")
	}

	w.a.delete(stays)
	w.a.delete(port)
	w.a.gone(port)
	w.serves(agent)
}

// TestCredentials covers credentials that are revoked, rotated, unusable and missing.
func TestCredentials(t *testing.T) {
	w := newWorld(t)
	tenant, agent := w.scene(w.a, nil)
	_, port := w.a.claim("nic", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)

	account := &corev1.ServiceAccount{
		ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: "xpu-broker"},
	}
	w.a.delete(account) // its tokens are invalid from now on
	account.ResourceVersion, account.UID = "", ""
	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonUnauthorized)
	w.a.create(account)
	w.a.xpuIs("card-a", v1alpha1.ReasonBrokerAway)
	w.serves(agent, "c1pf0vf0")

	rights, err := w.a.configFor(t.Context(), systemNamespace, "xpu-broker")
	if err != nil {
		t.Fatal(err)
	}

	rotated := memberSecret(t, "a", rights)
	if err := w.infra.Update(t.Context(), rotated); err != nil {
		t.Fatal(err)
	}

	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
	w.infra.tenantIs(tenant, v1alpha1.ConditionSynced, v1alpha1.ReasonSynced)
	w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
	_, second := w.a.claim("second", "node1", "fast", vf(1))
	w.a.portIs(second, v1alpha1.ReasonUp)

	good := rotated.Data["kubeconfig"]
	for name, config := range map[string]string{
		"no kubeconfig": "what", "no cluster": "apiVersion: v1\nkind: Config\n",
		"a program": `{"apiVersion":"v1","kind":"Config","current-context":"c","clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:1"}}],` +
			`"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}],"users":[{"name":"u","user":{"exec":{"apiVersion":"client.authentication.k8s.io/v1","command":"/bin/sh"}}}]}`,
	} {
		t.Run(name, func(t *testing.T) {
			rotated.Data["kubeconfig"] = []byte(config)
			if err := w.infra.Update(t.Context(), rotated); err != nil {
				t.Fatal(err)
			}
			w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonInvalidConfig)
		})
	}

	w.infra.delete(rotated)
	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonMemberNotFound)
	rotated.Data["kubeconfig"], rotated.ResourceVersion, rotated.UID = good, "", ""
	w.infra.create(rotated)
	w.infra.tenantIs(tenant, v1alpha1.ConditionConnected, v1alpha1.ReasonConnected)
	w.serves(agent, "c1pf0vf0", "c1pf0vf1")
}

// TestLeaving covers both deletion policies, and a tenant that returns after Retain.
func TestLeaving(t *testing.T) {
	w := newWorld(t)
	tenant, agent := w.scene(w.a, func(spec *v1alpha1.XPUTenantSpec) {
		spec.DeletionPolicy = v1alpha1.DeletionRetain
	})
	_, port := w.a.claim("nic", "node1", "fast", vf(0))
	w.a.portIs(port, v1alpha1.ReasonUp)
	made := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "a.blue"}}
	w.infra.networkIs(made, v1alpha1.ReasonUp)
	uid := made.UID

	w.infra.delete(tenant)
	w.infra.gone(tenant)
	w.a.xpuIs("card-a", v1alpha1.ReasonBrokerAway)
	w.serves(agent, "c1pf0vf0")
	if err := w.infra.get(w.copied("a", port)); err != nil {
		t.Errorf("Retain: %v", err)
	}

	w.infra.delete(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenantsNamespace, Name: "a"},
	})
	tenant = w.joins(w.a, nil)
	w.a.xpuIs("card-a", v1alpha1.ReasonConnected)
	w.a.portIs(port, v1alpha1.ReasonUp)
	w.infra.networkIs(made, v1alpha1.ReasonUp)
	if made.UID != uid {
		t.Error("the network was made anew")
	}

	w.infra.eventually("the segment is written down again", func() error {
		if err := w.infra.get(tenant); err != nil {
			return err
		}
		if segment := segmentOf(tenant, "blue"); segment == nil || segment.VLAN != made.Spec.VLAN {
			return fmt.Errorf("it is %+v", segment)
		}
		return nil
	})

	w.infra.delete(tenant)
	w.infra.gone(tenant)
	w.serves(agent)
	w.a.portIs(port, v1alpha1.ReasonLeaving)
	w.infra.delete(&corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: tenantsNamespace, Name: "a"},
	})
	tenant = w.joins(w.a, nil) // it returns, with the same pods
	w.a.portIs(port, v1alpha1.ReasonUp)
	if !controllerutil.ContainsFinalizer(port, v1alpha1.FinalizerPort) {
		t.Error("the XPUPort of a tenant that came back has no finalizer")
	}

	w.serves(agent, "c1pf0vf0")
	w.infra.delete(tenant)
	w.infra.gone(tenant)
	w.serves(agent)
	w.a.portIs(port, v1alpha1.ReasonLeaving)
	network := &v1alpha1.XPUNetwork{ObjectMeta: metav1.ObjectMeta{Name: "blue"}}
	w.a.networkIs(network, v1alpha1.ReasonLeaving)
	w.a.delete(port) // without a finalizer now
	w.a.gone(port)
	w.a.delete(network)
	w.a.gone(network)

	for _, o := range []client.Object{
		made, w.copied("a", port),
		&v1alpha1.XPUNode{ObjectMeta: metav1.ObjectMeta{Name: "a.node1"}},
	} {
		if err := w.infra.get(o); !apierrors.IsNotFound(err) {
			t.Errorf("%T %s is still there: %v", o, o.GetName(), err)
		}
	}

	if err := w.a.get(&v1alpha1.XPU{
		ObjectMeta: metav1.ObjectMeta{Name: "card-a"},
	}); !apierrors.IsNotFound(err) {
		t.Errorf("the tenant still has the XPU: %v", err)
	}
}
