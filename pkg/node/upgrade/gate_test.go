// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

// driver is a DRA driver that prepares and unprepares nothing.
type driver struct{ kubeletplugin.DRAPlugin }

func (driver) PrepareResourceClaims(
	context.Context, []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return nil, nil
}

func (driver) UnprepareResourceClaims(
	context.Context, []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	return nil, nil
}

// TestGateWaits: a call before the driver is ready waits for it, or until the kubelet gives up.
func TestGateWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		done := make(chan error, 1)
		go func() {
			_, err := g.UnprepareResourceClaims(t.Context(), nil)
			done <- err
		}()

		ctx, cancel := context.WithTimeout(t.Context(), 45*time.Second)
		defer cancel()

		if _, err := g.PrepareResourceClaims(ctx, nil); !errors.Is(err, errStarting) ||
			!errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Prepare = %v, want that the agent has not begun", err)
		}

		g.open(driver{})
		if err := <-done; err != nil {
			t.Errorf("Unprepare = %v once the driver is there", err)
		}
		if _, err := g.PrepareResourceClaims(t.Context(), nil); err != nil {
			t.Errorf("Prepare = %v once the driver is there", err)
		}
	})
}

// TestGateCloses: running calls get some time, and later calls are refused.
func TestGateCloses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		g.open(driver{})
		ctx, leave, err := g.pass(t.Context()) // this call runs for long
		if err != nil {
			t.Fatal(err)
		}

		go func() { <-ctx.Done(); leave() }()
		begin := time.Now()
		g.close()

		if took := time.Since(begin); took != drainTimeout ||
			!errors.Is(context.Cause(ctx), errClosed) {
			t.Errorf("close took %s, want %s; the call ended by %v", took, drainTimeout,
				context.Cause(ctx))
		}

		if _, err := g.PrepareResourceClaims(t.Context(), nil); !errors.Is(err, errClosed) {
			t.Errorf("Prepare = %v after close", err)
		}
		if err := g.WatchHealthStatus(t.Context(),
			make(chan kubeletplugin.DeviceHealthReport)); err != nil {
			t.Errorf("WatchHealthStatus = %v after close", err)
		}
	})
}

// TestGateClosesUnopened: an agent that ends before it was ready leaves no call waiting.
func TestGateClosesUnopened(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		done := make(chan error, 1)
		go func() {
			_, err := g.PrepareResourceClaims(t.Context(), nil)
			done <- err
		}()

		synctest.Wait()
		g.close()
		if err := <-done; !errors.Is(err, errClosed) {
			t.Errorf("Prepare = %v", err)
		}
	})
}
