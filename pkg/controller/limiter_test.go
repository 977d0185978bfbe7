package controller

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func TestPerXPULimiter(t *testing.T) {
	queue := workqueue.NewTypedRateLimitingQueue(retryLimiter[reconcile.Request]())
	defer queue.ShutDown()
	limiter := newPerXPULimiter(2)
	if err := limiter.wakeups.source().Start(t.Context(), queue); err != nil {
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

// TestPerXPULimiterLosesNothing: whatever moves between XPUs, is deleted and is made again, in whatever order, each request that
// was woken runs after it was, and no turn is lost.
func TestPerXPULimiterLosesNothing(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		queue := workqueue.NewTypedRateLimitingQueue(retryLimiter[reconcile.Request]())
		limiter := newPerXPULimiter(1 + random.IntN(2))
		if err := limiter.wakeups.source().Start(t.Context(), queue); err != nil {
			t.Fatal(err)
		}
		requests := make([]reconcile.Request, 6)
		xpu := map[reconcile.Request]string{} // of the Port; "" if it is gone
		woken := map[reconcile.Request]bool{} // and has not run since
		var running []reconcile.Request
		for i := range requests {
			requests[i] = reconcile.Request{NamespacedName: types.NamespacedName{Name: fmt.Sprint(i)}}
		}
		begin := func() {
			request, _ := queue.Get()
			switch at := xpu[request]; {
			case at == "":
				limiter.done(request)
			case limiter.take(at, request):
				woken[request] = false
				running = append(running, request)
				return
			default:
				queue.Done(request)
				return
			}
			woken[request] = false
			queue.Done(request)
		}
		end := func() {
			i := random.IntN(len(running))
			limiter.done(running[i])
			queue.Done(running[i])
			running = slices.Delete(running, i, i+1)
		}
		for range 200 {
			switch step := random.IntN(3); {
			case step == 0:
				request := requests[random.IntN(len(requests))]
				xpu[request] = []string{"", "one", "two"}[random.IntN(3)]
				woken[request] = true
				queue.Add(request)
			case step == 1 && queue.Len() > 0:
				begin()
			case step == 2 && len(running) > 0:
				end()
			}
		}
		for queue.Len() > 0 || len(running) > 0 {
			if queue.Len() > 0 {
				begin()
			} else {
				end()
			}
		}
		queue.ShutDown()
		for request, still := range woken {
			if still {
				t.Errorf("seed %d: %s was woken and does not run", seed, request)
			}
		}
		if len(limiter.taken)+len(limiter.holds) > 0 {
			t.Fatalf("seed %d: turns that nobody has: %v, %v", seed, limiter.taken, limiter.holds)
		}
	}
}
