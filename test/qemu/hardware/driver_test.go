// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	vnetns "github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
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
		mustHave(t, changed, "rings", "messages")
	})

	t.Run("PF", func(t *testing.T) {
		numVFs := card.Attribute(t, pfs[1], "sriov_numvfs")
		card.SetAttribute(t, pfs[1], "sriov_numvfs", "0")
		t.Cleanup(func() { card.SetAttribute(t, pfs[1], "sriov_numvfs", numVFs) })

		changed := leaveDriverSettings(t, engine, netdev.Device{Name: card.Netdev(pfs[1])})
		mustHave(t, changed, "features", "channels", "rings", "coalescing", "pause",
			"private flags", "messages")
	})
}

// leaveDriverSettings has a pod change all that its driver accepts, and releases the Function. It
// returns the groups of the changed settings.
func leaveDriverSettings(
	t *testing.T, engine *netdev.Engine, device netdev.Device,
) (groups []string) {
	t.Helper()
	pod := netns.New(t)
	held, err := take(t, engine, device, pod.Path(), function.Interface{Name: "net1"})
	must.Succeed(t, err)
	conn, err := ethtool.Dial(vnetns.NsHandle(pod.Fd()))
	must.Succeed(t, err)
	defer conn.Close()

	for _, group := range ethtool.Groups() {
		before := held.before.Settings["ethtool "+group]
		for _, name := range slices.Sorted(maps.Keys(before)) {
			if change(conn, held.place.Index, group, name, before[name]) {
				t.Logf("%s %q was %s", group, name, before[name])
				groups = append(groups, group)
			}
		}
	}

	must.Succeed(t, held.release())
	after, _, err := engine.Plan(t.Context(), device, pod.Path(), function.Interface{Name: "net1"})
	must.Succeed(t, err)
	if diff := cmp.Diff(held.before.Settings, after.Settings); diff != "" {
		t.Errorf("settings (-before +after):\n%s", diff)
	}

	return slices.Compact(groups)
}

// change reports whether the driver accepts another value for a setting.
func change(conn *ethtool.Conn, index int, group, name, value string) bool {
	for _, other := range others(value) {
		if conn.Change(index, group, map[string]string{name: other}) != nil {
			continue
		}
		now, err := conn.Read(index, group)
		if err == nil && now[name] != value {
			return true
		}
	}
	return false
}

// others returns values of the same kind as value.
func others(value string) []string {
	if i := slices.Index([]string{ethtool.On, ethtool.Off}, value); i >= 0 {
		return []string{[]string{ethtool.Off, ethtool.On}[i]}
	}
	if n, err := strconv.Atoi(value); err == nil {
		var list []string
		for _, other := range []int{n / 2, 2 * n, n + 1, max(n-1, 0), 1 - min(n, 1)} {
			list = append(list, strconv.Itoa(other))
		}
		return list
	}
	if first, _, isList := strings.Cut(value, " "); isList { // as RSS table and message classes
		return []string{first}
	}
	return nil
}

func mustHave(t *testing.T, groups []string, names ...string) {
	t.Helper()
	for _, name := range names {
		if !slices.Contains(groups, name) {
			t.Errorf("nothing of %s was changed; only of %q", name, groups)
		}
	}
}
