// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
)

// guest is a virtual machine with suites to run in it.
type guest struct {
	name string
	nic  string // the guest's name for its tests, see plan.Plan
	full bool   // runs only if the command line asks for everything
	// 0 means the values of the command line, and 1 processor
	cards, vfs int
	processors int

	modules []string // the kernel's modules to load, because the guest has no modprobe
	own     string   // folder of the project's module, or ""
	options string   // options of the project's module
	suites  []suite
}

// suite is a test binary that runs in a guest.
type suite struct {
	name  string
	path  string        // folder of its package in the module
	run   string        // selects tests, as go test -run
	limit time.Duration // for the suite on one of two busy processors
	full  bool          // runs only if the command line asks for everything
	// programs are packages of programs for /usr/bin, in the module ("cmd/xpu-agent") or by import
	// path.
	programs []string
	// debian are programs of Debian packages that the tests run.
	debian packaged
	// files are files of the project that the tests read, below their working directory.
	files []string
	// unbuilt is a kernel module that the tests need, or nothing.
	unbuilt unbuilt
	// soaks means that the tests have the flag -soak for their duration.
	soaks bool
	// lives means that the tests have the flags -lives, for the number of pods, and -seed, for
	// random numbers.
	lives bool
	// personalities means that the tests have the flag -personalities, for the drivers that simnic
	// plays.
	personalities bool
	// seeded means that the tests need an opi-bridge that has any of the faults of test/conformance:
	// see plan.SeededBridge.
	seeded bool
	// api means that the suite needs an API server, which all suites of the guest share: see
	// plan.AdminKubeconfig.
	api bool
}

// packaged are programs, libraries that these load by name, and other files, in Debian packages that
// no other suite needs. They keep their paths.
type packaged struct {
	packages, programs, files []string
}

// unbuilt is a module of the guests' kernel that Debian has as source only.
type unbuilt struct {
	name    string
	folder  string // of its source in the kernel's
	setting string // of kbuild, by which the module is made
}

// dpdk is the program that forwards in TestDPDK, with the driver of igb's VFs.
var dpdk = packaged{
	packages: []string{"dpdk-dev", "librte-net-e1000-25", "librte-mempool-ring25"},
	programs: []string{
		"/usr/bin/dpdk-testpmd", "/usr/lib/x86_64-linux-gnu/librte_net_e1000.so.25",
		"/usr/lib/x86_64-linux-gnu/librte_mempool_ring.so.25",
	},
}

// perftest are the programs of examples/rdma.yaml, with the library for siw.
var perftest = packaged{
	packages: []string{"perftest", "ibverbs-providers", "dash", "coreutils"},
	programs: []string{
		"/usr/bin/ib_write_bw", "/usr/bin/ib_send_lat", "/usr/bin/dash", "/usr/bin/sleep",
		"/usr/lib/x86_64-linux-gnu/libibverbs/libsiw-rdmav34.so",
	},
	files: []string{"/etc/libibverbs.d/siw.driver"},
}

// siw is RDMA in software that works in every network namespace, as rdma_rxe does not.
var siw = unbuilt{"siw", "drivers/infiniband/sw/siw", "CONFIG_RDMA_SIW=m"}

// vlanAware selects the tests that need a bridge with VLAN filtering, which some machines' kernels
// lack.
const vlanAware = "^Test(DataPlanes|Trunk|TrunkSources|VLANIDChanges|VLANsHeal|DataPlaneChanges|NetworkWaitsForItsVLAN|SeveralBridges)$/^(vlan-aware)?$"

