// SPDX-License-Identifier: Apache-2.0

package ports

import (
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/reconciling"
	"github.com/opiproject/xpu-device-plugin/pkg/controller/sessions"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestOrphansOfXPUGone: nothing of an XPU that is gone is remembered, and orphans of other XPUs are.
func TestOrphansOfXPUGone(t *testing.T) {
	scheme := runtime.NewScheme()
	must.Succeed(t, v1alpha1.AddToScheme(scheme))
	card := &v1alpha1.XPU{}
	card.Name = "card"
	r := &resyncs{
		Cluster: reconciling.Cluster{
			Client: fake.NewClientBuilder().WithScheme(scheme).WithObjects(card).Build(),
		},
		Options: Options{Sessions: sessions.New(sessions.Options{})},
		retries: reconciling.RetryLimiter[reconcile.Request](),
	}
	ofCard, ofGone := orphan{"card", kindPort, "vf"}, orphan{"gone", kindPort, "vf"}
	requests := sessions.RequestFor(t.Context(), "card")
	requests = append(requests, sessions.RequestFor(t.Context(), "gone")...)
	for _, o := range []orphan{ofCard, ofGone} {
		r.seen.Elapsed(o)
	}
	for _, request := range requests {
		r.retries.When(request)
		_, err := r.Reconcile(t.Context(), request)
		must.Succeed(t, err)
	}

	if n := r.retries.NumRequeues(requests[1]); n != 0 {
		t.Errorf("%d retries of an XPU that is gone are counted", n)
	}
	var left []orphan
	r.seen.Retain(func(o orphan) bool { left = append(left, o); return true })
	if len(left) != 1 || left[0] != ofCard {
		t.Errorf("orphans %v are remembered, want %v", left, ofCard)
	}
}
