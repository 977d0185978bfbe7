// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/kubeapi/kubeapitest"
	"github.com/opiproject/xpu-device-plugin/pkg/nodestate"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

var apiServer *kubeapitest.Cluster

func TestMain(m *testing.M) {
	os.Exit(kubeapitest.Main(m, "../../../deploy", func(c *kubeapitest.Cluster) { apiServer = c }))
}

func clientOf(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	must.Succeed(t, errors.Join(clientgoscheme.AddToScheme(scheme), v1alpha1.AddToScheme(scheme)))
	api, err := client.New(config, client.Options{Scheme: scheme})
	must.Succeed(t, err)
	return api
}

// TestDeveloper explains a pod to somebody who has rights in its namespace only.
func TestDeveloper(t *testing.T) {
	apiServer.Need(t)
	admin := clientOf(t, apiServer.Admin())
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "shop-"}}
	must.Succeed(t, admin.Create(t.Context(), namespace))
	in := func(name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace.Name, Name: name}
	}

	for _, o := range []client.Object{
		&rbacv1.Role{ObjectMeta: in("edit"), Rules: []rbacv1.PolicyRule{{
			APIGroups: []string{"", resourceapi.GroupName, v1alpha1.GroupName},
			Resources: []string{"pods", "events", "resourceclaims", "xpuports"},
			Verbs:     []string{"get", "list"},
		}}},
		&rbacv1.RoleBinding{
			ObjectMeta: in("edit"),
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "edit"},
			Subjects: []rbacv1.Subject{{
				APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "developer",
			}},
		},
		&resourceapi.ResourceClaim{
			ObjectMeta: in("nic"),
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{
					Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "fast"},
				}},
			}},
		},
		&corev1.Pod{ObjectMeta: in("web"), Spec: corev1.PodSpec{
			ResourceClaims: []corev1.PodResourceClaim{{Name: "nic", ResourceClaimName: new("nic")}},
			Containers:     []corev1.Container{{Name: "main", Image: "web"}},
		}},
	} {
		must.Succeed(t, admin.Create(t.Context(), o))
	}

	as := rest.CopyConfig(apiServer.Admin())
	as.Impersonate = rest.ImpersonationConfig{UserName: "developer"}
	got, err := Of(t.Context(), Sources{
		Reader: clientOf(t, as),
		State: func(context.Context, string) (*nodestate.State, error) {
			return nil, errors.New("not asked, because the pod has no node")
		},
		Schedule: func(context.Context, *corev1.Pod) ([]string, string, error) {
			return nil, "", errors.New("nodes is forbidden")
		},
	}, types.NamespacedName{Namespace: namespace.Name, Name: "web"})
	must.Succeed(t, err)

	if got.OK || !strings.HasPrefix(got.Verdict, "claim nic is not Allocated") {
		t.Errorf("verdict %t, %q", got.OK, got.Verdict)
	}
	unknown := strings.Join(got.Unknown, "\n")
	for _, want := range []string{
		"DevicePools: you may not read them; an administrator can bind ClusterRole xpu-view to you",
		"XPUNetworks: you may not read them", "where the pod could go: nodes is forbidden",
	} {
		if !strings.Contains(unknown, want) {
			t.Errorf("not known is\n%s\nand not %q", unknown, want)
		}
	}
	if strings.Contains(unknown, "XPUPorts") || strings.Contains(unknown, "events") {
		t.Errorf("not known is\n%s", unknown)
	}
}

// TestAbsentKinds: kinds that a cluster does not have are known by the errors of the real client.
func TestAbsentKinds(t *testing.T) {
	apiServer.Need(t)
	api := clientOf(t, apiServer.Admin())
	for _, version := range []string{"absent.example.com/v1", v1alpha1.SchemeGroupVersion.String()} {
		list := &unstructured.UnstructuredList{}
		list.SetAPIVersion(version)
		list.SetKind("AbsentList")

		f := &facts{unseen: sets.New[kind](), absent: sets.New[kind]()}
		must.Succeed(t, f.unread("Absents", api.List(t.Context(), list)))
		if !f.absent.Has("Absents") || len(f.unknown) > 0 {
			t.Errorf("%s: absent %v, not known %q", version, f.absent, f.unknown)
		}
	}
}
