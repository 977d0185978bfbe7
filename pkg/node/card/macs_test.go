// SPDX-License-Identifier: Apache-2.0

package card

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// TestMACs follows the address of a VF through what happens to its netdev.
func TestMACs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mutex sync.Mutex
		vf := function.Function{
			ID: function.ID{Address: "0000:3b:02.1"}, Kind: function.VF, PF: pf0, Netdev: "eth5",
			Driver: "iavf",
		}
		functions := []function.Function{
			{ID: function.ID{Address: pf0}, Kind: function.PF, PF: pf0, Netdev: "ens3f0"}, vf,
		}
		answers := map[string]function.MAC{"eth5": "02:00:00:00:00:05"}
		var asked []string
		var failure error
		changed := 0

		macs := NewMACs(MACOptions{
			Functions: func() []function.Function {
				mutex.Lock()
				defer mutex.Unlock()
				return slices.Clone(functions)
			},
			Recorded: func(id function.ID) function.MAC {
				if id == vf.ID {
					return "02:00:00:00:00:0a"
				}
				return ""
			},
			Permanent: func(netdev string) (function.MAC, error) {
				mutex.Lock()
				defer mutex.Unlock()
				asked = append(asked, netdev)
				return answers[netdev], failure
			},
			Changed: func() {
				mutex.Lock()
				defer mutex.Unlock()
				changed++
			},
			Log: logr.Discard(),
		})

		want := func(what string, mac function.MAC, times, changes int) {
			t.Helper()
			synctest.Wait()
			mutex.Lock()
			defer mutex.Unlock()
			if got := macs.Of(vf.ID); got != mac || len(asked) != times || changed != changes {
				t.Errorf("%s: %q, asked %q, changed %d times; want %q, %d, %d", what, got, asked,
					changed, mac, times, changes)
			}
		}
		want("before the start, as recorded", "02:00:00:00:00:0a", 0, 0)

		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		changes := make(chan struct{})
		go func() { _ = macs.Run(ctx, changes) }()
		want("read once", "02:00:00:00:00:05", 1, 1)

		// set makes the VF another one, or removes it.
		set := func(now ...function.Function) {
			mutex.Lock()
			functions = append(functions[:1:1], now...)
			mutex.Unlock()
			changes <- struct{}{}
		}

		inPod := vf
		inPod.Netdev = ""
		set(inPod)
		want("in a pod", "02:00:00:00:00:05", 1, 1)
		set(vf)
		want("back, and read again", "02:00:00:00:00:05", 2, 1)

		rebound := vf
		rebound.Driver, rebound.Netdev = "ice", "eth6"
		mutex.Lock()
		failure = errors.New("the driver hangs")
		mutex.Unlock()
		set(rebound)
		want("does not answer", "02:00:00:00:00:05", 3, 1)

		mutex.Lock()
		failure = nil
		mutex.Unlock()
		set(rebound)
		want("another netdev without such an address", "", 4, 2)

		set(vf)
		want("the first again", "02:00:00:00:00:05", 5, 3)
		set()
		want("gone, and as recorded", "02:00:00:00:00:0a", 5, 4)
	})
}
