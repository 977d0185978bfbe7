// SPDX-License-Identifier: Apache-2.0

package kubeapi_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

const deploy = "../../../deploy"

// bare returns an API server of the oldest supported version, without the project's CRDs.
func bare(t *testing.T) *kubeapitest.Cluster {
	t.Helper()
	c, err := kubeapitest.StartWithoutCRDs(deploy, [2]string{"emulated-version", "1.34"})
	must.Succeed(t, err)
	c.Need(t)
	t.Cleanup(func() { must.Succeed(t, c.Stop()) })
	return c
}

// as returns the client of a user without groups.
func as(t *testing.T, cluster *kubeapitest.Cluster, user string) client.Client {
	t.Helper()
	config := cluster.Admin()
	config.Impersonate = rest.ImpersonationConfig{
		UserName: user, Groups: []string{"system:authenticated"},
	}
	return newClient(t, config)
}

// administratorOf returns the client of a user who may do everything in a namespace, and nothing
// elsewhere.
func administratorOf(
	t *testing.T, cluster *kubeapitest.Cluster, namespace, user string,
) client.Client {
	t.Helper()
	must.Succeed(t, newClient(t, cluster.Admin()).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "policy-administrator"},
		RoleRef: rbacv1.RoleRef{
			APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin",
		},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	}))

	c := as(t, cluster, user)
	must.Eventually(t, "the role is known", func() bool {
		return c.List(t.Context(), &resourceapi.ResourceClaimList{},
			client.InNamespace(namespace)) == nil
	})

	return c
}

// TestAllocationsAreTheSchedulers checks that a user who may write the status of the claims in a
// namespace cannot write an allocation with settings that only a class may make. The policy leaves
// claims of other drivers and the rest of the status alone.
func TestAllocationsAreTheSchedulers(t *testing.T) {
	cluster := bare(t)
	admin, tenant := newClient(t, cluster.Admin()), administratorOf(t, cluster, "default",
		"allocator")
	ours, theirs := claimFor("default", "policy-ours"), claimFor("default", "policy-theirs")
	must.Succeed(t, admin.Create(t.Context(), ours))
	must.Succeed(t, admin.Create(t.Context(), theirs))

	ours.Status.Allocation = allocatedTo(v1alpha1.GroupName)
	must.Eventually(t, "a tenant allocates, and the policy refuses it", func() bool {
		return kubeapitest.DeniedByPolicy(tenant.Status().Update(t.Context(), ours.DeepCopy(),
			client.DryRunAll))
	})

	theirs.Status.Allocation = allocatedTo("gpu.example.com")
	if err := tenant.Status().Update(t.Context(), theirs); err != nil {
		t.Errorf("a tenant allocates a device of another driver: %v", err)
	}

	if err := admin.Status().Update(t.Context(), ours); err != nil {
		t.Fatalf("the scheduler allocates: %v", err)
	}

	ours.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{
		{Resource: "pods", Name: "p", UID: "u"},
	}
	if err := tenant.Status().Update(t.Context(), ours); err != nil {
		t.Errorf("a tenant reserves his claim: %v", err)
	}

	change := ours.DeepCopy()
	change.Status.Allocation.Devices.Results[0].Device = "another"
	if err := tenant.Status().Update(t.Context(), change); err == nil {
		t.Error("a tenant changes the allocation")
	}

	ours.Status = resourceapi.ResourceClaimStatus{}
	if err := tenant.Status().Update(t.Context(), ours); err != nil {
		t.Errorf("a tenant gives his device back: %v", err)
	}
}

// TestPoliciesSpareOthers checks that no policy refuses, delays or changes objects of other
// projects, with and without the project's CRDs, also while an API server starts.
func TestPoliciesSpareOthers(t *testing.T) {
	cluster := bare(t)
	tenant := administratorOf(t, cluster, "default", "tenant")
	write := func(name string, tenant client.Client) {
		t.Helper()
		mine, template := claimFor("default", name), &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		}
		template.Spec.Spec = mine.Spec
		must.Succeed(t, tenant.Create(t.Context(), template))
		must.Succeed(t, tenant.Create(t.Context(), mine))
		want := claimFor("default", name).Spec
		want.Devices.Requests[0].Exactly.AllocationMode, want.Devices.Requests[0].Exactly.Count = resourceapi.DeviceAllocationModeExactCount, 1
		if diff := gocmp.Diff(want, mine.Spec); diff != "" {
			t.Errorf("%s: -want +got\n%s", name, diff)
		}

		mine.Status.Allocation = allocatedTo("gpu.example.com")
		must.Succeed(t, tenant.Status().Update(t.Context(), mine))
		mine.Labels = map[string]string{"a": "b"}
		must.Succeed(t, tenant.Update(t.Context(), mine))
		must.Succeed(t, tenant.Delete(t.Context(), mine))
		must.Succeed(t,
			tenant.Create(t.Context(),
				&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}))
	}

	write("before", tenant)
	must.Succeed(t, cluster.Restart())
	write("at-start", as(t, cluster, "tenant"))
}

// TestPoliciesCostNothing checks that no policy reads other objects, because their number or
// absence would affect every request. The only webhook is optional, and an API server goes on
// without it.
func TestPoliciesCostNothing(t *testing.T) {
	var files []string
	must.Succeed(t, filepath.WalkDir(deploy, func(path string, entry os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".yaml") {
			files = append(files, path)
		}
		return err
	}))

	policies := 0
	for _, path := range files {
		text, err := os.ReadFile(path)
		must.Succeed(t, err)
		policies += strings.Count(string(text), "\nkind: ValidatingAdmissionPolicy\n")

		isWebhook := filepath.Base(filepath.Dir(path)) == "webhook"
		if isWebhook && strings.Count(string(text), "- name: parameters.") !=
			strings.Count(string(text), "failurePolicy: Ignore") {
			t.Errorf("%s does not say failurePolicy: Ignore for each webhook", path)
		}

		for _, word := range []string{
			"paramKind:", "paramRef:", "WebhookConfiguration", "MutatingAdmissionPolicy",
		} {
			if strings.Contains(string(text), word) && !(isWebhook && word == "WebhookConfiguration") {
				t.Errorf("%s has %s", path, word)
			}
		}
	}

	if policies < 8 {
		t.Errorf("%d policies in %v", policies, files)
	}
}
