// SPDX-License-Identifier: Apache-2.0

package inspect_test

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	"github.com/opiproject/xpu-device-plugin/pkg/inspect"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestVersions: the programs of all namespaces are found, and those of one if the user may read no
// other one.
func TestVersions(t *testing.T) {
	part := map[string]string{"app.kubernetes.io/part-of": "xpu-device-plugin"}
	running := func(name, image string) corev1.PodTemplateSpec {
		return corev1.PodTemplateSpec{Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: name, Image: image}}}}
	}
	agents := &appsv1.DaemonSet{ObjectMeta: named("xpu-system", "xpu-agent"),
		Spec: appsv1.DaemonSetSpec{Template: running("xpu-agent", "a.example:5000/xpu-agent:v1")}}
	controller := &appsv1.Deployment{ObjectMeta: named("xpu-system", "xpu-controller"),
		Spec: appsv1.DeploymentSpec{
			Template: running("xpu-controller", "a.example:5000/xpu-controller@sha256:12")}}
	bridge := &appsv1.DaemonSet{ObjectMeta: named("dpus", "opi-bridge"),
		Spec: appsv1.DaemonSetSpec{Template: running("opi-bridge", "opi-bridge")}}
	other := &appsv1.Deployment{ObjectMeta: named("xpu-system", "web"),
		Spec: appsv1.DeploymentSpec{Template: running("web", "web:v7")}}
	for _, o := range []client.Object{agents, controller, bridge} {
		o.SetLabels(part)
	}

	want := []inspect.Program{
		{Name: "opi-bridge", Namespace: "dpus", Version: "latest", Image: "opi-bridge"},
		{Name: "xpu-agent", Namespace: "xpu-system", Version: "v1",
			Image: "a.example:5000/xpu-agent:v1"},
		{Name: "xpu-controller", Namespace: "xpu-system", Version: "sha256:12",
			Image: "a.example:5000/xpu-controller@sha256:12"},
	}
	got, err := inspect.Versions(t.Context(), reader(t, agents, controller, bridge, other),
		"xpu-system")
	must.Succeed(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	local := builder(t, agents, controller, bridge).WithInterceptorFuncs(interceptor.Funcs{
		List: func(ctx context.Context, c client.WithWatch, list client.ObjectList,
			options ...client.ListOption,
		) error {
			if (&client.ListOptions{}).ApplyOptions(options).Namespace == "" {
				return apierrors.NewForbidden(schema.GroupResource{}, "", nil)
			}
			return c.List(ctx, list, options...)
		},
	}).Build()
	got, err = inspect.Versions(t.Context(), local, "xpu-system")
	must.Succeed(t, err)
	if diff := cmp.Diff(want[1:], got); diff != "" {
		t.Errorf("with rights in one namespace (-want +got):\n%s", diff)
	}
}
