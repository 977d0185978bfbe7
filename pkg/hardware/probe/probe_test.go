// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestWaitsEndWithContext checks that waiting for a busy card, or for an effect, ends with ctx.
func TestWaitsEndWithContext(t *testing.T) {
	const ends = 31 * time.Millisecond
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	t.Cleanup(func() { must.Succeed(t, engine.Close()) })

	for name, wait := range map[string]func(ctx context.Context, t *testing.T, p *prober){
		"busy": func(ctx context.Context, t *testing.T, p *prober) {
			t.Helper()
			err := p.retryBusy(ctx, func() error { return unix.EBUSY })
			if !errors.Is(err, unix.EBUSY) {
				t.Errorf("error %v, want %v", err, unix.EBUSY)
			}
		},
		"no effect": func(ctx context.Context, t *testing.T, p *prober) {
			t.Helper()
			if took := p.waitFor(ctx, func(netdev.VFState) bool { return false }); took >= 0 {
				t.Errorf("shows after %v", took)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), ends)
				defer cancel()

				p := &prober{
					Options: Options{Engine: engine},
					device:  netdev.Device{PF: &netdev.PF{Name: "no-such-pf"}},
				}

				begin := time.Now()
				wait(ctx, t, p)
				if took := time.Since(begin); took != ends {
					t.Errorf("took %v, want %v", took, ends)
				}
			})
		})
	}
}

// TestPatientlyAtLeastOnce checks that the steps that restore a VF are tried even if ctx has ended.
func TestPatientlyAtLeastOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	calls := 0
	must.Succeed(t, (&prober{}).retryBusy(ctx, func() error { calls++; return nil }))
	if calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}
}
