// SPDX-License-Identifier: Apache-2.0

package claim_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/claim"
	"github.com/opiproject/xpu-device-plugin/pkg/claim/claimtest"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

const testPool = "node1/0000-3b-00-0/fast"

func TestDevices(t *testing.T) {
	got, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"),
		claimtest.Result("red", testPool, "0000-3b-00-0-sf7"),
		func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[1].BindingConditions = []string{
				"other", v1alpha1.ConditionProvisioned,
			}
		},
	))

	if err != nil {
		t.Fatal(err)
	}

	id := claim.PoolID{Node: "node1", PF: "0000:3b:00.0", DevicePool: "fast"}
	want := []claim.Device{
		{Request: "blue", Pool: testPool, Name: "0000-3b-00-2", ID: id,
			Function: function.ID{Address: "0000:3b:00.2"}},
		{Request: "red", Pool: testPool, Name: "0000-3b-00-0-sf7", ID: id,
			Function: function.SubfunctionID("0000:3b:00.0", 7), BeforeBind: true},
	}

	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Devices: -want +got\n%s", diff)
	}
}

func TestDevicesOfOthers(t *testing.T) {
	unallocated := claimtest.Allocated("net")
	unallocated.Status.Allocation = nil
	if got, err := claim.Devices(unallocated); err != nil || got != nil {
		t.Errorf("Devices of a claim that is not allocated = %v, %v; want none", got, err)
	}

	foreign := claimtest.Allocated("net", claimtest.Result("gpu", "not one of ours", "gpu-0"),
		func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].Driver = "gpu.example.com"
		})
	if got, err := claim.Devices(foreign); err != nil || len(got) != 0 {
		t.Errorf("Devices of a claim that another driver serves = %v, %v; want none", got, err)
	}
}

func TestDevicesNotUnderstood(t *testing.T) {
	for _, test := range []struct{ pool, device, wrong string }{
		{"fast", "0000-3b-00-2", "<node>/<PF>/<DevicePool>"},
		{testPool, "eth0", "dddd-bb-dd-f"},
	} {
		_, err := claim.Devices(claimtest.Allocated("net",
			claimtest.Result("blue", test.pool, test.device)))
		if err == nil || !strings.Contains(err.Error(), test.wrong) ||
			!strings.Contains(err.Error(), `claim default/net, request "blue"`) {
			t.Errorf("Devices of %s in %s: error %v, want the claim, the request and %q",
				test.device, test.pool, err, test.wrong)
		}
	}
}

// TestAdminAccess checks that parameters are ignored for a Function with admin access.
func TestAdminAccess(t *testing.T) {
	got, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.Devices.Results[0].AdminAccess = ptr.To(true)
		}, claimtest.FromClass(`"nonsense": 1`)))
	if err != nil || len(got) != 1 || got[0].ConfigErr != nil || !got[0].Admin ||
		got[0].Function.Address != "0000:3b:00.2" {
		t.Errorf("Devices = %+v, %v; want one device that is only looked at", got, err)
	}
}

