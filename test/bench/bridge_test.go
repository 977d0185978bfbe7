// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/plane"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestHardwareBridge measures the data plane that not every machine's kernel supports. It shows the
// rows without goals, because a guest is emulated and slow.
func TestHardwareBridge(t *testing.T) {
	card.InGuest(t, "simnic")
	b := &bench{bin: plan.Programs, dir: t.TempDir(), slow: true}
	rows, err := b.measurePlane(t.Context(), plane.ModeVLANAware)
	must.Succeed(t, err)
	must.Succeed(t, printTable(t.Output(), rows))
}
