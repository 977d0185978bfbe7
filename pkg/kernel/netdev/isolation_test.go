// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"errors"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/isolation"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// TestIsolation runs two tenants one after the other on a veth. The first is hostile.
func TestIsolation(t *testing.T) {
	isolation.Run(t, func(t *testing.T) isolation.Stage {
		t.Parallel()
		w := newWorld(t, nil)
		var before netdev.Snapshot
		var place netdev.Place

		return isolation.Stage{
			Host: w.host, Far: w.xpu, FarNetdev: "pf0vf0",
			Attach: func(t *testing.T, pod *netns.Namespace) {
				want := function.Interface{Name: "net1"}
				var err error
				before, place, err = w.engine.Plan(t.Context(), device(), pod.Path(), want)
				must.Succeed(t, err)
				_, err = w.engine.Attach(t.Context(), device(), before, place, want)
				must.Succeed(t, err)
			},
			Release: func(t *testing.T, _ *netns.Namespace) error {
				_, err := w.engine.Restore(t.Context(), netdev.Device{}, before, place)
				return err
			},
			MayKeep: func(err error) bool { return errors.Is(err, netdev.ErrLeaks) },
		}
	})
}
