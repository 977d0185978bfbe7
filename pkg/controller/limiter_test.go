package controller

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func TestPerXPULimiter(t *testing.T) {
	queue := workqueue.NewTypedRateLimitingQueue(retryLimiter())
	defer queue.ShutDown()
	limiter := newPerXPULimiter(2)
	if err := limiter.source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	request := func(name string) reconcile.Request {
		return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
	}
	take := func(name string, want bool) {
		t.Helper()
		if got := limiter.take("slow", request(name)); got != want {
			t.Errorf("take %s: %t", name, got)
		}
	}
	next := func(want string) {
		t.Helper()
		got, _ := queue.Get()
		queue.Done(got)
		if got != request(want) {
			t.Errorf("next is %s, want %s", got, want)
		}
	}
	take("a", true)
	take("b", true)
	take("c", false)
	take("c", false) // an event in between
	take("gone", false)
	take("d", false)
	if !limiter.take("quick", request("e")) {
		t.Error("one XPU holds up another")
	}
	limiter.done(request("e"))
	limiter.done(request("a"))
	next("c")
	take("f", false) // the turn is c's
	take("c", true)
	limiter.done(request("b"))
	next("gone") // c was parked twice, but is at work
	limiter.done(request("gone"))
	next("d")
	take("d", true)
	limiter.done(request("d"))
	next("f")
	take("f", true)
	limiter.done(request("f"))
	if !limiter.take("quick", request("c")) || limiter.taken["slow"] != 0 {
		t.Errorf("a Port at another XPU keeps its turn at the first: %v", limiter.taken)
	}
	limiter.done(request("c"))
	limiter.done(request("unknown"))
	if queue.Len() > 0 || len(limiter.taken)+len(limiter.parked)+len(limiter.holds) > 0 {
		t.Errorf("left behind: %d in the queue, %v, %v, %v", queue.Len(), limiter.taken, limiter.parked, limiter.holds)
	}
}
