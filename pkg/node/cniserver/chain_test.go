// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/netdev"
	"github.com/opiproject/xpu-device-plugin/pkg/node/lifecycle/lifecycletest"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
)

// chainedVersion is the version of the chained plugins of containernetworking/plugins.
const chainedVersion = "v1.9.1"

// buildChained returns a directory with the real plugins of these names.
func buildChained(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	args := []string{"install"}
	for _, name := range names {
		path := "github.com/containernetworking/plugins/plugins/meta/" + name
		args = append(args, path+"@"+chainedVersion)
	}

	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "GOBIN="+dir, "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %q: %v\n%s", args, err, output)
	}

	return dir
}

// chained is the configuration of a plugin that comes after xpu-cni in a chain.
type chained map[string]any

// run runs a command of the plugin in dir for the interface net1 of the pod. prev is the result of
// the previous plugin for ADD, and of the whole chain for other commands.
func (c chained) run(
	t *testing.T, dir, command string, pod *netns.Namespace, prev *types100.Result,
) (result *types100.Result) {
	t.Helper()
	config := map[string]any{"cniVersion": "1.1.0", "name": "sriov", "prevResult": prev}
	maps.Copy(config, c)
	input, err := json.Marshal(config)
	must.Succeed(t, err)

	var stdout, stderr bytes.Buffer
	cmd := exec.Command(filepath.Join(dir, fmt.Sprint(c["type"])))
	cmd.Env = []string{
		"CNI_COMMAND=" + command, "CNI_CONTAINERID=c1", "CNI_IFNAME=net1",
		"CNI_NETNS=" + pod.Path(), "CNI_PATH=" + dir,
	}

	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s of plugin %s: %v: %s%s", command, c["type"], err, &stdout, &stderr)
	}
	if command != "ADD" {
		return nil
	}

	return decodeResult(t, stdout.Bytes())
}

// routesOut lists the routes through net1 in all tables, except the local routes of its addresses.
func routesOut(t *testing.T, pod *netns.Namespace) []netlink.Route {
	t.Helper()
	filter := &netlink.Route{
		LinkIndex: mustLink(t, pod, "net1").Attrs().Index, Protocol: unix.RTPROT_STATIC,
	}
	const mask = netlink.RT_FILTER_OIF | netlink.RT_FILTER_PROTOCOL | netlink.RT_FILTER_TABLE
	routes, err := netns.Listed(func() ([]netlink.Route, error) {
		return pod.Handle().RouteListFiltered(netlink.FAMILY_ALL, filter, mask)
	})
	must.Succeed(t, err)

	return routes
}

// TestChain: later plugins change the interface. CHECK accepts their changes, the agent undoes none
// of them, and the Function comes back as it was, even if a runtime never calls their DEL.
func TestChain(t *testing.T) {
	t.Parallel()
	bin := buildChained(t, "tuning", "sbr", "vrf")
	tuning := chained{
		"type": "tuning", "mac": "02:00:00:00:00:77", "mtu": 1300, "promisc": true,
		"allmulti": true,
		"txQLen":   77, "sysctl": map[string]string{
			"net.ipv4.conf.IFNAME.arp_notify": "0", "net.ipv4.conf.IFNAME.rp_filter": "2",
			"net.ipv6.conf.IFNAME.accept_ra": "0",
		},
	}

	for name, test := range map[string]struct {
		chain []chained
		// see checks that the plugins had their effect.
		see func(t *testing.T, pod *netns.Namespace)
	}{
		"tuning":           {[]chained{tuning}, wantTuned},
		"sbr":              {[]chained{{"type": "sbr"}}, wantMoved(true)},
		"vrf":              {[]chained{{"type": "vrf", "vrfname": "blue"}}, wantMaster("blue")},
		"sbr with a table": {[]chained{{"type": "sbr", "table": 200}}, wantMoved(false)},
		"sbr, tuning":      {[]chained{{"type": "sbr"}, tuning}, wantTuned},
		"vrf, tuning":      {[]chained{{"type": "vrf", "vrfname": "blue"}, tuning}, wantTuned},
	} {
		for how, undone := range map[string]bool{
			"with DEL of all": true, "with our DEL alone": false,
		} {
			t.Run(name+" "+how, func(t *testing.T) {
				if fmt.Sprint(test.chain[0]["type"]) == "vrf" && !netns.Has(t, netns.VRFs()) {
					t.Skip("the kernel has no VRFs (CONFIG_NET_VRF)")
				}
				runChain(t, bin, test.chain, test.see, undone)
			})
		}
	}
}