// guests returns all guests. None of their tests may be skipped there.
func guests() []guest {
	return []guest{
		{
			name: "igb",
			nic:  "igb",
			modules: []string{
				"vfio-pci", "vfio_iommu_type1", "crc32_generic", "rdma_rxe", "rdma_ucm", "bridge",
				"crc32c_generic", "nf_tables", "nft_meta_bridge", "8021q", "macvlan", "ipvlan",
				"bonding", "vxlan", "dummy", "veth",
				"macvtap", "sch_ingress", "cls_matchall", "act_mirred", "igb", "igbvf",
			},
			own: "sim_vfio_pci",
			suites: []suite{
				{name: "netdev", path: "pkg/kernel/netdev",
					run:   "^Test(Hardware|VLANElsewhere|IPVLANElsewhere|Uppers|StackedOnHost)",
					limit: 10 * time.Minute},
				{name: "traffic", path: "test/qemu/hardware", run: "^TestTrafficVLAN$",
					limit: 3 * time.Minute},
				{name: "isolation", path: "test/qemu/hardware", run: "^TestIsolation$",
					limit: 5 * time.Minute},
				{name: "properties", path: "test/qemu/hardware", run: "^Test(Properties|Driver(Settings|Wishes)|VFGone)",
					limit: 5 * time.Minute},
				{
					name: "hotplug", path: "test/qemu/node", run: "^TestHotplug$",
					limit:    5 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, api: true,
				},
				{
					name: "node", path: "test/qemu/node",
					run: "^Test(Start|ExtendedResource|Claim|Killed)$", limit: 8 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, api: true,
				},
				{name: "crash", path: "test/qemu/node", run: "^TestCrashAtEachStep$",
					limit: 5 * time.Minute},
				{name: "vfio", path: "test/qemu/hardware", run: "^TestVFIO",
					limit: 5 * time.Minute},
				{name: "dpdk", path: "test/qemu/hardware", run: "^TestDPDK$",
					limit: 5 * time.Minute, debian: dpdk},
				{name: "supply", path: "test/qemu/hardware", run: "^TestSupply$",
					limit: 3 * time.Minute},
				{
					name: "rdma", path: "test/qemu/hardware", run: "^TestRDMA(Soft|Example)$",
					limit: 5 * time.Minute, debian: perftest, unbuilt: siw,
					files: []string{"examples/rdma.yaml"},
				},
				{name: "simulated", path: "test/qemu/hardware", run: "^TestSimulatedHost$",
					limit: 3 * time.Minute},
				// This suite is the last, because it takes cards away.
				{name: "inventory", path: "test/qemu/hardware", run: "^Test(Inventory|Cards)",
					limit: 3 * time.Minute},
			},
		},
		{
			name: "igb8", nic: "igb", full: true, cards: 8, vfs: 7, processors: 2,
			modules: []string{"vfio-pci", "igb", "igbvf"},
			suites: []suite{
				{name: "inventory", path: "test/qemu/hardware", run: "^TestInventory$",
					limit: 3 * time.Minute},
				{
					name: "many", path: "test/qemu/node", run: "^TestMany$",
					limit:    10 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"},
				},
			},
		},
		{
			name: "simnic",
			nic:  "simnic",
			modules: []string{
				"vfio-pci", "vhost_vdpa", "virtio_vdpa", "ib_uverbs", "bridge", "crc32c_generic", "nf_tables",
				"nft_meta_bridge", "8021q", "macvlan", "ipvlan", "bonding", "vxlan", "vrf",
				"dummy", "veth",
				"macvtap", "sch_ingress", "cls_matchall", "act_mirred",
			},
			own: "simnic",
			// SFs have the same names as ConnectX's SFs.
			options: "auxprefix=mlx5_core",
			suites: []suite{
				{name: "netdev", path: "pkg/kernel/netdev",
					run: "^Test(Hardware|VLANElsewhere|IPVLANElsewhere|Uppers|StackedOnHost|Wanted|VRF|VLANs|" +
						"Bond|RestoreAfterEveryStep(OfRestore)?$)",
					limit: 10 * time.Minute},
				{name: "story", path: "test/e2e/story", run: "^TestBond", limit: 3 * time.Minute},
				{name: "functions", path: "test/qemu/hardware", run: "^Test(Inventory|Cards)$",
					limit: 3 * time.Minute},
				{name: "devlink", path: "pkg/kernel/devlink",
					run: "^TestHardware|^TestNoSuchDevice$", limit: 3 * time.Minute},
				{name: "traffic", path: "test/qemu/hardware", run: "^TestTrafficSpoofCheck$",
					limit: 3 * time.Minute},
				{name: "isolation", path: "test/qemu/hardware", run: "^TestIsolation$",
					limit: 5 * time.Minute},
				{name: "driver", path: "test/qemu/hardware", run: "^TestDriver",
					limit: 3 * time.Minute},
				{name: "crash", path: "test/qemu/node", run: "^TestCrashAtEachStep$",
					limit: 10 * time.Minute},
				{name: "rate", path: "test/qemu/hardware", run: "^TestRate$",
					limit: 3 * time.Minute},
				// The suite needs none of the cards, but the other guest takes longer.
				{name: "bridge", path: "pkg/bridge", run: vlanAware, limit: 16 * time.Minute},
				{name: "gateways", path: "pkg/bridge", run: "^Test(Gateways|Bonds)$", limit: 12 * time.Minute},
				{
					name: "controller", path: "pkg/controller", run: "^TestTrunkAtBridge$",
					limit: 5 * time.Minute, api: true,
				},
				{
					name: "conformance-faults", path: "test/conformance/trial", run: "^TestFaults$",
					limit: 10 * time.Minute, full: true, seeded: true,
				},
				{
					name: "bridge-bench", path: "test/bench", run: "^TestHardwareBridge$",
					limit: 50 * time.Minute, full: true,
					programs: []string{"cmd/opi-bridge"},
				},
				{name: "bridge-soak", path: "cmd/opi-bridge", run: "^Test(Soak|KilledGateways)$",
					limit: 10 * time.Minute, soaks: true},
				{name: "sourcefilter", path: "pkg/bridge/sourcefilter", run: "^Test",
					limit: 3 * time.Minute},
				{name: "representor", path: "pkg/bridge/representor", run: "^TestHardware",
					limit: 5 * time.Minute},
				{name: "health", path: "test/qemu/hardware", run: "^TestHealthReporter$",
					limit: 3 * time.Minute},
				{
					name: "fault", path: "test/qemu/node", run: "^TestFault$",
					limit:    3 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, api: true,
				},
				{
					name: "node", path: "test/qemu/node", run: "^TestXPU$", limit: 5 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni", "cmd/opi-bridge"},
				},
				{
					name: "personalities", path: "test/qemu/hardware", run: "^TestPersonalities$",
					limit:         6 * time.Minute,
					personalities: true,
				},
				{
					name: "report", path: "test/qemu/hardware", run: "^TestReport$",
					limit:         3 * time.Minute,
					personalities: true,
				},
				{name: "making", path: "test/qemu/hardware", run: "^TestMakingVFs$",
					limit: 5 * time.Minute},
				{
					name: "personalities-node", path: "test/qemu/node", run: "^TestPersonalities$",
					limit:    6 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, personalities: true,
				},
				{
					name: "lives", path: "test/qemu/node", run: "^TestLives$",
					limit:    6 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, lives: true,
				},
				{name: "subfunction", path: "test/qemu/hardware", run: "^TestSubfunction",
					limit: 3 * time.Minute},
				{
					name: "subfunction-claim", path: "test/qemu/node",
					run: "^TestClaimedSubfunction$", limit: 3 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, api: true,
				},
				{name: "rdma", path: "test/qemu/hardware", run: "^TestRDMA(Shared|Exclusive|IsChecked|Nodes)$",
					limit: 3 * time.Minute},
				{
					name: "rdma-claim", path: "test/qemu/node", run: "^TestClaimedRDMA$",
					limit:    5 * time.Minute,
					programs: []string{"cmd/xpu-agent", "cmd/xpu-cni"}, api: true,
				},
				{name: "rdma-crash", path: "test/qemu/node", run: "^TestRDMACrashAtEachStep$",
					limit: 10 * time.Minute},
				{name: "vdpa", path: "test/qemu/hardware", run: "^TestVDPA",
					limit: 3 * time.Minute},
				{name: "infiniband", path: "test/qemu/hardware", run: "^TestInfiniBand",
					limit: 3 * time.Minute},
				{name: "switchdev", path: "test/qemu/hardware", run: "^TestSwitchdev",
					limit: 3 * time.Minute},
			},
		},
	}
}

