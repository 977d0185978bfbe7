// SPDX-License-Identifier: Apache-2.0

package nodes

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestNodesThatGoAreForgotten: nodes come and go without end where they are made for pods. Nothing
// is kept of one that is gone, although its agent went first.
func TestNodesThatGoAreForgotten(t *testing.T) {
	scheme := runtime.NewScheme()
	must.Succeed(t, v1alpha1.AddToScheme(scheme))
	must.Succeed(t, corev1.AddToScheme(scheme))
	node := &v1alpha1.XPUNode{
		ObjectMeta: metav1.ObjectMeta{Name: "node1"},
		Status:     v1alpha1.XPUNodeStatus{Agent: &v1alpha1.XPUNodeAgent{Namespace: "xpu-system"}},
	}
	api := fake.NewClientBuilder().WithScheme(scheme).WithObjects(node).
		WithIndex(&corev1.Pod{}, byNode, func(client.Object) []string { return nil }).Build()
	r := &reconciler{
		Cluster: reconciling.Cluster{Client: api},
		Options: Options{Namespace: "xpu-system", Grace: time.Minute},
	}

	result, err := r.Reconcile(t.Context(), reconciling.RequestFor(node))
	must.Succeed(t, err)
	if result.RequeueAfter == 0 {
		t.Error("no time is left for an agent that just went")
	}

	must.Succeed(t, api.Delete(t.Context(), node))
	_, err = r.Reconcile(t.Context(), reconciling.RequestFor(node))
	must.Succeed(t, err)
	r.missed.Retain(func(name string) bool {
		t.Errorf("%s is kept", name)
		return true
	})
}
