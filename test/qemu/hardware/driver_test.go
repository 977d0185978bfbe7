// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/settings"
)

// TestDriverSettings checks that every setting of a real driver that a pod can change is given back.
// A PF has more settings than a VF.
func TestDriverSettings(t *testing.T) {
	card.InGuest(t, "igb")
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	pfs := card.PFs(t)
	t.Run("VF", func(t *testing.T) {
		changed := leaveDriverSettings(t, engine, deviceOf(t, pfs[0], 0))
		mustHave(t, changed, "rings", "messages", "sysctl")
	})

	t.Run("PF", func(t *testing.T) {
		numVFs := card.Attribute(t, pfs[1], "sriov_numvfs")
		card.SetAttribute(t, pfs[1], "sriov_numvfs", "0")
		t.Cleanup(func() { card.SetAttribute(t, pfs[1], "sriov_numvfs", numVFs) })

		changed := leaveDriverSettings(t, engine, netdev.Device{Name: card.Netdev(pfs[1])})
		mustHave(t, changed, "features", "channels", "rings", "coalescing", "pause",
			"private flags", "messages", "RSS", "sysctl")
	})
}

// leaveDriverSettings has a pod change all that its driver accepts, and releases the Function. It
// returns the changed settings.
func leaveDriverSettings(
	t *testing.T, engine *netdev.Engine, device netdev.Device,
) (changed []string) {
	t.Helper()
	pod := netns.New(t)
	held, err := take(t, engine, device, pod.Path(), function.Interface{Name: "net1"})
	must.Succeed(t, err)
	changed, err = settings.ChangeAll(pod, "net1")
	must.Succeed(t, err)
	t.Logf("changed: %s", strings.Join(changed, ", "))

	must.Succeed(t, held.release())
	after, _, err := engine.Plan(t.Context(), device, pod.Path(), function.Interface{Name: "net1"})
	must.Succeed(t, err)
	if diff := cmp.Diff(held.before.Settings, after.Settings); diff != "" {
		t.Errorf("settings (-before +after):\n%s", diff)
	}

	return changed
}

// mustHave checks that settings of these groups were changed.
func mustHave(t *testing.T, changed []string, groups ...string) {
	t.Helper()
	for _, group := range groups {
		of := func(setting string) bool { return strings.HasPrefix(setting, group+" ") }
		if !slices.ContainsFunc(changed, of) {
			t.Errorf("nothing of %s was changed; only %q", group, changed)
		}
	}
}