// selectGuests returns the guests and suites that the command line selects. Guests and suites that
// the command line names are always selected.
func selectGuests(o options) ([]guest, error) {
	var selected []guest
	for _, g := range guests() {
		if o.guest != "" && o.guest != g.name || g.full && !o.full && o.guest != g.name {
			continue
		}

		g.suites = slices.DeleteFunc(g.suites, func(s suite) bool { return !o.wants(s) })
		if len(g.suites) == 0 {
			continue
		}

		for i, s := range g.suites {
			g.suites[i].limit += o.more(s)
			if o.run != "" {
				g.suites[i].run = o.run
			}
		}

		g.cards, g.vfs = cmp.Or(g.cards, o.cards), cmp.Or(g.vfs, o.vfs)
		selected = append(selected, g)
	}

	if len(selected) == 0 {
		return nil, fmt.Errorf("no guest %q with a suite %q: test/qemu/cmd/qemutest/suites.go "+
			"has all", o.guest, o.only)
	}

	return selected, nil
}

// more returns how much longer than its limit a suite may take. The limit is for a third of the
// personalities, and for lives and soaks without flags.
func (o options) more(s suite) (more time.Duration) {
	if s.soaks {
		more += o.soak
	}

	if s.lives {
		more += time.Duration(max(0, o.lives-ordinaryLives)) * 3 * time.Second
	}

	if s.personalities {
		const third = 5 // number of personalities in a third of zoo
		more += s.limit * time.Duration((len(strings.Split(o.personalities, ","))-1)/third)
	}

	return more
}

