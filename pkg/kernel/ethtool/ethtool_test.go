// SPDX-License-Identifier: Apache-2.0

package ethtool_test

import (
	"errors"
	"testing"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/test/must"
	testns "github.com/opiproject/xpu-device-plugin/test/netns"
)

// dial opens a Conn in a namespace with a veth of four queues, and returns the index of the veth.
func dial(t testing.TB) (*ethtool.Conn, int) {
	t.Helper()
	host := testns.New(t)
	testns.ConnectQueues(t, host, "ens1f0v0", host, "pf0vf0", 4)
	link, err := host.Handle().LinkByName("ens1f0v0")
	must.Succeed(t, err)

	conn, err := ethtool.Dial(netns.NsHandle(host.Fd()))
	must.Succeed(t, err)
	t.Cleanup(conn.Close)

	return conn, link.Attrs().Index
}

// TestChange checks that changed settings are read back, whether one or several are changed at
// once, and that the change leaves all other settings as they were.
func TestChange(t *testing.T) {
	conn, index := dial(t)
	for _, test := range []struct {
		group string
		to    map[string]string
	}{
		{"features",
			map[string]string{"tx-checksum-ip-generic": ethtool.Off, "rx-gro": ethtool.On}},
		{"features", map[string]string{"tx-checksum-ip-generic": ethtool.On}},
		{"channels", map[string]string{"rx": "2", "tx": "3"}},
		{"channels", map[string]string{"tx": "4"}},
	} {
		want, err := conn.Read(index, test.group)
		must.Succeed(t, err)

		for name, value := range test.to {
			if want[name] == value {
				t.Errorf("%s %s is %s already", test.group, name, value)
			}
			want[name] = value
		}

		must.Succeed(t, conn.Change(index, test.group, test.to))
		got, err := conn.Read(index, test.group)
		must.Succeed(t, err)

		for name, value := range want {
			if got[name] != value {
				t.Errorf("%s: %s is %s, want %s", test.group, name, got[name], value)
			}
		}
	}
}

// TestGroups checks that each group can be read or is reported as unsupported. A veth supports two
// groups.
func TestGroups(t *testing.T) {
	conn, index := dial(t)
	for _, group := range ethtool.Groups() {
		settings, err := conn.Read(index, group)
		if known := group == "features" || group == "channels"; known {
			must.Succeed(t, err)
			if len(settings) == 0 {
				t.Errorf("%s: no settings", group)
			}
		} else if !errors.Is(err, unix.EOPNOTSUPP) {
			t.Errorf("%s: error %v, want %v", group, err, unix.EOPNOTSUPP)
		}
	}
}

func TestErrors(t *testing.T) {
	conn, index := dial(t)
	if _, err := conn.Read(1<<20, "features"); !errors.Is(err, unix.ENODEV) {
		t.Errorf("no netdev: error %v", err)
	}
	if _, err := conn.Read(index, "rocket"); err == nil {
		t.Error("a group that does not exist is read")
	}

	for group, to := range map[string]map[string]string{
		"channels": {"rx": "1000"}, "features": {"no-such-feature": ethtool.On},
		"pause": {"rx": "300"}, "rocket": {"a": "b"},
		"rings": {"rx": "many"}, "private flags": {"a": "b"}, "RSS": {"table": "0 x"},
		"time stamps": {"tx": "sometimes"},
	} {
		if err := conn.Change(index, group, to); err == nil {
			t.Errorf("%s %v is accepted", group, to)
		}
	}
}

// TestLoopback checks that lo, whose driver has no settings of its own, has features.
func TestLoopback(t *testing.T) {
	host := testns.New(t)
	conn, err := ethtool.Dial(netns.NsHandle(host.Fd()))
	must.Succeed(t, err)
	defer conn.Close()
	if settings, err := conn.Read(1, "features"); err != nil || len(settings) == 0 {
		t.Errorf("features %v, %v", settings, err)
	}
}

func BenchmarkRead(b *testing.B) {
	conn, index := dial(b)
	for _, group := range ethtool.Groups() {
		b.Run(group, func(b *testing.B) {
			for b.Loop() {
				_, _ = conn.Read(index, group)
			}
		})
	}
}