// TestConfigMerging checks that later parameters of the claim override earlier ones, and the claim
// overrides the class.
func TestConfigMerging(t *testing.T) {
	const request = "blue"
	for _, test := range []struct {
		name    string
		request string
		configs []claimtest.Option
		want    v1alpha1.InterfaceConfig
	}{
		{name: "none"},
		{
			name:    "empty requests mean all",
			configs: []claimtest.Option{claimtest.FromClaim(`"network": "lab"`)},
			want:    v1alpha1.InterfaceConfig{Network: "lab"},
		},
		{
			name:    "another request's",
			configs: []claimtest.Option{claimtest.FromClaim(`"network": "lab"`, "red")},
		},
		{
			name:    "the main request's is for its subrequests",
			request: "blue/vf",
			configs: []claimtest.Option{claimtest.FromClaim(`"network": "lab"`, "blue")},
			want:    v1alpha1.InterfaceConfig{Network: "lab"},
		},
		{
			name:    "a subrequest's own",
			request: "blue/vf",
			configs: []claimtest.Option{claimtest.FromClaim(`"network": "lab"`, "blue/vf"),
				claimtest.FromClaim(`"network": "other"`, "blue/sf")},
			want: v1alpha1.InterfaceConfig{Network: "lab"},
		},
		{
			name: "claim wins over class, whatever the order",
			configs: []claimtest.Option{
				claimtest.FromClaim(`"network": "of-claim", "vf": {"trust": false, "qos": 3}`),
				claimtest.FromClass(
					`"network": "of-class", "mtu": 9000, "addresses": ["10.1.0.5/24"], "vf": {"trust": true, "vlan": 5}`,
				),
			},
			want: v1alpha1.InterfaceConfig{
				Network: "of-claim", MTU: ptr.To[int32](9000), Addresses: []string{"10.1.0.5/24"},
				VF: &v1alpha1.VFConfig{
					Trust: ptr.To(false), VLAN: ptr.To[int32](5), QoS: ptr.To[int32](3),
				},
			},
		},
		{
			name: "later wins within the claim; lists are replaced, not joined",
			configs: []claimtest.Option{
				claimtest.FromClaim(
					`"interfaceName": "a", "addresses": ["10.1.0.5/24", "10.1.0.6/24"]`,
				),
				claimtest.FromClaim(`"interfaceName": "b", "addresses": ["10.1.0.7/24"]`, request),
			},
			want: v1alpha1.InterfaceConfig{InterfaceName: "b", Addresses: []string{"10.1.0.7/24"}},
		},
		{
			name: "settings of the class and of the claim",
			configs: []claimtest.Option{
				claimtest.FromClass(`"sysctls": {"net.ipv4.conf.IFNAME.rp_filter": "1", "net.ipv4.conf.IFNAME.proxy_arp": "1"},
					"offload": {"gsoMaxSize": 1},
					"ethtool": {"features": {"x": true, "y": true}, "rings": {"rx": 1}}`),
				claimtest.FromClaim(`"sysctls": {"net.ipv4.conf.IFNAME.proxy_arp": "2"}, "offload": {"groMaxSize": 2},
					"ethtool": {"features": {"y": false}}`),
			},
			want: v1alpha1.InterfaceConfig{
				Sysctls: map[string]string{
					"net.ipv4.conf.IFNAME.rp_filter": "1", "net.ipv4.conf.IFNAME.proxy_arp": "2",
				},
				Offload: &v1alpha1.Offload{
					GSOMaxSize: ptr.To[int32](1), GROMaxSize: ptr.To[int32](2),
				},
				Ethtool: &v1alpha1.Ethtool{
					Features: map[string]bool{"x": true, "y": false},
					Rings:    map[string]int32{"rx": 1},
				},
			},
		},
		{
			name: "a table of RSS takes the place of another",
			configs: []claimtest.Option{
				claimtest.FromClass(`"ethtool": {"rss": {"equal": 4, "hashKey": "6d"}}`),
				claimtest.FromClaim(`"ethtool": {"rss": {"weights": [3, 1]}}`),
			},
			want: v1alpha1.InterfaceConfig{Ethtool: &v1alpha1.Ethtool{
				RSS: &v1alpha1.RSS{Weights: []int32{3, 1}, HashKey: "6d"},
			}},
		},
		{
			name: "a driver for the Function",
			configs: []claimtest.Option{
				claimtest.FromClaim(`"mac": "02:00:00:00:00:01"`),
				claimtest.FromClass(`"driver": "vfio-pci"`),
			},
			want: v1alpha1.InterfaceConfig{
				MAC: "02:00:00:00:00:01", Driver: v1alpha1.DriverVFIO,
			},
		},
		{
			name:    "a variant of vfio-pci for the Function",
			configs: []claimtest.Option{claimtest.FromClaim(`"driver": "mlx5_vfio_pci"`)},
			want:    v1alpha1.InterfaceConfig{Driver: "mlx5_vfio_pci"},
		},
		{
			name: "another driver's",
			configs: []claimtest.Option{claimtest.FromClaim(`"network": "lab"`),
				claimtest.Config(resourceapi.AllocationConfigSourceClaim, "not json"),
				func(c *resourceapi.ResourceClaim) {
					c.Status.Allocation.Devices.Config[1].Opaque.Driver = "gpu.example.com"
				}},
			want: v1alpha1.InterfaceConfig{Network: "lab"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if test.request == "" {
				test.request = request
			}

			options := append([]claimtest.Option{
				claimtest.Result(test.request, testPool, "0000-3b-00-2"),
			}, test.configs...)
			devices, err := claim.Devices(claimtest.Allocated("net", options...))
			if err != nil || len(devices) != 1 || devices[0].ConfigErr != nil {
				t.Fatalf("Devices = %+v, %v; want one", devices, err)
			}
			if diff := cmp.Diff(test.want, devices[0].Config, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("Config: -want +got\n%s", diff)
			}
		})
	}
}

