// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// passAll loads the XDP program "return XDP_PASS".
func passAll(t *testing.T) (fd int) {
	t.Helper()
	program := []uint64{0x0000_0002_0000_00b7, 0x0000_0000_0000_0095} // r0 = 2; exit
	license := []byte("GPL\x00")
	attr := struct {
		kind, count     uint32
		insns, license  uint64
		level, size     uint32
		log             uint64
		version, flags  uint32
		name            [16]byte
		ifindex, attach uint32
	}{
		kind: unix.BPF_PROG_TYPE_XDP, count: uint32(len(program)),
		insns:   uint64(uintptr(unsafe.Pointer(&program[0]))),
		license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}

	r, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&attr)),
		unsafe.Sizeof(attr))
	runtime.KeepAlive(program)
	runtime.KeepAlive(license)

	if errno != 0 {
		t.Skipf("this kernel loads no BPF program: %v", errno)
	}

	t.Cleanup(func() { unix.Close(int(r)) })
	return int(r)
}

// inside has changes that a pod may make to its netdev, and that the kernel carries along when the
// netdev moves.
var inside = map[string]func(t *testing.T, pod *netns.Namespace, l netlink.Link) error{
	"name": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetName(l, "pods0")
	},
	"altnames": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkAddAltName(l, "pods-own")
	},
	"alias": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetAlias(l, "the pod's")
	},
	"mtu": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetMTU(l, 1300)
	},
	"mac": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9})
	},
	"txqlen": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetTxQLen(l, 17)
	},
	"up": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetDown(l)
	},
	"noarp": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetARPOff(l)
	},
	"promiscuous": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().SetPromiscOn(l)
	},
	"group": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGroup(l, 7)
	},
	"gso_max_size": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGSOMaxSize(l, 30000)
	},
	"gso_max_segs": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGSOMaxSegs(l, 17)
	},
	"gro_max_size": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGROMaxSize(l, 100000)
	},
	"gso_ipv4_max_size": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGSOIPv4MaxSize(l, 20000)
	},
	"gro_ipv4_max_size": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetGROIPv4MaxSize(l, 20000)
	},
	"multicast": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetMulticastOff(l)
	},
	"allmulticast": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return pod.Handle().LinkSetAllmulticastOn(l)
	},
	"link mode": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return setLink(pod, l, unix.IFLA_LINKMODE, []byte{1})
	},
	"broadcast": func(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return setLink(pod, l, unix.IFLA_BROADCAST, []byte{2, 0, 0, 0, 0, 9})
	},
	"macvlan on top": macvlanOnTop,
	"XDP program": func(t *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return attachXDP(t, pod, l, nl.XDP_FLAGS_SKB_MODE)
	},
	"native XDP program": func(t *testing.T, pod *netns.Namespace, l netlink.Link) error {
		return attachXDP(t, pod, l, nl.XDP_FLAGS_DRV_MODE)
	},
}

func macvlanOnTop(_ *testing.T, pod *netns.Namespace, l netlink.Link) error {
	return pod.Handle().LinkAdd(&netlink.Macvlan{
		LinkAttrs: netlink.LinkAttrs{Name: "top", ParentIndex: l.Attrs().Index},
		Mode:      netlink.MACVLAN_MODE_PASSTHRU,
	})
}

func attachXDP(t *testing.T, pod *netns.Namespace, l netlink.Link, mode uint32) error {
	t.Helper()
	xdp := nl.NewRtAttr(unix.IFLA_XDP|unix.NLA_F_NESTED, nil)
	xdp.AddRtAttr(nl.IFLA_XDP_FD, nl.Uint32Attr(uint32(passAll(t))))
	xdp.AddRtAttr(nl.IFLA_XDP_FLAGS, nl.Uint32Attr(mode))
	return changeLink(pod, l, xdp)
}

func setLink(pod *netns.Namespace, l netlink.Link, attribute int, value []byte) error {
	return changeLink(pod, l, nl.NewRtAttr(attribute, value))
}

// changeLink sends an attribute for which the library has no call.
func changeLink(pod *netns.Namespace, l netlink.Link, attribute nl.NetlinkRequestData) error {
	return pod.Do(func() error {
		req := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_ACK)
		header := nl.NewIfInfomsg(unix.AF_UNSPEC)
		header.Index = int32(l.Attrs().Index)
		req.AddData(header)
		req.AddData(attribute)
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

// TestPodLeavesNothing: whatever a pod changes on a netdev, the next pod gets the netdev as it was
// on the host.
func TestPodLeavesNothing(t *testing.T) {
	t.Parallel()
	for name, change := range everything() {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1)
			before, settings := n.Snapshot(0), n.settings(0)
			pod := netns.New(t)
			n.run(func(a *agent) {
				must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
				_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
				must.Succeed(t, err)
				must.Succeed(t, change(t, pod, mustLink(t, pod, "net0")))
				must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
			})

			n.WantAsBefore(0, before)
			if diff := cmp.Diff(settings, n.settings(0)); diff != "" {
				t.Errorf("settings (-before +after):\n%s", diff)
			}
			if links, err := pod.Handle().LinkList(); err != nil || len(links) != 1 {
				t.Errorf("the pod has %d links, %v, want lo alone", len(links), err)
			}
		})
	}
}

