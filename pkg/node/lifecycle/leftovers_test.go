// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// leftovers has settings of a netdev that a pod can change in sysfs or by ethtool, and that the
// kernel carries along when the netdev moves.
var leftovers = []struct {
	// file is a path below /sys/class/net/<netdev>.
	file string
	// group is a group of ethtool, if file is empty.
	group string
	// name is the name of the setting in the group.
	name  string
	value string
}{
	{file: "gro_flush_timeout", value: "12345"},
	{file: "napi_defer_hard_irqs", value: "7"},
	{file: "threaded", value: "1"},
	{file: "queues/rx-0/rps_cpus", value: "1"},
	{file: "queues/rx-2/rps_cpus", value: "3"},
	{file: "queues/rx-1/rps_flow_cnt", value: "64"},
	{file: "queues/tx-0/xps_cpus", value: "2"},
	{file: "queues/tx-2/xps_rxqs", value: "1"},
	{group: "features", name: "tx-checksum-ip-generic", value: ethtool.Off},
	{group: "features", name: "rx-gro", value: ethtool.Off},
	{group: "channels", name: "tx", value: "1"},
	{group: "channels", name: "rx", value: "2"},
}

// leave makes all leftovers of a netdev, or only the named ones.
func leave(t testing.TB, ns *netns.Namespace, netdev string, only ...int) {
	t.Helper()
	l, err := ns.Handle().LinkByName(netdev)
	must.Succeed(t, err)
	conn, err := ethtool.Dial(vnetns.NsHandle(ns.Fd()))
	must.Succeed(t, err)
	defer conn.Close()

	sysfs := filepath.Join(ns.Sysfs(t), "class/net", netdev)

	for i, s := range leftovers {
		switch {
		case len(only) > 0 && only[0] != i:
		case s.file != "":
			must.Succeed(t, os.WriteFile(filepath.Join(sysfs, s.file), []byte(s.value), 0))
		default:
			must.Succeed(t,
				conn.Change(l.Attrs().Index, s.group, map[string]string{s.name: s.value}))
		}
	}
}

// everything has all changes that a pod may make to its netdev, by name.
func everything() map[string]func(t *testing.T, pod *netns.Namespace, l netlink.Link) error {
	all := maps.Clone(inside)
	for i, s := range leftovers {
		all[strings.TrimSpace(s.file+" "+s.group+" "+s.name)] = func(
			t *testing.T, pod *netns.Namespace, l netlink.Link,
		) error {
			leave(t, pod, l.Attrs().Name, i)
			return nil
		}
	}

	return all
}

// settings reads all leftovers of the i-th Function's netdev on the host, without the engine.
func (n *node) settings(i int) map[string]string {
	n.t.Helper()
	l := mustLink(n.t, n.Host, lifecycletest.Netdev(i))
	conn, err := ethtool.Dial(vnetns.NsHandle(n.Host.Fd()))
	must.Succeed(n.t, err)
	defer conn.Close()

	sysfs := filepath.Join(n.Host.Sysfs(n.t), "class/net", l.Attrs().Name)

	values := map[string]string{}
	for _, s := range leftovers {
		if s.file == "" {
			group, err := conn.Read(l.Attrs().Index, s.group)
			must.Succeed(n.t, err)
			values[s.group+" "+s.name] = group[s.name]
			continue
		}

		text, err := os.ReadFile(filepath.Join(sysfs, s.file))
		must.Succeed(n.t, err)
		values[s.file] = string(text)
	}

	return values
}

// TestEveryHostSysctlReturns: every sysctl that this kernel has for a netdev has the host's value
// again after the release.
func TestEveryHostSysctlReturns(t *testing.T) {
	t.Parallel()
	n := newNode(t, 1)
	read := func() map[string]string {
		values := map[string]string{}
		must.Succeed(t, n.Host.Do(func() error {
			return eachSysctl(func(path, value string) {
				values[path] = value
			})
		}))
		return values
	}

	changed := 0
	must.Succeed(t, n.Host.Do(func() error {
		return eachSysctl(func(path, value string) {
			if differs(path, value) {
				changed++
			}
		})
	}))

	if changed < 80 {
		t.Errorf("only %d sysctls could be changed", changed)
	}

	before := read()
	n.run(func(a *agent) {
		must.Succeed(t, a.Lifecycle.Reserve(t.Context(), claimed(0)))
		_, err := a.Lifecycle.Attach(t.Context(), lifecycletest.ID(0), sandbox("s1", netns.New(t)))
		must.Succeed(t, err)
		must.Succeed(t, a.Lifecycle.Unprepare(t.Context(), "claim-1"))
	})

	if diff := cmp.Diff(before, read()); diff != "" {
		t.Errorf("sysctls (-before +after):\n%s", diff)
	}
}

// eachSysctl calls do with each sysctl of the first Function's netdev and its value.
func eachSysctl(do func(path, value string)) error {
	for _, directory := range []string{"ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"} {
		paths, err := filepath.Glob(filepath.Join("/proc/sys/net", directory,
			lifecycletest.Netdev(0), "*"))
		if err != nil || len(paths) == 0 {
			return fmt.Errorf("%s: %q, %w", directory, paths, err)
		}

		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil && !errors.Is(err, unix.EIO) { // the secret while it is unset
				return err
			}
			do(path, strings.TrimSpace(string(text)))
		}
	}
	return nil
}

// differs gives a sysctl another value that the kernel accepts. It returns false if there is no
// such value.
func differs(path, value string) bool {
	switch filepath.Base(path) {
	case "mtu", "mc_forwarding": // these follow from other settings
		return false
	case "disable_ipv6": // the other sysctls of IPv6 are compared while IPv6 is enabled
		return false
	case "stable_secret":
		return os.WriteFile(path, []byte("fd00::1"), 0) == nil
	}

	n, err := strconv.Atoi(value)
	if err != nil {
		return false
	}

	for _, other := range []int{n + 1, 1, 0, 2} {
		if other == n || os.WriteFile(path, []byte(strconv.Itoa(other)), 0) != nil {
			continue
		}
		if now, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(now)) != value {
			return true
		}
	}

	return false
}
