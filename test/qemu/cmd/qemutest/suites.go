package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// guest is a virtual machine with suites to run in it.
type guest struct {
	name    string
	modules []string // the kernel's, to be loaded; the guest has no modprobe that could load others
	own     string   // module of the project, by the name of its folder; "" for none
	options string   // of the own module
	suites  []suite
}

// suite is a test binary that runs in a guest.
type suite struct {
	name  string
	path  string // of its package, in the module
	run   string // which tests, as go test -run
	limit time.Duration
}

// vlanAware are the tests that need a bridge with VLAN filtering, which not every machine's kernel has.
const vlanAware = "^Test(ClientSuite|NetworksReachAcrossXPUs|RestartKeepsTraffic|RestartRestoresWhatWasTakenAway" +
	"|StrayRepresentorIsReleasedAtStart|RepresentorComesAndGoes|NetdevsOfOthersAreLeftAlone|DiedBeforeMarking" +
	"|UplinkComesAndGoes|DeleteCleansUp|Quiet|Trunk|VLANIDChanges|VLANsHeal|DataPlaneChanges|NetworkWaitsForItsVLAN)$" +
	"/^(vlan-aware)?$"

// guests are all there are. None of their tests may be skipped there.
func guests() []guest {
	return []guest{
		{
			name:    "igb",
			modules: []string{"vfio-pci", "bridge", "8021q", "vxlan", "dummy", "veth", "igb", "igbvf"},
			suites: []suite{
				{name: "link", path: "pkg/link", run: "^TestHardware", limit: time.Minute},
				{name: "opibridge", path: "pkg/opibridge", run: vlanAware, limit: 2 * time.Minute},
				{name: "traffic", path: "test/qemu/hardware", run: "^TestTrafficVLAN$", limit: time.Minute},
				// Takes cards away, so it comes last.
				{name: "inventory", path: "test/qemu/hardware", run: "^TestInventory", limit: time.Minute},
			},
		},
		{
			name:    "simnic",
			modules: []string{"vfio-pci", "bridge", "8021q", "vxlan", "dummy", "veth"},
			own:     "simnic",
			// SFs are called as those of ConnectX are.
			options: "auxprefix=mlx5_core",
			suites: []suite{
				{name: "link", path: "pkg/link", run: "^TestHardware", limit: time.Minute},
				{name: "traffic", path: "test/qemu/hardware", run: "^TestTrafficSpoofCheck$", limit: time.Minute},
				{name: "switchdev", path: "test/qemu/hardware", run: "^TestSwitchdev", limit: time.Minute},
			},
		},
	}
}

// selectGuests returns the guests and suites that the command line asks for.
func selectGuests(o options) ([]guest, error) {
	var selected []guest
	for _, g := range guests() {
		if o.guest != "" && o.guest != g.name {
			continue
		}
		if o.only != "" {
			only := strings.Split(o.only, ",")
			g.suites = slices.DeleteFunc(g.suites, func(s suite) bool { return !slices.Contains(only, s.name) })
		}
		for i := range g.suites {
			if o.run != "" {
				g.suites[i].run = o.run
			}
		}
		if len(g.suites) > 0 {
			selected = append(selected, g)
		}
	}
	if len(selected) == 0 {
		return nil, fmt.Errorf("no guest %q with a suite %q: test/qemu/cmd/qemutest/suites.go has all", o.guest, o.only)
	}
	return selected, nil
}

func names(suites []suite) []string {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	return names
}