// elsewhere has the tests of the properties that a pod with a veth cannot change, by the rows of
// [netdev.Properties].
var elsewhere = map[string][]string{
	"TestProperties": { // of test/qemu/hardware
		"vf mac", "vf vlan", "vf min_tx_rate", "vf max_tx_rate", "vf spoofchk", "vf trust",
		"vf link-state",
	},
	"TestRates":            {"eswitch min_tx_rate", "eswitch max_tx_rate"},
	"TestGUIDs":            {"vf node_guid", "vf port_guid"},
	"TestProtoDownReturns": {"proto_down", "proto_down reason"},
	"TestEveryHostSysctlReturns": {
		"sysctl ", "net.ipv6.conf ", "net.ipv4.neigh ", "net.ipv6.neigh ", "net.mpls.conf ",
	},
	"TestDriverSettings": {
		"ethtool private flags ", "ethtool rings ", "ethtool coalescing ", "ethtool pause ",
		"ethtool messages ", "ethtool RSS ", "ethtool time stamps ",
	},
	"TestProgramsOfThePod": {"tcx programs"},
	"TestStackedElsewhere": {"VLANs, macvlans, ipvlans and macsecs that the pod made on top"},
	"TestWanted":           {"addresses", "routes", "neighbors", "rules"},
	"TestVLANs":            {"VLAN interfaces"},
	"TestVRF":              {"VRF"},
	"TestBond":             {"bond"},
	"TestRDMAExclusive":    {"RDMA devices", "RDMA name ", "RDMA moderation "}, // of test/qemu/hardware
}

// TestEveryProperty: TestPodLeavesNothing changes every property in a pod, or a test elsewhere does.
func TestEveryProperty(t *testing.T) {
	t.Parallel()
	changed := slices.Collect(maps.Keys(inside))
	for _, s := range leftovers {
		switch {
		case s.file == "":
			changed = append(changed, "ethtool "+s.group+" "+s.name)
		case strings.HasPrefix(s.file, "queues/"):
			changed = append(changed, s.file[:len("queues")]+" "+s.file)
		default:
			changed = append(changed, "sysfs "+s.file)
		}
	}

	sources := testSources(t, "../../kernel/netdev", "../../../test/qemu/hardware", ".")
	for test, properties := range elsewhere {
		if !strings.Contains(sources, "\nfunc "+test+"(") {
			t.Errorf("there is no %s", test)
		}
		changed = append(changed, properties...)
	}

	for _, p := range netdev.Properties() {
		if !slices.ContainsFunc(changed, p.Covers) {
			t.Errorf("no test changes %q", p.Name)
		}
	}
}

// testSources returns the text of all tests in the directories.
func testSources(t *testing.T, directories ...string) string {
	t.Helper()
	var all strings.Builder
	for _, directory := range directories {
		files, err := filepath.Glob(filepath.Join(directory, "*_test.go"))
		must.Succeed(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			must.Succeed(t, err)
			all.Write(text)
		}
	}
	return all.String()
}

// TestHostSysctlsReturn: the kernel makes a netdev's sysctls anew in every namespace. The host's
// values must be restored, and IPv6 must not start on the netdev in between.
func TestHostSysctlsReturn(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	sysctls := map[string]string{
		"ipv4/conf/%s/rp_filter": "2", "ipv4/conf/%s/arp_notify": "1",
		"ipv6/conf/%s/disable_ipv6": "1",
		"ipv6/conf/%s/accept_ra":    "0", "ipv6/conf/%s/addr_gen_mode": "1",
		"ipv6/conf/%s/autoconf": "0",
	}

	each := func(do func(path, value string) error) {
		t.Helper()
		must.Succeed(t, n.Host.Do(func() error {
			for path, value := range sysctls {
				if err := do("/proc/sys/net/"+fmt.Sprintf(path, lifecycletest.Netdev(0)),
					value); err != nil {
					return err
				}
			}
			return nil
		}))
	}

	host, err := n.Host.Handle().LinkByName(lifecycletest.Netdev(0))
	must.Succeed(t, err)
	must.Succeed(t, n.Host.Handle().LinkSetUp(host))
	each(func(path, value string) error { return os.WriteFile(path, []byte(value), 0) })
	before := n.Snapshot(0)
	if before.Conf == nil || len(before.Conf.IPv6) == 0 || len(before.Conf.IPv4) == 0 {
		t.Fatalf("snapshot has sysctls %+v", before.Conf)
	}

	pod := netns.New(t)
	n.run(func(a *agent) {
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", pod))
		must.Succeed(t, err)
		must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
	})

	n.WantAsBefore(0, before)
	each(func(path, want string) error {
		got, err := os.ReadFile(path)
		if err == nil && string(got) != want+"\n" {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
		return err
	})

	addresses, err := n.Host.Handle().AddrList(host, netlink.FAMILY_V6)
	if err != nil || len(addresses) > 0 {
		t.Errorf("the netdev has IPv6 addresses %v, %v on the host", addresses, err)
	}
}

// TestXDPOnTheHost: a netdev with an XDP program of the host is in use by the host.
func TestXDPOnTheHost(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	l, err := n.Host.Handle().LinkByName(lifecycletest.Netdev(0))
	must.Succeed(t, err)
	must.Succeed(t, attachXDP(t, n.Host, l, nl.XDP_FLAGS_SKB_MODE))
	engine, err := netdev.New(netdev.Options{HostNetNS: n.Host.Path()})
	must.Succeed(t, err)
	defer engine.Close()

	_, _, err = engine.Plan(t.Context(), netdev.Device{Name: lifecycletest.Netdev(0)},
		netns.New(t).Path(), function.Interface{Name: "net1"})
	mustFail(t, err, "is in use on the host, by XDP program")
}
