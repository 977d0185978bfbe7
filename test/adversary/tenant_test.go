// SPDX-License-Identifier: Apache-2.0

package adversary

import (
	"context"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/opi/opitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// tenant returns the client of a user who may do everything in namespace default.
func (w *world) tenant() client.Client {
	w.Helper()
	return w.inDefault("mallory")
}

// inDefault returns the client of a user with this name who may do everything in namespace default.
func (w *world) inDefault(user string, groups ...string) client.Client {
	w.Helper()
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", GenerateName: "mallory-"},
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin",
		},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	}

	w.create(binding)
	w.Cleanup(func() { must.Succeed(w, w.admin.Delete(context.Background(), binding)) })

	config := w.cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: user, Groups: append(groups, "system:authenticated"),
	}
	tenant, err := kubeapitest.Client(config)
	must.Succeed(w, err)

	must.Eventually(w, "the role is known", func() bool {
		return tenant.List(w.Context(), &v1alpha1.XPUPortList{},
			client.InNamespace("default")) == nil
	})

	return tenant
}

// TestHostileTenant checks that a user with all rights in a namespace cannot join a network that
// does not allow it, set what the DevicePool reserves for administrators, take another pod's
// address, or make a Port.
func TestHostileTenant(t *testing.T) {
	w := newWorld(t, sharedCluster)
	agent := opitest.Start(t)
	secret := network("secret", 200, "treasury")
	w.create(xpu("card", "node1", agent.Config().Endpoint),
		network("blue", 100, "default", "10.1.0.0/24"), secret,
		pool("fast", v1alpha1.FieldMAC, v1alpha1.FieldAddresses))
	w.claim("victim", "node1", 0, `"network": "blue"`)
	victim := w.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")
	tenant := w.tenant()

	for name, test := range map[string]struct{ fields, reason, text string }{
		"closed": {
			`"network": "secret"`, v1alpha1.ReasonForbidden,
			"XPUNetwork secret does not let pods of namespace default join",
		},
		"trust": {`"network": "blue", "vf": {"trust": true}`, v1alpha1.ReasonForbidden,
			"vf.trust: Forbidden"},
		"vlan": {`"vf": {"vlan": 200}`, v1alpha1.ReasonForbidden, "vf.vlan: Forbidden"},
		"mac": {`"network": "blue", "mac": "` + victim.Spec.MAC + `"`, v1alpha1.ReasonConflict,
			victim.Name},
		"address": {`"network": "blue", "addresses": ["` + victim.Spec.Addresses[0] + `"]`,
			v1alpha1.ReasonConflict, victim.Name},
		"gateway": {`"network": "blue", "addresses": ["10.1.0.1/24"]`, v1alpha1.ReasonInvalidConfig,
			"gateway"},
		"prefix": {`"network": "blue", "addresses": ["10.1.0.9/1"]`, v1alpha1.ReasonInvalidConfig,
			"prefix length"},
	} {
		c, err := w.allocatedClaim(tenant, name, "node1", 1, test.fields)
		must.Succeed(t, err)
		w.waitForProvisioned(c, test.reason, test.text)
		w.deleteAndWait(c)
	}

	// The pool can add the network to the claim later.
	late := pool("late")
	late.Spec.Network = secret.Name
	w.create(late)
	id := claim.PoolID{Node: "node1", PF: testPF, DevicePool: late.Name}
	hidden, err := w.createClaim(tenant,
		claimtest.Allocated("hidden", claimtest.Result("nic", id.String(), vf(1).DeviceName())))
	must.Succeed(t, err)
	w.waitForProvisioned(hidden, v1alpha1.ReasonForbidden,
		"XPUNetwork secret does not let pods of namespace default join")

	w.checkCannotWritePorts(tenant, victim)
	waitForComparisons(t, agent)
	if ports := agent.Ports(); len(ports) != 1 || ports[0] != victim.Status.BridgePort {
		t.Errorf("the card has ports %q, want %s", ports, victim.Status.BridgePort)
	}
}

// checkCannotWritePorts tries every way to make a Port, or to make one trusted or forgotten.
func (w *world) checkCannotWritePorts(tenant client.Client, victim *v1alpha1.XPUPort) {
	w.Helper()
	made := victim.DeepCopy()
	made.ObjectMeta = metav1.ObjectMeta{Namespace: "default", Name: "mine"}
	up := client.RawPatch(types.MergePatchType, []byte(`{"status":{"bridgePort":"mine"}}`))
	free := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`))

	for what, err := range map[string]error{
		"makes a Port": tenant.Create(w.Context(), made),
		"says that one is up": tenant.Status().Patch(w.Context(),
			victim.DeepCopy(), up),
		"takes the victim's finalizer away": tenant.Patch(w.Context(), victim.DeepCopy(), free),
	} {
		if !kubeapitest.DeniedByPolicy(err) {
			w.Errorf("a tenant %s: error %v, want the policy's", what, err)
		}
	}
}

// TestNamesake checks that a tenant's ServiceAccount with the name of one of the product's has only
// the tenant's rights.
func TestNamesake(t *testing.T) {
	w := newWorld(t, sharedCluster)
	agent := opitest.Start(t)
	w.create(xpu("card", "node1", agent.Config().Endpoint),
		network("blue", 100, "default", "10.1.0.0/24"), pool("fast"))
	w.claim("victim", "node1", 0, `"network": "blue"`)
	victim := w.waitForPort("default", "node1", 0, v1alpha1.ReasonUp, "")

	for _, name := range []string{"xpu-controller", "xpu-agent", "xpu-broker"} {
		t.Run(name, func(t *testing.T) {
			w := *w
			w.TB = t
			namesake := w.inDefault("system:serviceaccount:default:"+name,
				"system:serviceaccounts", "system:serviceaccounts:default")
			w.checkCannotWritePorts(namesake, victim)
		})
	}
}
