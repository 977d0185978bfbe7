// SPDX-License-Identifier: Apache-2.0

package service

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	evpn "github.com/opiproject/opi-api/network/evpn-gw/v1alpha1/gen/go"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
)

// longPause ends 25 s before the next attempt at what failed (31 s + 20 * 30 s).
const longPause = 606 * time.Second

// watchedPlane is a fake data plane with changes, until the channel is closed.
type watchedPlane struct {
	*fakePlane
	changes chan plane.Change
}

func (p watchedPlane) Watch(emit func(plane.Change)) error {
	for change := range p.changes {
		emit(change)
	}
	return nil
}

// running runs an agent in a bubble. Its port p1 in net-blue is down, and the next attempt is far
// away.
func running(t *testing.T) (*Agent, watchedPlane) {
	t.Helper()
	e := watchedPlane{newFakePlane(false), make(chan plane.Change)}
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
		close(e.changes)
	})

	e.fail(a, errors.New("no representor"))
	if _, err := a.create(t, p1, accessPort(mac1, blue)); err != nil {
		t.Fatal(err)
	}

	time.Sleep(longPause)
	synctest.Wait()

	return a, e
}

// fail makes all calls of the data plane fail, or succeed if failure is nil.
func (p watchedPlane) fail(a *Agent, failure error) {
	release, err := a.acquire(context.Background())
	if err != nil {
		panic(err)
	}
	defer release()
	p.failure = failure
}

// wantUp checks that p1 is up after some time.
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

// TestRetrySoonAfterNewNetdev checks that the agent tries again soon after a netdev was added,
// because a driver may say only later which Function the netdev represents.
func TestRetrySoonAfterNewNetdev(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		e.changes <- plane.Change{Scope: plane.ScopeMissing}
		synctest.Wait()
		e.fail(a, nil)
		wantUp(t, a, 1100*time.Millisecond)
	})
}

// TestRetryDespiteNewNetdevs checks that netdevs that are added all the time do not postpone a
// retry.
func TestRetryDespiteNewNetdevs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		createNetwork(t, a, "net-red", 20)
		e.fail(a, nil)

		for range 20 {
			e.changes <- plane.Change{Scope: plane.ScopeMissing}
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

// TestRetrySoonAfterDelete checks that the agent tries again soon after an object was deleted,
// because the object may have had a representor or a VLAN id that another one wants.
func TestRetrySoonAfterDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, e := running(t)
		const other = "vf-0000-03-00-3"
		if _, err := a.create(t, other, accessPort(mac2, blue)); err != nil {
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
