// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
	"github.com/opiproject/xpu-device-plugin/test/qemu/settings"
)

// TestDriverSettings checks that every setting of a real driver that a pod can change is given back.
// A PF has more settings than a VF.
func TestDriverSettings(t *testing.T) {
	guest := os.Getenv(plan.GuestVariable)
	if guest != "igb" && guest != "simnic" {
		t.Skip("make test-qemu runs it in the guests igb and simnic")
	}
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	pfs := card.PFs(t)
	t.Run("VF", func(t *testing.T) {
		changed := leaveDriverSettings(t, engine, deviceOf(t, pfs[0], 0))
		if guest == "simnic" {
			mustHave(t, changed, "channels", "RSS", "sysctl")
		} else {
			mustHave(t, changed, "rings", "messages", "sysctl")
		}
	})
	if guest == "simnic" {
		return
	}

	t.Run("PF", func(t *testing.T) {
		numVFs := card.Attribute(t, pfs[1], "sriov_numvfs")
		card.SetAttribute(t, pfs[1], "sriov_numvfs", "0")
		t.Cleanup(func() { card.SetAttribute(t, pfs[1], "sriov_numvfs", numVFs) })

		changed := leaveDriverSettings(t, engine, netdev.Device{Name: card.Netdev(pfs[1])})
		mustHave(t, changed, "features", "channels", "rings", "coalescing", "pause",
			"private flags", "messages", "RSS", "sysctl")
	})
}

// TestDriverWishes checks that a pod gets the settings of the driver that it asks for, that they are
// given back, and that what the card does not have is refused before anything is changed.
func TestDriverWishes(t *testing.T) {
	guest := os.Getenv(plan.GuestVariable)
	if guest != "igb" && guest != "simnic" {
		t.Skip("make test-qemu runs it in the guests igb and simnic")
	}
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()

	pfs := card.PFs(t)
	if guest == "simnic" {
		testWishes(t, engine, deviceOf(t, pfs[0], 0), simnicWishes)
		return
	}

	numVFs := card.Attribute(t, pfs[1], "sriov_numvfs")
	card.SetAttribute(t, pfs[1], "sriov_numvfs", "0")
	t.Cleanup(func() { card.SetAttribute(t, pfs[1], "sriov_numvfs", numVFs) })
	testWishes(t, engine, netdev.Device{Name: card.Netdev(pfs[1])}, igbWishes)
}

// driverWish is what a pod asks of a driver.
type driverWish struct {
	ethtool function.Ethtool
	got     map[string]string // settings in the pod, by the names of package settings
	refused string            // a part of the error
}

const otherKey = "ff02030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728"

var simnicWishes = map[string]driverWish{
	"all of RSS": {
		ethtool: function.Ethtool{"RSS": {
			"table": "weights 3 0 1", "hash key": otherKey, "hash function": "2",
		}},
		got: map[string]string{
			"RSS table": "0 0 0 0 0 0 0 0 0 0 0 0 2 2 2 2", "RSS hash key": otherKey,
			"RSS hash function": "2",
		},
	},
	"equal shares of some queues": {
		ethtool: function.Ethtool{"RSS": {"table": "equal 3"}},
		got:     map[string]string{"RSS table": "equal 3"},
	},
	"a short key": {
		ethtool: function.Ethtool{"RSS": {"hash key": "6d5a"}},
		refused: "ethtool.rss.hashKey: has 2 bytes, and the card's key has 40",
	},
	"weights beyond the table": {
		ethtool: function.Ethtool{"RSS": {"table": "weights 16 1"}},
		refused: "ethtool.rss.weights: their sum is 17, and the card's table has 16 entries",
	},
	"more equal shares than the table has entries": {
		ethtool: function.Ethtool{"channels": {"combined": "32"}, "RSS": {"table": "equal 20"}},
		refused: "ethtool.rss.equal: is 20, and the card's table has 16 entries",
	},
	"other channels": {
		ethtool: function.Ethtool{"channels": {"combined": "8"}, "RSS": {"table": "equal 4"}},
		got:     map[string]string{"channels combined": "8", "RSS table": "equal 4"},
	},
	"channels that the driver does not have": {
		ethtool: function.Ethtool{"channels": {"rx": "2"}, "RSS": {"table": "equal 2"}},
		refused: `ethtool channels ["rx"]: the driver cannot change it`,
	},
}