func TestInterface(t *testing.T) {
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"), claimtest.FromClaim(`
		"interfaceName": "fast0", "mtu": 9000, "mac": "02:00:00:00:00:0A", "addresses": ["10.1.0.5/24", "fd00::5/64"],
		"routes": [{"to": "0.0.0.0/0", "via": "10.1.0.1", "metric": 50}, {"to": "fd01::/64"},
			{"to": "10.4.0.0/16", "via": "10.9.9.9", "onLink": true, "source": "10.1.0.5", "table": 100, "mtu": 1300, "advMSS": 1200, "scope": "universe"}],
		"rules": [{"priority": 100, "table": 100, "from": "10.1.0.0/24", "to": "10.2.0.0/16", "incoming": true, "outgoing": true}],
		"neighbors": [{"address": "10.1.0.1", "mac": "02-00-00-00-00-AA"}], "allMulticast": true,
		"sysctls": {"net.ipv4.conf.IFNAME.arp_ignore": "1"},
		"offload": {"gsoMaxSize": 1000, "groMaxSize": 2000, "gsoIPv4MaxSize": 3000, "groIPv4MaxSize": 4000},
		"ethtool": {"features": {"rx-gro": false, "rx-lro": true}, "privateFlags": {"p": true}, "channels": {"rx": 2},
			"rings": {"rx": 64}, "coalescing": {"rx-usecs": 8}, "pause": {"rx": true, "tx": false},
			"rss": {"weights": [3, 1], "hashKey": "6D:5a", "hashFunction": "toeplitz"}},
		"vf": {"vlan": 5, "qos": 3, "vlanProtocol": "802.1ad", "trust": true, "spoofCheck": false, "minTxRate": 100, "maxTxRate": 1000, "linkState": "enable",
			"nodeGUID": "00:11:22:33:44:55:66:77", "portGUID": "00:11:22:33:44:55:66:7F"}`)))

	if err != nil || devices[0].ConfigErr != nil {
		t.Fatal(err, devices[0].ConfigErr)
	}

	want := function.Interface{
		Name: "fast0", MTU: 9000, MAC: "02:00:00:00:00:0a",
		Addresses: []netip.Prefix{
			netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64"),
		},
		Routes: []function.Route{
			{To: netip.MustParsePrefix("0.0.0.0/0"), Via: netip.MustParseAddr("10.1.0.1"),
				Metric: 50},
			{To: netip.MustParsePrefix("fd01::/64")},
			{To: netip.MustParsePrefix("10.4.0.0/16"), Via: netip.MustParseAddr("10.9.9.9"),
				OnLink: true, Source: netip.MustParseAddr("10.1.0.5"), Table: 100, MTU: 1300,
				AdvMSS: 1200, Scope: ptr.To(0)},
		},
		Rules: []function.Rule{{
			Priority: 100, Table: 100, From: netip.MustParsePrefix("10.1.0.0/24"),
			To: netip.MustParsePrefix("10.2.0.0/16"), Incoming: true, Outgoing: true,
		}},
		Neighbors: []function.Neighbor{
			{Address: netip.MustParseAddr("10.1.0.1"), MAC: "02:00:00:00:00:aa"},
		},
		Sysctls: map[string]string{"net.ipv4.conf.IFNAME.arp_ignore": "1"},
		Offload: &function.Offload{
			GSOMaxSize: 1000, GROMaxSize: 2000, GSOIPv4MaxSize: 3000, GROIPv4MaxSize: 4000,
		},
		Ethtool: function.Ethtool{
			"features":      {"rx-gro": "off", "rx-lro": "on"},
			"private flags": {"p": "on"}, "channels": {"rx": "2"}, "rings": {"rx": "64"},
			"coalescing": {"rx-usecs": "8"}, "pause": {"rx": "1", "tx": "0"},
			"RSS": {"table": "weights 3 1", "hash key": "6d5a", "hash function": "1"},
		},
		AllMulticast: true,
		VF: &function.VFConfig{VLAN: ptr.To(5), QoS: ptr.To(3), Proto: "802.1ad",
			Trust: ptr.To(true), SpoofCheck: ptr.To(false),
			MinTxRate: ptr.To(100), MaxTxRate: ptr.To(1000), LinkState: "enable",
			NodeGUID: "00:11:22:33:44:55:66:77", PortGUID: "00:11:22:33:44:55:66:7f"},
	}

	comparers := cmp.Options{cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})}
	if diff := cmp.Diff(want, devices[0].Interface, comparers); diff != "" {
		t.Errorf("Interface: -want +got\n%s", diff)
	}
}

// TestUserspace checks that with a userspace driver, addresses are passed on and the PF's settings
// are applied, and nothing else.
func TestUserspace(t *testing.T) {
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"), claimtest.FromClaim(
			`"driver": "vfio-pci", "mac": "02:00:00:00:00:0a", "addresses": ["10.1.0.5/24"], "vf": {"vlan": 5}`)))
	if err != nil || devices[0].ConfigErr != nil {
		t.Fatal(err, devices[0].ConfigErr)
	}

	want := function.Interface{
		MAC: "02:00:00:00:00:0a", Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")},
		VF: &function.VFConfig{VLAN: ptr.To(5)}, Userspace: true,
	}
	if diff := cmp.Diff(want, devices[0].Interface,
		cmpopts.EquateComparable(netip.Prefix{}, netip.Addr{})); diff != "" {
		t.Errorf("Interface: -want +got\n%s", diff)
	}
}

// TestBadConfig checks that every message names the field and a correct value.
func TestBadConfig(t *testing.T) {
	for _, test := range []struct {
		fields string
		want   []string
	}{
		{`"mtuu": 1`, []string{"parameters in the claim", `unknown field "mtuu"`}},
		{`"vf": {"vlann": 1}`, []string{`unknown field "vf.vlann"`}},
		{`"mtu": 1500, "mtu": 1600`, []string{`duplicate field "mtu"`}},
		{`"driver": "vfio-pci", "allMulticast": true`, []string{"allMulticast: must be absent"}},
		{`"allMulticast": "on"`, []string{"InterfaceConfig.allMulticast", "bool"}},
		{`"mtu": "1500"`, []string{"InterfaceConfig.mtu", "int32"}},
		{`"addresses": "10.1.0.5/24"`, []string{"InterfaceConfig.addresses", "[]string"}},
		{`"interfaceName": "sixteen-bytes-xx"`, []string{"interfaceName", "at most 15"}},
		{`"interfaceName": "a b"`, []string{"interfaceName", "white space"}},
		{`"interfaceName": "lo"`, []string{`interfaceName "lo"`, "choose another name"}},
		{`"interfaceName": "eth0"`, []string{`interfaceName "eth0"`, "choose another name"}},
		{`"mac": "nonsense"`, []string{"mac:", "02:00:00:00:00:01"}},
		{`"mac": "01:00:00:00:00:01"`, []string{"mac", "unicast"}},
		{`"mac": "00:00:00:00:00:00"`, []string{"mac", "unicast"}},
		{`"mtu": 0`, []string{"mtu 0", "68-9216"}},
		{`"mtu": 67`, []string{"mtu 67", "68-9216"}},
		{`"mtu": 9217`, []string{"mtu 9217", "68-9216"}},
		{`"addresses": ["10.1.0.5"]`, []string{`addresses[0] "10.1.0.5"`, "10.1.0.5/24"}},
		{`"addresses": ["10.1.0.5/24"` + strings.Repeat(`, "10.1.0.6/24"`, 16) + `]`,
			[]string{"addresses: has 17, at most 16 may be given"}},
		{`"addresses": ["10.1.0.5/24", "224.0.0.1/24"]`, []string{"addresses[1]", "unicast"}},
		{`"addresses": ["10.1.0.5/24", "10.1.0.5/24"]`, []string{"addresses[1]", "twice"}},
		{`"routes": [{"to": "10.2.0.0"}]`, []string{`routes[0].to "10.2.0.0"`, "10.2.0.0/16"}},
		{`"routes": [{"to": "10.2.0.1/16"}]`, []string{"routes[0]", "10.2.0.0/16"}},
		{`"routes": [{"to": "10.2.0.0/16", "via": "gateway"}]`,
			[]string{`routes[0].via "gateway"`, "10.1.0.1"}},
		{`"routes": [{"to": "10.2.0.0/16", "via": "fd00::1"}]`,
			[]string{"routes[0]", "via", "same family"}},
		{`"routes": [{"to": "10.2.0.0/16", "metric": -1}]`, []string{"routes[0]", "metric -1"}},
		{`"vf": {"vlan": 4095}`, []string{"vf.vlan 4095", "0-4094"}},
		{`"vf": {"vlan": 5, "qos": 8}`, []string{"vf.qos 8", "0-7"}},
		{`"vf": {"qos": 1}`, []string{"vf.vlan", "1-4094"}},
		{`"vf": {"vlan": 5, "vlanProtocol": "802.1x"}`, []string{`"802.1x"`, "802.1q, 802.1ad"}},
		{`"vf": {"maxTxRate": -1}`, []string{"vf.maxTxRate -1"}},
		{`"vf": {"minTxRate": 100, "maxTxRate": 10}`,
			[]string{"vf.minTxRate 100", "at most", "vf.maxTxRate 10"}},
		{`"driver": "vfio-pci", "bond": {"name": "bond0", "mode": "802.3ad"}`,
			[]string{"bond", "must be absent"}},
		{`"bond": {"name": "bond0"}`, []string{`bond.mode ""`, "active-backup"}},
		{`"bond": {"mode": "802.3ad"}`, []string{"bond.name", "is empty"}},
		{`"bond": {"name": "bond0", "mode": "802.3ad", "miimon": 0}`,
			[]string{"bond.miimon 0", "10-10000"}},
		{`"bond": {"name": "bond0", "mode": "802.3ad", "downdelay": 5}`,
			[]string{`unknown field "bond.downdelay"`}},
		{`"driver": "igbvf"`, []string{`driver "igbvf"`, "vfio-pci"}},
		{`"driver": "../../vfio-pci"`, []string{`driver "../../vfio-pci"`, "mlx5_vfio_pci"}},
		{`"driver": "mlx5_vfio_pci", "mtu": 1400`, []string{"mtu 1400", "must be absent"}},
		{`"driver": "vfio-pci", "mtu": 1400`, []string{"mtu 1400", "must be absent"}},
		{`"driver": "vfio-pci", "routes": [{"to": "10.2.0.0/16"}]`,
			[]string{"routes", "must be absent"}},
		{`"driver": "vfio-pci", "ethtool": {"features": {"rx-gro": false}}`,
			[]string{"ethtool", "must be absent"}},
		{`"routes": [{"to": "10.2.0.0/16", "source": "here"}]`,
			[]string{`routes[0].source "here"`, "10.1.0.5"}},
		{`"routes": [{"to": "10.2.0.0/16", "scope": "253"}]`,
			[]string{`routes[0].scope "253"`, "host, link, site, universe"}},
		{`"rules": [{"priority": 5, "table": 5, "from": "10.2.0.1"}]`,
			[]string{`rules[0].from "10.2.0.1"`, "10.2.0.0/16"}},
		{`"rules": [{"priority": 5, "from": "10.2.0.0/16"}]`, []string{"rules[0]", "table 0"}},
		{`"neighbors": [{"address": "gateway", "mac": "x"}]`,
			[]string{`neighbors[0].address "gateway"`, "neighbors[0].mac", "02:00:00:00:00:01"}},
		{`"sysctls": {"net.core.somaxconn": "1"}`,
			[]string{`"net.core.somaxconn" cannot be set`, "net.ipv4.conf.IFNAME", "arp_ignore"}},
		{`"offload": {"gsoMaxSize": 0}`, []string{"offload.gsoMaxSize", "1-524280"}},
		{`"ethtool": {"features": {"rx-gro": "off"}}`, []string{"ethtool.features", "bool"}},
		{`"ethtool": {"rings": {"rx": -1}}`, []string{"ethtool.rings", "must be a number"}},
		{`"ethtool": {"rss": {"equal": 1, "weights": [1]}}`,
			[]string{"ethtool.rss: only one of equal and weights"}},
		{`"ethtool": {"rss": {"weights": [0, 0]}}`,
			[]string{"ethtool.rss.weights: must have one that is not 0"}},
		{`"ethtool": {"rss": {"weights": [-1]}}`, []string{`ethtool.rss.weights "-1": must be 0-65535`}},
		{`"ethtool": {"rss": {"hashKey": "6d5a"}}`,
			[]string{"ethtool.rss.hashKey: must be a key in hexadecimal"}},
		{`"ethtool": {"rss": {"hashFunction": "md5"}}`,
			[]string{`ethtool.rss.hashFunction "md5": must be one of crc32, toeplitz, xor`}},
		// the port's, which others share
		{`"ethtool": {"fec": ["rs"]}`, []string{`unknown field "ethtool.fec"`}},
		{`"networks": [{"name": "a"}], "rules": [{"priority": 5, "table": 5, "incoming": true}]`,
			[]string{"networks", "rules"}},
		{`"networks": [{"name": "a"}], "network": "b"`, []string{"networks", "must be absent"}},
		{`"networks": [{"name": "a"}], "addresses": ["10.1.0.5/24"]`,
			[]string{"networks", "must be absent"}},
		{`"networks": [{"name": "a"}], "routes": [{"to": "10.2.0.0/16"}]`,
			[]string{"networks", "routes"}},
		{`"networks": [{"name": "a"}], "vf": {"vlan": 5}`, []string{"networks", "vf.vlan"}},
		{`"networks": [{"name": "a"}, {"name": "a"}]`,
			[]string{`networks[1].name "a"`, "twice"}},
		{`"networks": [{"name": "a", "interfaceName": "a/b"}]`,
			[]string{"networks[0].interfaceName", "must not contain"}},
		{`"networks": [{"name": "a", "interfaceName": "x"}, {"name": "b", "interfaceName": "x"}]`,
			[]string{`networks[1].interfaceName "x"`, "another interface"}},
		{`"interfaceName": "x", "networks": [{"name": "a", "interfaceName": "x"}]`,
			[]string{`networks[0].interfaceName "x"`, "another interface"}},
		{`"driver": "vfio-pci", "networks": [{"name": "a", "interfaceName": "x"}]`,
			[]string{"networks[0].interfaceName", "must be absent"}},
		{`"networks": [{"addresses": []}]`, []string{"networks[0].name", "XPUNetwork"}},
		{`"networks": [{"name": "a", "addresses": ["10.1.0.5"]}]`,
			[]string{`networks[0].addresses[0] "10.1.0.5"`, "10.1.0.5/24"}},
		{`"networks": [{"name": "a", "addresses": [` + strings.Repeat(`"10.1.0.5/24",`, 16) +
			`"10.1.0.5/24"]}]`, []string{"networks[0].addresses", "at most 16"}},
		{`"networks": [` + strings.Repeat(`{"name": "a"},`, 64) + `{"name": "a"}]`,
			[]string{"networks: has 65", "at most 64"}},
		{`"networks": [{"name": "a", "vlan": 5}]`, []string{`unknown field "networks[0].vlan"`}},
		{`"vf": {"linkState": "up"}`, []string{"vf.linkState", "auto, enable, disable"}},
		// Several errors are reported together.
		{`"mtu": 1, "mac": "x", "interfaceName": "lo", "addresses": ["a", "b"]`,
			[]string{"mtu 1", "mac", "interfaceName", "addresses[0]", "addresses[1]"}},
	} {
		t.Run(test.fields, func(t *testing.T) {
			wantConfigError(t, claimtest.FromClaim(test.fields), test.want...)
		})
	}
}

// TestNetworks checks which networks a Function joins with tags, and what replaces what.
func TestNetworks(t *testing.T) {
	class := claimtest.FromClass(`"network": "lab", "addresses": ["10.1.0.5/24"], "mtu": 1400`)
	for name, test := range map[string]struct {
		options []claimtest.Option
		want    []string
	}{
		"claim": {
			[]claimtest.Option{claimtest.FromClaim(`"networks": [{"name": "b"}, {"name": "a"}]`)},
			[]string{"b", "a"},
		},
		"claim over class": {
			[]claimtest.Option{class, claimtest.FromClaim(`"networks": [{"name": "b"}]`)},
			[]string{"b"},
		},
		"network over networks": {
			[]claimtest.Option{
				claimtest.FromClass(`"networks": [{"name": "b"}]`),
				claimtest.FromClaim(`"network": "lab"`),
			},
			[]string{"lab"},
		},
		"with a program": {
			[]claimtest.Option{
				claimtest.FromClaim(`"driver": "vfio-pci", "networks": [{"name": "b"}]`),
			},
			[]string{"b"},
		},
		"neither": {nil, []string{"of the pool"}},
	} {
		options := append([]claimtest.Option{
			claimtest.Result("blue", testPool, "0000-3b-00-2"),
		}, test.options...)
		devices, err := claim.Devices(claimtest.Allocated("net", options...))
		if err != nil || devices[0].ConfigErr != nil {
			t.Errorf("%s: %v, %v", name, err, devices[0].ConfigErr)
			continue
		}

		names := devices[0].NetworkNames(v1alpha1.DevicePoolSpec{Network: "of the pool"})
		if diff := cmp.Diff(test.want, names); diff != "" {
			t.Errorf("%s: -want +got\n%s", name, diff)
		}
	}
}

// TestAddressesOfNetworksArePrivileged checks that the addresses of tagged networks need the same
// permission as others.
func TestAddressesOfNetworksArePrivileged(t *testing.T) {
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"),
		claimtest.FromClaim(`"networks": [{"name": "a", "addresses": ["10.1.0.5/24"]}]`)))
	if err != nil || devices[0].ConfigErr != nil {
		t.Fatal(err, devices[0].ConfigErr)
	}
	if err := devices[0].Allowed(v1alpha1.DevicePoolSpec{}); err == nil ||
		!strings.Contains(err.Error(), "addresses") {
		t.Errorf("error %v, want that addresses are not allowed", err)
	}
	allow := []v1alpha1.PrivilegedField{v1alpha1.FieldAddresses}
	if err := devices[0].Allowed(v1alpha1.DevicePoolSpec{Allow: allow}); err != nil {
		t.Error(err)
	}
}

func TestWrongKindOfConfig(t *testing.T) {
	right := []string{
		"parameters in the DeviceClass", `"xpu.opiproject.org/v1alpha1" and "InterfaceConfig"`,
	}
	for _, test := range []struct {
		parameters string
		want       []string
	}{
		{`{}`, right},
		{`null`, right},
		{`{"kind": "InterfaceConfig"}`, right},
		{`{"apiVersion": "xpu.opiproject.org/v1alpha1"}`, right},
		{`{"apiVersion": "xpu.opiproject.org/v1", "kind": "InterfaceConfig"}`,
			append(right, `"xpu.opiproject.org/v1" and kind "InterfaceConfig"`)},
		{`{"apiVersion": "v1", "kind": "Pod"}`, append(right, `"v1" and kind "Pod"`)},
		{`{"apiVersion": "xpu.opiproject.org/v1alpha1", "kind": "XPU"}`,
			append(right, `kind "XPU"`)},
		{`{"apiVersion": `, []string{"parameters in the DeviceClass", "json"}},
	} {
		t.Run(test.parameters, func(t *testing.T) {
			wantConfigError(t,
				claimtest.Config(resourceapi.AllocationConfigSourceClass, test.parameters),
				test.want...)
		})
	}
}

func wantConfigError(t *testing.T, config claimtest.Option, want ...string) {
	t.Helper()
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"), config))
	if err != nil || len(devices) != 1 {
		t.Fatalf("Devices = %v, %v; want one, with its own error", devices, err)
	}
	if devices[0].ConfigErr == nil {
		t.Fatalf("ConfigErr is nil, want one with %q", want)
	}

	for _, text := range want {
		if !strings.Contains(devices[0].ConfigErr.Error(), text) {
			t.Errorf("ConfigErr %q: want %q in it", devices[0].ConfigErr, text)
		}
	}
}

// TestOneBadRequestDoesNotHideTheOthers checks that each device has the error of its own
// parameters.
func TestOneBadRequestDoesNotHideTheOthers(t *testing.T) {
	devices, err := claim.Devices(claimtest.Allocated("net",
		claimtest.Result("blue", testPool, "0000-3b-00-2"),
		claimtest.Result("red", testPool, "0000-3b-00-3"),
		claimtest.FromClaim(`"mtu": 1`, "blue"), claimtest.FromClaim(`"mtu": 1500`, "red")))
	if err != nil || len(devices) != 2 {
		t.Fatalf("Devices = %v, %v; want two", devices, err)
	}

	if devices[0].ConfigErr == nil || devices[1].ConfigErr != nil ||
		devices[1].Interface.MTU != 1500 {
		t.Errorf("errors are %v and %v, want one for blue only", devices[0].ConfigErr,
			devices[1].ConfigErr)
	}
}

// FuzzInterfaceConfig checks that any configuration is either rejected, or becomes an interface
// that passes validation.
func FuzzInterfaceConfig(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `{}`, `[]`, `{"apiVersion":"v1","kind":"Pod"}`,
		"apiVersion: xpu.opiproject.org/v1alpha1\nkind: InterfaceConfig\nmtu: 1500\n",
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig"}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","network":"lab","interfaceName":"fast0","mtu":9000,"mac":"02:00:00:00:00:01"}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","addresses":["10.1.0.5/24","fe80::1%eth0/64"],"routes":[{"to":"0.0.0.0/0","via":"::ffff:10.1.0.1","metric":1}]}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","vf":{"vlan":5,"qos":7,"vlanProtocol":"802.1q","minTxRate":1,"maxTxRate":0,"linkState":"auto"}}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","driver":"vfio-pci","addresses":["10.1.0.5/24"]}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","rules":[{"priority":5,"table":5,"from":"10.0.0.0/8","incoming":true}],"neighbors":[{"address":"fe80::1","mac":"02:00:00:00:00:01"}],"sysctls":{"net.ipv4.conf.IFNAME.rp_filter":"2"},"offload":{"gsoMaxSize":131072},"ethtool":{"features":{"rx-gro":false},"rings":{"rx":64},"pause":{"rx":true}}}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","ethtool":{"rss":{"weights":[1,0,2],"hashKey":"6d:5a","hashFunction":"xor"}}}`,
		`{"apiVersion":"xpu.opiproject.org/v1alpha1","kind":"InterfaceConfig","bond":{"name":"bond0","mode":"802.3ad","miimon":50,"lacpRate":"fast","xmitHashPolicy":"layer3+4"}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, parameters []byte) {
		devices, err := claim.Devices(claimtest.Allocated("net",
			claimtest.Result("blue", testPool, "0000-3b-00-2"),
			claimtest.Config(resourceapi.AllocationConfigSourceClaim, string(parameters))))
		if err != nil || len(devices) != 1 {
			t.Fatalf("Devices = %v, %v; want one", devices, err)
		}
		if devices[0].ConfigErr != nil {
			return
		}

		wanted := devices[0].Interface
		if wanted.Name == "" {
			wanted.Name = "net1"
		}
		if err := wanted.Validate(); err != nil {
			t.Errorf("%q was accepted, but %v", parameters, err)
		}

		c := written([]string{"blue"}, claimtest.Config("", string(parameters)))
		if err := claim.ValidateClaim("spec.devices", c); err != nil {
			t.Errorf("%q is prepared, and refused when it is written: %v", parameters, err)
		}
	})
}
