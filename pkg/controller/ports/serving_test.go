// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/model"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestNumberOfPorts: a node cannot have Ports without end, by SFs that it makes up. What it has
// stays.
func TestNumberOfPorts(t *testing.T) {
	scheme := runtime.NewScheme()
	must.Succeed(t, v1alpha1.AddToScheme(scheme))

	for _, test := range []struct {
		up        int
		functions int32
		refused   string
	}{
		{1024, 0, "XPU card has 1024 Ports, and node node1 reports 0 Functions"}, {1023, 0, ""},
		{1024, 600, ""},
		{1200, 600, "XPU card has 1200 Ports, and node node1 reports 600 Functions"},
	} {
		node := &v1alpha1.XPUNode{
			ObjectMeta: metav1.ObjectMeta{Name: "node1"},
			Status:     v1alpha1.XPUNodeStatus{Functions: test.functions},
		}

		port := &v1alpha1.XPUPort{Spec: v1alpha1.XPUPortSpec{NodeName: "node1", XPU: "card"}}
		var others []*v1alpha1.XPUPort
		for i := range test.up + 2 { // two wait
			other := port.DeepCopy()
			other.Namespace, other.Name = "xpu-system", fmt.Sprint("port", i)
			if i < test.up {
				other.Status.BridgePort = other.Name
			}
			others = append(others, other)
		}

		r := &reconciler{
			Cluster: reconciling.Cluster{
				Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(node).Build(),
			},
			Options: Options{Ports: model.NewPorts(others...)},
		}

		err := r.checkNumber(t.Context(), port)
		if test.refused == "" && err != nil || test.refused != "" &&
			(err == nil || !strings.Contains(err.Error(), test.refused)) {
			t.Errorf("%d Ports and %d Functions: %v, want %q", test.up, test.functions, err,
				test.refused)
		}

		port.Status.BridgePort = "up"
		must.Succeed(t, r.checkNumber(t.Context(), port))
	}
}

// TestGoneIsForgotten: nothing is kept of a Port that is gone before it was admitted.
func TestGoneIsForgotten(t *testing.T) {
	ports := model.NewPorts()
	r := &reconciler{Options: Options{Ports: ports}, siblings: siblings{ports: ports}}
	port := &v1alpha1.XPUPort{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "uid"}}
	queue := workqueue.NewTypedRateLimitingQueue(reconciling.RetryLimiter[reconcile.Request]())
	defer queue.ShutDown()

	r.seen.Elapsed(port.UID)
	r.portChanged(t.Context(), model.Change{Old: port}, queue)
	r.seen.Retain(func(uid types.UID) bool {
		t.Errorf("%s is kept", uid)
		return true
	})
}
