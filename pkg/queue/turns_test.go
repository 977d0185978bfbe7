// SPDX-License-Identifier: Apache-2.0

package queue

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

func TestTurns(t *testing.T) {
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.DefaultTypedControllerRateLimiter[reconcile.Request](),
	)
	defer queue.ShutDown()

	turns := NewTurns[reconcile.Request](2)
	if err := turns.Source().Start(t.Context(), queue); err != nil {
		t.Fatal(err)
	}

	request := func(name string) reconcile.Request {
		return reconcile.Request{NamespacedName: types.NamespacedName{Name: name}}
	}
	take := func(name string, want bool) {
		t.Helper()
		if got := turns.Take("slow", request(name)); got != want {
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
	if !turns.Take("quick", request("e")) {
		t.Error("one XPU holds up another")
	}

	turns.Done(request("e"))
	turns.Done(request("a"))
	next("c")
	take("f", false) // the turn is reserved for c
	take("c", true)
	turns.Done(request("b"))
	next("gone") // c was parked twice, but is running
	turns.Done(request("gone"))
	next("d")
	take("d", true)
	turns.Done(request("d"))
	next("f")
	take("f", true)
	turns.Done(request("f"))
	if !turns.Take("quick", request("c")) || turns.turns["slow"] != 0 {
		t.Errorf("a Port at another XPU keeps its turn at the first: %v", turns.turns)
	}

	turns.Done(request("c"))
	turns.Done(request("unknown"))
	if queue.Len() > 0 ||
		len(turns.turns)+len(turns.parked)+len(turns.holders)+len(turns.parkedFor) > 0 {
		t.Errorf("left behind: %d in the queue, %v, %v, %v", queue.Len(), turns.turns, turns.parked,
			turns.holders)
	}
}

// TestTurnsParkOnce checks that a parked request which comes again takes no more memory.
func TestTurnsParkOnce(t *testing.T) {
	turns := NewTurns[string](1)
	turns.Take("slow", "runs")
	for range 1000 {
		turns.Take("slow", "waits")
	}
	if n := len(turns.parked["slow"]); n != 1 {
		t.Errorf("it waits %d times", n)
	}
}

// TestTurnsLosesNothing checks that each woken request runs later and no turn is lost, in whatever
// order Ports move between XPUs, are deleted and are created again.
func TestTurnsLosesNothing(t *testing.T) {
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		queue := workqueue.NewTypedRateLimitingQueue(
			workqueue.DefaultTypedControllerRateLimiter[reconcile.Request](),
		)
		turns := NewTurns[reconcile.Request](1 + random.IntN(2))
		if err := turns.Source().Start(t.Context(), queue); err != nil {
			t.Fatal(err)
		}

		requests := make([]reconcile.Request, 6)
		xpu := map[reconcile.Request]string{} // of the Port; "" if it is deleted
		woken := map[reconcile.Request]bool{} // and has not run since
		var running []reconcile.Request

		for i := range requests {
			requests[i] = reconcile.Request{
				NamespacedName: types.NamespacedName{Name: fmt.Sprint(i)},
			}
		}

		begin := func() {
			request, _ := queue.Get()
			switch at := xpu[request]; {
			case at == "":
				turns.Done(request)
			case turns.Take(at, request):
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
			turns.Done(running[i])
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

		if len(turns.turns)+len(turns.holders)+len(turns.parkedFor) > 0 {
			t.Fatalf("seed %d: turns that nobody has: %v, %v", seed, turns.turns, turns.holders)
		}
	}
}
