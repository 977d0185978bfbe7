// SPDX-License-Identifier: Apache-2.0

package dashboard_test

import (
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// watching returns a client as xpuctl has it.
func watching(t *testing.T, config *rest.Config) client.WithWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	builder := runtime.NewSchemeBuilder(corev1.AddToScheme, appsv1.AddToScheme,
		coordinationv1.AddToScheme, resourceapi.AddToScheme, v1alpha1.AddToScheme)
	must.Succeed(t, builder.AddToScheme(scheme))
	api, err := client.NewWithWatch(config, client.Options{Scheme: scheme})
	must.Succeed(t, err)
	return api
}

// TestAPIServer follows a real API server: as an administrator, and as somebody who may read
// one namespace.
func TestAPIServer(t *testing.T) {
	cluster, err := kubeapitest.Start("../../../deploy")
	must.Succeed(t, err)
	cluster.Need(t)
	t.Cleanup(func() { must.Succeed(t, cluster.Stop()) })
	admin, err := kubeapitest.Client(cluster.Admin())
	must.Succeed(t, err)

	name := "nic"
	text, err := os.ReadFile("../../../deploy/users/rbac.yaml")
	must.Succeed(t, err)
	first, _, _ := strings.Cut(string(text), "\n---\n")
	var view rbacv1.ClusterRole
	must.Succeed(t, yaml.Unmarshal([]byte(first), &view))
	must.Succeed(t, admin.Create(t.Context(), &view))

	// kube-controller-manager would make ClusterRole view of these.
	for _, role := range []string{"system:aggregate-to-view", "xpu-view"} {
		must.Succeed(t, admin.Create(t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "developer-" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: "developer"}}}))
	}
	must.Succeed(t, admin.Create(t.Context(), &v1alpha1.DevicePool{
		ObjectMeta: metav1.ObjectMeta{Name: "fast"},
		Spec: v1alpha1.DevicePoolSpec{Publish: v1alpha1.PublishDRA,
			Selectors: []v1alpha1.FunctionSelector{{PFNames: []string{"ens1f0"}}}}}))
	newPod := func(name string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{
				Containers: []corev1.Container{{Name: "c", Image: "none",
					Resources: corev1.ResourceRequirements{
						Claims: []corev1.ResourceClaim{{Name: name}}}}},
				ResourceClaims: []corev1.PodResourceClaim{{Name: name, ResourceClaimName: &name}}}}
	}
	must.Succeed(t, admin.Create(t.Context(), newPod(name)))

	o := options(watching(t, cluster.Admin()))
	o.Now = time.Now
	all := open(t, serve(t, o))
	all.until(t, func() bool {
		return all.records["pool/fast"] != nil && all.records["pod/default/nic"] != nil
	})
	all.untilRead(t)
	for _, s := range all.overview(t).Sources {
		if s.State != "Live" {
			t.Errorf("administrator: %+v", s)
		}
	}

	config := cluster.Admin()
	config.Impersonate.UserName = "developer"
	o = options(watching(t, config))
	o.Fallback = "default"
	own := open(t, serve(t, o))
	own.until(t, func() bool { return own.records["pod/default/nic"] != nil })
	own.until(t, func() bool {
		states := map[string]string{}
		for _, s := range own.overview(t).Sources {
			states[s.Kind] = string(s.State) + s.Scope
		}
		return states["DevicePools"] == "Forbidden" && states["pods"] == "Livedefault" &&
			states["ResourceClaims"] == "Livedefault" && states["XPUPorts"] == "Livedefault"
	})
	if own.records["pool/fast"] != nil {
		t.Error("a pool is shown to somebody who may not read it")
	}
}
