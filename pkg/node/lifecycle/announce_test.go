// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"context"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// TestAnnounceWhileRunEnds: an Attach may take longer than Run, but no announcement outlasts Run.
// The race detector checks this too.
func TestAnnounceWhileRunEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	record := journal.Attachment{
		Observed: &netdev.Observed{Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/24")}},
	}
	for range 300 {
		var ended, late atomic.Bool
		m := New(w.records, mortalEngine{w, w.agent}, w, Options{
			BootID: "boot-1", Hooks: mortalQueue{w, w.agent},
			Announce: func(context.Context, netdev.Attached) error {
				if ended.Load() {
					late.Store(true)
				}
				return nil
			},
		}, logr.Discard())

		ctx, cancel := context.WithCancel(t.Context())
		var attaching sync.WaitGroup
		attaching.Go(func() {
			cancel()
			for range 10 {
				m.announce(record)
			}
		})

		must.Succeed(t, m.Run(ctx, nil))
		ended.Store(true)
		attaching.Wait()
		m.announcing.Wait()
		if late.Load() {
			t.Fatal("announced after Run had ended")
		}
	}
}
