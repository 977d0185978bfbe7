// SPDX-License-Identifier: Apache-2.0

package netdev_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/ethtool"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// write writes a file of the netdev in sysfs.
func write(t testing.TB, sysRoot, netdev, file, value string) {
	t.Helper()
	must.Succeed(t,
		os.WriteFile(filepath.Join(sysRoot, "class/net", netdev, file), []byte(value), 0))
}

// changeEthtool changes one setting of a netdev.
func changeEthtool(t testing.TB, ns *netns.Namespace, netdev, group, name, value string) {
	t.Helper()
	conn, err := ethtool.Dial(vnetns.NsHandle(ns.Fd()))
	must.Succeed(t, err)
	defer conn.Close()
	must.Succeed(t,
		conn.Change(get(t, ns, netdev).Attrs().Index, group, map[string]string{name: value}))
}

// TestQueueSettingsReturn covers a queue that the pod removed. The kernel makes it anew without the
// host's settings.
func TestQueueSettingsReturn(t *testing.T) {
	w := newWorldOfQueues(t, 4, nil)
	write(t, w.sysRoot, hostName, "queues/rx-3/rps_cpus", "3")
	write(t, w.sysRoot, hostName, "queues/rx-0/rps_flow_cnt", "32")
	write(t, w.sysRoot, hostName, "queues/tx-2/xps_cpus", "1")
	want := map[string]string{
		"rps_cpus": "3=3", "rps_flow_cnt": "0=32", "xps_cpus": "2=1", "xps_rxqs": "",
	}

	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	if diff := cmp.Diff(want, onlyKeys(before.Settings["queues"], want)); diff != "" {
		t.Errorf("settings of the queues (-want +got):\n%s", diff)
	}

	inPod := w.pod.Sysfs(t)
	write(t, inPod, "net1", "queues/rx-3/rps_cpus", "1")
	write(t, inPod, "net1", "queues/rx-1/rps_cpus", "2")
	write(t, inPod, "net1", "queues/tx-0/xps_rxqs", "1")
	changeEthtool(t, w.pod, "net1", "channels", "rx", "2")
	changeEthtool(t, w.pod, "net1", "channels", "tx", "1")

	restored, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if len(restored.Notes) > 0 {
		t.Errorf("notes %q", restored.Notes)
	}

	w.checkRestored(t, before)
}

func onlyKeys(values, keys map[string]string) map[string]string {
	only := map[string]string{}
	for key := range keys {
		only[key] = values[key]
	}
	return only
}

// TestRefusedSettingIsNoted checks that the release succeeds with a note if the driver refuses a
// setting. On a veth without GRO, NAPI cannot be changed to threaded or back.
func TestRefusedSettingIsNoted(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	changeEthtool(t, w.pod, "net1", "features", "rx-gro", ethtool.On)
	write(t, w.pod.Sysfs(t), "net1", "threaded", "1")

	restored, err := w.engine.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	if want := "sysfs threaded is 1, was 0: the old value was refused: "; restored.Name != hostName ||
		len(restored.Notes) != 1 || !strings.HasPrefix(restored.Notes[0], want) {
		t.Errorf("restored %+v, want one note that begins with %q", restored, want)
	}
}

// TestUnknownSettingIsNoted checks that a setting that can no longer be read is not taken for
// equal.
func TestUnknownSettingIsNoted(t *testing.T) {
	w := newWorld(t, nil)
	before, place, _ := w.attach(t, function.Interface{Name: "net1"})
	write(t, w.pod.Sysfs(t), "net1", "gro_flush_timeout", "99")

	blind, err := netdev.New(netdev.Options{HostNetNS: w.host.Path(), SysRoot: t.TempDir()})
	must.Succeed(t, err)
	defer blind.Close()

	restored, err := blind.Restore(t.Context(), device(), before, place)
	must.Succeed(t, err)
	want := "sysfs gro_flush_timeout is not known, was 0: "
	begins := func(note string) bool { return strings.HasPrefix(note, want) }
	if !slices.ContainsFunc(restored.Notes, begins) {
		t.Errorf("notes %q, want one that begins with %q", restored.Notes, want)
	}
}

