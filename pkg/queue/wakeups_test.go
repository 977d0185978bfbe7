// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"testing"
	"time"

	"k8s.io/client-go/util/workqueue"
)

// TestWakeups checks that requests added before the controller starts are not lost.
func TestWakeups(t *testing.T) {
	var w Wakeups[string]
	w.Add(0, "early")
	w.Add(time.Hour, "early")
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.DefaultTypedControllerRateLimiter[string](),
	)
	defer queue.ShutDown()

	if err := w.Source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}

	w.Add(0, "late")
	for _, want := range []string{"early", "late"} {
		if got, _ := queue.Get(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}

	if n := queue.Len(); n > 0 {
		t.Errorf("%d more", n)
	}
}
