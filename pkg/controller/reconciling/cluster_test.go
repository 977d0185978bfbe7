// SPDX-License-Identifier: Apache-2.0

package reconciling

import (
	"context"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestConflictsAreSpaced: write conflicts are tried again after pauses that grow, and that begin
// anew after a success.
func TestConflictsAreSpaced(t *testing.T) {
	var failure error
	c := Cluster{CheckLeader: func(context.Context) error { return nil }}
	r := c.Guarded(reconcile.Func(
		func(context.Context, reconcile.Request) (reconcile.Result, error) {
			return reconcile.Result{}, failure
		}))
	pause := func() time.Duration {
		t.Helper()
		result, err := r.Reconcile(t.Context(), reconcile.Request{})
		must.Succeed(t, err)
		return result.RequeueAfter
	}

	conflict := apierrors.NewConflict(schema.GroupResource{}, "a", nil)
	for range 2 {
		failure = conflict
		for want := FirstRetry; want < LastRetry; want *= 2 {
			if got := pause(); got != want {
				t.Fatalf("pause %s, want %s", got, want)
			}
		}
		if got := pause(); got != LastRetry {
			t.Errorf("the longest pause is %s, want %s", got, LastRetry)
		}

		failure = nil
		if got := pause(); got != 0 {
			t.Errorf("pause %s after a success", got)
		}
	}
}