// ordinaryLives is how many pods a suite of lives makes. With -full it makes fullLives pods.
const ordinaryLives, fullLives = 40, 400

func (o options) wants(s suite) bool {
	if o.only != "" {
		return slices.Contains(strings.Split(o.only, ","), s.name)
	}
	return o.full || !s.full
}

// silence returns for how long a guest that works may report nothing: a suite ends itself at its
// limit.
func (g guest) silence() time.Duration {
	var longest time.Duration
	for _, s := range g.suites {
		longest = max(longest, s.limit)
	}
	return longest + time.Minute
}

// needAPI reports whether a suite of the guest needs an API server.
func (g guest) needAPI() bool {
	return slices.ContainsFunc(g.suites, func(s suite) bool { return s.api })
}

// needSeeded reports whether a suite of the guest needs an opi-bridge with faults.
func (g guest) needSeeded() bool {
	return slices.ContainsFunc(g.suites, func(s suite) bool { return s.seeded })
}

// plays reports whether a suite of the guest plays the drivers of other cards.
func (g guest) plays() bool {
	return slices.ContainsFunc(g.suites, func(s suite) bool { return s.personalities })
}

// binary returns the name of the suite's test binary, which is the same for all suites of a
// package.
func (s suite) binary() string { return path.Base(s.path) + ".test" }

// testPackages and programPackages return the packages to build for the guest, by import path.
func (g guest) testPackages() []string {
	var packages []string
	for _, s := range g.suites {
		packages = append(packages, module+"/"+s.path)
	}
	slices.Sort(packages)
	return slices.Compact(packages)
}

func (g guest) programPackages() []string {
	packages := []string{module + "/test/qemu/cmd/guestinit"}
	for _, s := range g.suites {
		for _, p := range s.programs {
			if first, _, _ := strings.Cut(p, "/"); !strings.Contains(first, ".") {
				p = module + "/" + p
			}
			packages = append(packages, p)
		}
	}

	slices.Sort(packages)
	return slices.Compact(packages)
}

func names(suites []suite) []string {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	return names
}
