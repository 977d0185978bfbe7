// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"
)

// longPause is after attempts at what failed, 25 s before the next (31 s + 20 * 30 s).
const longPause = 606 * time.Second

// eventful is a data plane on paper that tells what its events may have changed.
type eventful struct {
	*paper
	tasks chan task // until it is closed
}

func (e eventful) watch(emit func(task)) error {
	for t := range e.tasks {
		emit(t)
	}
	return nil
}

// running runs an agent on paper, in a bubble, with the port p1 in net-blue: down, and not tried
// again for long.
func running(t *testing.T) (*Agent, eventful) {
	t.Helper()
	e := eventful{
		&paper{networks: map[string]uint32{}, ports: map[string]string{}}, make(chan task),
	}
	a := open(t, filepath.Join(t.TempDir(), "state.db"), e)
	createNetwork(t, a, "net-blue", 10)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()

	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		close(e.tasks)
	})

	e.fail(a, errors.New("no representor"))
	if _, err := a.create(t, p1, access(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	time.Sleep(longPause)
	synctest.Wait()

	return a, e
}

// fail has all that is asked of the data plane fail, nil: succeed.
func (e eventful) fail(a *Agent, failure error) {
	end, err := a.begin(context.Background())
	if err != nil {
		panic(err)
	}
	defer end()
	e.failure = failure
}

// wantUp checks that p1 is up in some time.
func wantUp(t *testing.T, a *Agent, in time.Duration) {
	t.Helper()
	time.Sleep(in)
	synctest.Wait()
	a.mu.RLock()
	defer a.mu.RUnlock()
	if err := a.ports.objects[p1].failure; err != nil {
		t.Errorf("after %s: %v", in, err)
	}
}

// TestRetrySoonAfterArrival: a driver may tell of a netdev before it tells whose representor that
// is.
func TestRetrySoonAfterArrival(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		e.tasks <- task{kind: taskArrival}
		synctest.Wait()
		e.fail(a, nil)
		wantUp(t, a, 1100*time.Millisecond)
	})
}

// TestRetryInSpiteOfArrivals: a machine on which netdevs come all the time must not put off what
// failed.
func TestRetryInSpiteOfArrivals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		createNetwork(t, a, "net-red", 20)
		e.fail(a, nil)

		for range 20 {
			e.tasks <- task{kind: taskArrival}
			time.Sleep(100 * time.Millisecond)
		}

		synctest.Wait()
		a.mu.RLock()
		defer a.mu.RUnlock()

		if err := a.networks.objects["net-red"].failure; err != nil {
			t.Errorf("network: %v", err)
		}
	})
}

// TestRetrySoonAfterDelete: what was deleted may have been in the way, as the holder of a
// representor or of a VLAN.
func TestRetrySoonAfterDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		const other = "vf-0000-03-00-3"
		if _, err := a.create(t, other, access(mac2, blue)); err != nil {
			t.Fatal(err)
		}

		time.Sleep(longPause)
		synctest.Wait()
		e.fail(a, nil)
		if err := a.delete(t, other, false); err != nil {
			t.Fatal(err)
		}

		wantUp(t, a, 1100*time.Millisecond)
	})
}

func createNetwork(t *testing.T, a *Agent, id string, vlan uint32) {
	t.Helper()
	_, err := networkServer{Agent: a}.CreateLogicalBridge(t.Context(),
		&evpn.CreateLogicalBridgeRequest{
			LogicalBridgeId: id,
			LogicalBridge:   &evpn.LogicalBridge{Spec: &evpn.LogicalBridgeSpec{VlanId: vlan}},
		})

	if err != nil {
		t.Fatal(err)
	}
}