// igbWishes need the two channels of a PF without VFs on a machine with two or more processors, or
// the one that it has otherwise.
var igbWishes = map[string]driverWish{
	"shares": {
		ethtool: function.Ethtool{"RSS": {"table": "weights 1"}},
		got:     map[string]string{"RSS table": "equal 1"},
	},
	"too many queues": {
		ethtool: function.Ethtool{"RSS": {"table": "equal 100"}},
		refused: "ethtool.rss: needs 100 queues, and the netdev has ",
	},
	"a key that the driver does not tell": {
		ethtool: function.Ethtool{"RSS": {"hash key": "6d5a"}},
		refused: `ethtool RSS ["hash key"]: the driver cannot change it; it can change hash function`,
	},
}

func testWishes(
	t *testing.T, engine *netdev.Engine, device netdev.Device, wishes map[string]driverWish,
) {
	for name, wish := range wishes {
		t.Run(name, func(t *testing.T) {
			pod := netns.New(t)
			want := function.Interface{Name: "net1", Ethtool: wish.ethtool}
			before, _, err := engine.Plan(t.Context(), device, pod.Path(), function.Interface{Name: "net1"})
			must.Succeed(t, err)
			held, err := take(t, engine, device, pod.Path(), want)
			if wish.refused != "" {
				if err == nil || !strings.Contains(err.Error(), wish.refused) {
					t.Errorf("error %v, want %q", err, wish.refused)
				}
				return
			}
			must.Succeed(t, err)

			got, err := settings.Of(pod, "net1")
			must.Succeed(t, err)
			for setting, value := range wish.got {
				if got[setting] != value {
					t.Errorf("%s is %q, want %q", setting, got[setting], value)
				}
			}

			must.Succeed(t, held.release())
			after, _, err := engine.Plan(t.Context(), device, pod.Path(), function.Interface{Name: "net1"})
			must.Succeed(t, err)
			if diff := cmp.Diff(before.Settings, after.Settings); diff != "" {
				t.Errorf("settings (-before +after):\n%s", diff)
			}
		})
	}
}

// TestDriverTable checks that the RSS table of the host, or of the pod before, is not in the way of
// a pod's channels, and that the table comes back. The kernel refuses to take a channel away that a
// configured table refers to, and does not tell whether a table was configured.
func TestDriverTable(t *testing.T) {
	card.InGuest(t, "simnic")
	engine, err := netdev.New(netdev.Options{})
	must.Succeed(t, err)
	defer engine.Close()
	device := deviceOf(t, card.PFs(t)[0], 0)

	const explicit = "0 1 2 3 3 3 3 3 3 3 3 3 3 3 3 3"
	few := function.Ethtool{"channels": {"combined": "2"}}
	fewEqual := function.Ethtool{"channels": {"combined": "2"}, "RSS": {"table": "equal 2"}}
	more := function.Ethtool{"channels": {"combined": "8"}, "RSS": {"table": "equal 4"}}
	fromPod := map[string]string{"combined": "4"}
	for name, test := range map[string]struct {
		host   string // the table
		pods   []function.Ethtool
		change map[string]string // channels that a pod sets itself
	}{
		"host's table": {host: explicit, pods: []function.Ethtool{fewEqual}},
		"host's table and channels": {
			host: explicit, pods: []function.Ethtool{{"channels": {"combined": "8"}}},
		},
		"pod before": {host: "equal 4", pods: []function.Ethtool{more, few}},
		"pod before with its own channels": {
			host: "equal 4", pods: []function.Ethtool{more, few}, change: fromPod,
		},
	} {
		t.Run(name, func(t *testing.T) {
			host := netns.Current(t)
			settings.Set(t, host, device.Name, "RSS", map[string]string{"table": test.host})
			t.Cleanup(func() {
				settings.Set(t, host, device.Name, "RSS", map[string]string{"table": ""})
			})
			for _, ethtool := range test.pods {
				pod := netns.New(t)
				held, err := take(t, engine, device, pod.Path(),
					function.Interface{Name: "net1", Ethtool: ethtool})
				if err != nil {
					t.Errorf("%v: %v", ethtool, errors.Join(err, held.release()))
					continue
				}
				if test.change != nil {
					settings.Set(t, pod, "net1", "channels", test.change)
				}

				must.Succeed(t, held.release())
				got, err := settings.Of(host, device.Name)
				must.Succeed(t, err)
				if got["RSS table"] != test.host || got["channels combined"] != "4" {
					t.Errorf("%v: table %q of %s channels, want %q of 4", ethtool, got["RSS table"],
						got["channels combined"], test.host)
				}
			}
		})
	}
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
