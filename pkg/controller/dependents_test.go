package controller

import (
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func TestWaiters(t *testing.T) {
	w := newDependents[string, string]()
	w.await("a", "x")
	w.await("a", "y")
	w.await("b", "x")
	woken := func(topic string, want ...string) {
		t.Helper()
		if got := slices.Sorted(slices.Values(w.of(topic))); !slices.Equal(got, want) {
			t.Errorf("%s wakes %q, want %q", topic, got, want)
		}
	}
	woken("x", "a", "b")
	woken("y", "a")
	w.forget("a")
	woken("x", "b")
	woken("y")
	w.forget("b")
	w.forget("never there")
	if len(w.byTopic)+len(w.byKey) > 0 {
		t.Errorf("left behind: %v, %v", w.byTopic, w.byKey)
	}
}

func TestTurns(t *testing.T) {
	queue := workqueue.NewTypedRateLimitingQueue(retryLimiter[reconcile.Request]())
	defer queue.ShutDown()
	turns := newPerXPULimiter(2)
	if err := turns.source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}
	request := func(name string) reconcile.Request {
		return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
	}
	take := func(name string, want bool) {
		t.Helper()
		if got := turns.take("slow", request(name)); got != want {
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
	if !turns.take("quick", request("e")) {
		t.Error("one XPU holds up another")
	}
	turns.done("quick")
	turns.done("slow") // a
	next("c")
	take("f", false) // the turn is c's
	take("c", true)
	turns.done("slow") // b
	next("c")          // it was parked twice
	take("c", true)
	turns.done("slow")
	next("gone")
	turns.cancel(request("gone"))
	next("d")
	take("d", true)
	turns.done("slow")
	next("f")
	take("f", true)
	turns.done("slow")
	turns.done("slow")
	if queue.Len() > 0 || len(turns.taken)+len(turns.parked)+len(turns.granted) > 0 {
		t.Errorf("left behind: %d in the queue, %v, %v, %v", queue.Len(), turns.taken, turns.parked, turns.granted)
	}
}

func TestStopwatches(t *testing.T) {
	s := newDurations[string]()
	if got := s.elapsed("a"); got != 0 {
		t.Errorf("%s at first", got)
	}
	first := s.since["a"]
	s.since["a"] = first.Add(-time.Minute)
	s.elapsed("b")
	if got := s.elapsed("a"); got < time.Minute {
		t.Errorf("%s after a minute", got)
	}
	s.retain(func(key string) bool { return key == "b" })
	if got := s.elapsed("a"); got != 0 {
		t.Errorf("%s after it was dropped", got)
	}
	s.reset("a")
	if _, ok := s.since["a"]; ok || len(s.since) != 1 {
		t.Errorf("left: %v", s.since)
	}
}