// TestSysfsOfAnotherNamespace checks that a netdev of the same name in the sysfs of another network
// namespace is not changed.
func TestSysfsOfAnotherNamespace(t *testing.T) {
	w := newWorld(t, nil)
	elsewhere := netns.New(t)
	netns.Connect(t, elsewhere, hostName, w.xpu, "other")
	engine, err := netdev.New(netdev.Options{HostNetNS: w.host.Path(), SysRoot: elsewhere.Sysfs(t)})
	must.Succeed(t, err)
	defer engine.Close()

	s, err := engine.Snapshot(t.Context(), device())
	must.Succeed(t, err)
	if s.Settings["sysfs"] != nil || s.Settings["queues"] != nil {
		t.Errorf("settings %v", s.Settings)
	}
}

// TestSettingsOfOtherVersions covers records of an older agent, which has no settings, and of a
// newer agent, which has settings that this agent does not know.
func TestSettingsOfOtherVersions(t *testing.T) {
	for name, test := range map[string]struct {
		change func(record map[string]any)
		note   string // the beginning of the only note
	}{
		"older": {change: func(record map[string]any) { delete(record, "settings") }},
		"newer": {
			change: func(record map[string]any) {
				record["settings"].(map[string]any)["rocket"] = map[string]any{"engine": "2"}
			},
			note: "rocket engine is not known, was 2",
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			before, place, _ := w.attach(t, function.Interface{Name: "net1", MTU: 1400})
			var record map[string]any
			text, err := json.Marshal(before)
			must.Succeed(t, err)
			must.Succeed(t, json.Unmarshal(text, &record))
			test.change(record)
			text, err = json.Marshal(record)
			must.Succeed(t, err)
			var read netdev.Snapshot
			must.Succeed(t, json.Unmarshal(text, &read))

			restored, err := w.engine.Restore(t.Context(), device(), read, place)
			must.Succeed(t, err)
			notes := strings.Join(restored.Notes, "; ")
			if (test.note == "") != (notes == "") || !strings.HasPrefix(notes, test.note) {
				t.Errorf("notes %q, want one that begins with %q", restored.Notes, test.note)
			}

			w.checkRestored(t, read.WithoutSettings())
		})
	}
}

// TestStableSecretReturns covers a host that generates stable addresses from a secret and gets back
// both. A host with an unused secret must not get an address from it.
func TestStableSecretReturns(t *testing.T) {
	for mode, name := range map[string]string{"0": "unused", "2": "used", "3": "random"} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, nil)
			sysctl := filepath.Join("/proc/sys/net/ipv6/conf", hostName)
			read := func(name string) (text []byte, err error) {
				err = w.host.Do(func() error {
					text, err = os.ReadFile(filepath.Join(sysctl, name))
					return err
				})
				return text, err
			}

			must.Succeed(t, w.host.Do(func() error {
				return errors.Join(
					os.WriteFile(filepath.Join(sysctl, "stable_secret"), []byte("fd00::7"), 0),
					os.WriteFile(filepath.Join(sysctl, "addr_gen_mode"), []byte(mode), 0),
				)
			}))

			must.Succeed(t, w.host.Handle().LinkSetDown(get(t, w.host, hostName)))
			must.Succeed(t, w.host.Handle().LinkSetUp(get(t, w.host, hostName)))
			secret, err := read("stable_secret")
			must.Succeed(t, err)
			address := linkLocal(t, w)

			before, place, _ := w.attach(t, function.Interface{Name: "net1"})
			_, err = w.engine.Restore(t.Context(), device(), before, place)
			must.Succeed(t, err)
			w.checkRestored(t, before)
			if got, err := read("stable_secret"); err != nil || string(got) != string(secret) {
				t.Errorf("secret %s, %v, want %s", got, err, secret)
			}
			if got := linkLocal(t, w); got != address {
				t.Errorf("address %s, was %s", got, address)
			}
		})
	}
}

func linkLocal(t testing.TB, w *world) string {
	t.Helper()
	list, err := w.host.Handle().AddrList(get(t, w.host, hostName), netlink.FAMILY_V6)
	must.Succeed(t, err)
	if len(list) != 1 {
		t.Fatalf("addresses %v, want one", list)
	}
	return list[0].IPNet.String()
}