// bothFamilies is the result of an IPAM plugin with IPv4 and IPv6.
const bothFamilies = `{"cniVersion":"1.1.0",
	"ips":[{"address":"10.1.0.5/24","gateway":"10.1.0.1"},{"address":"2001:db8:1::5/64","gateway":"2001:db8:1::1"}],
	"routes":[{"dst":"0.0.0.0/0"},{"dst":"10.2.0.0/16","gw":"10.1.0.9"},{"dst":"::/0"},{"dst":"2001:db8:2::/64","gw":"2001:db8:1::9"}]}`

// runChain runs the life of an interface with a chain of later plugins.
func runChain(
	t *testing.T, bin string, chain []chained, see func(*testing.T, *netns.Namespace), undone bool,
) {
	// The plugin tuning keeps the old values there.
	data := t.TempDir()
	n := newNode(t, 1)
	before := n.Snapshot(0)
	pod := netns.New(t)
	n.run(func(r *running) {
		add := request(wire.Add, 0, "c1", pod, map[string]any{"mtu": 1400})
		add.IPAM = json.RawMessage(bothFamilies)
		result := decodeResult(t, r.must(add).Result)
		for i, plugin := range chain {
			chain[i] = maps.Clone(plugin)
			chain[i]["dataDir"] = data
			result = chain[i].run(t, bin, "ADD", pod, result)
		}

		see(t, pod)

		record, _ := r.Journal.Get(lifecycletest.ID(0))
		must.Succeed(t, r.engine.Announce(t.Context(), netdev.Attached{
			Place: record.Place, Want: record.Interface, Observed: *record.Observed,
		}))
		must.Succeed(t, r.Lifecycle.Recover(t.Context()))
		r.must(request(wire.Check, 0, "c1", pod, map[string]any{"mtu": 1400, "prevResult": result}))

		for _, plugin := range chain {
			plugin.run(t, bin, "CHECK", pod, result)
		}

		see(t, pod)

		if undone {
			for _, plugin := range slices.Backward(chain) {
				plugin.run(t, bin, "DEL", pod, result)
			}
		}

		r.must(request(wire.Del, 0, "c1", pod, map[string]any{"prevResult": result}))
		r.checkFree(0, before)
	})
}

func wantTuned(t *testing.T, pod *netns.Namespace) {
	t.Helper()
	l := mustLink(t, pod, "net1").Attrs()
	if l.HardwareAddr.String() != "02:00:00:00:00:77" || l.MTU != 1300 || l.TxQLen != 77 ||
		l.Promisc == 0 || l.Allmulti == 0 {
		t.Errorf("tuning has no effect, or not any more: %+v", l)
	}
}

// wantMoved fails the test unless all routes are in the main table, or none is.
func wantMoved(moved bool) func(*testing.T, *netns.Namespace) {
	return func(t *testing.T, pod *netns.Namespace) {
		t.Helper()
		routes := routesOut(t, pod)
		wrong := func(r netlink.Route) bool { return moved == (r.Table == unix.RT_TABLE_MAIN) }
		if len(routes) != 4 || slices.ContainsFunc(routes, wrong) {
			t.Errorf("routes %v, want 4, moved to other tables: %t", routes, moved)
		}
	}
}

func wantMaster(name string) func(*testing.T, *netns.Namespace) {
	return func(t *testing.T, pod *netns.Namespace) {
		t.Helper()
		want := mustLink(t, pod, name).Attrs().Index
		if l := mustLink(t, pod, "net1").Attrs(); l.MasterIndex != want {
			t.Errorf("master %d, want %s", l.MasterIndex, name)
		}
	}
}
