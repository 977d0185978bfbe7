// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// TestLossesAreBounded: a sandbox that loses its Function repeatedly, for whatever reason, gets it
// back after ever longer pauses.
func TestLossesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l losses
		a := journal.Attachment{Function: function.ID{Address: "0000:3b:00.2"}, Sandbox: "s1"}
		for range freeLosses {
			l.add(a)
			if err := l.pause(a); err != nil {
				t.Errorf("paused: %v", err)
			}
		}

		for _, pause := range []time.Duration{firstPause, 2 * firstPause, 4 * firstPause} {
			l.add(a)
			time.Sleep(pause - time.Second)
			if l.pause(a) == nil {
				t.Errorf("no pause of %s", pause)
			}

			time.Sleep(time.Second)
			if err := l.pause(a); err != nil {
				t.Errorf("after %s: %v", pause, err)
			}
		}

		for range 100 {
			l.add(a)
		}

		time.Sleep(longestPause)
		if err := l.pause(a); err != nil {
			t.Errorf("after %s: %v", longestPause, err)
		}

		l.add(a)
		a.Sandbox = "s2"
		if err := l.pause(a); err != nil {
			t.Errorf("another sandbox: %v", err)
		}
	})
}
