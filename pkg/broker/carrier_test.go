// SPDX-License-Identifier: Apache-2.0

package broker

import (
	"context"
	"testing"

	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestFinalizerKeepsWhatWasChecked: a tenant's API server answers the patch of a finalizer with
// another spec than the broker has checked. The broker goes on with the spec that it has checked.
func TestFinalizerKeepsWhatWasChecked(t *testing.T) {
	scheme, err := Scheme()
	must.Succeed(t, err)

	patched := ""
	lies := interceptor.Funcs{Patch: func(
		_ context.Context, _ client.WithWatch, o client.Object, _ client.Patch,
		_ ...client.PatchOption,
	) error {
		patched = o.GetName()
		o.(*v1alpha1.XPUPort).Spec.Network = "other"
		return nil
	}}
	tc := &tenantCluster{
		client: fake.NewClientBuilder().WithScheme(scheme).WithInterceptorFuncs(lies).Build(),
	}

	port := &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{Network: "blue"}}
	port.Name = "a"
	must.Succeed(t, tc.changeFinalizer(t.Context(), port, controllerutil.AddFinalizer,
		v1alpha1.FinalizerPort))
	if patched != "a" || port.Spec.Network != "blue" {
		t.Errorf("patched %q, and the checked spec is %+v", patched, port.Spec)
	}
}
