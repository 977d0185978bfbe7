// SPDX-License-Identifier: Apache-2.0

package function_test

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

func TestValidateInterfaceName(t *testing.T) {
	for name, want := range map[string]string{
		"eth0": "", "a": "", "ifname-15-bytes": "", "net.1": "", "ü1": "", "...": "",
		"":                 "is empty",
		"ifname-16-bytes-": "is 16 bytes long, must be at most 15",
		".":                `must be neither "." nor ".."`,
		"..":               `must be neither "." nor ".."`,
		"all":              "sysctls for all interfaces",
		"default":          "sysctls for all interfaces",
		"a/b":              "must not contain",
		"a:1":              "must not contain",
		"net%d":            "must not contain",
		"a b":              "must not contain",
		"a\tb":             "must not contain",
		"a\u00a0b":         "must not contain",
		"a\x00":            "must not contain",
	} {
		err := function.ValidateInterfaceName(name)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", name, err, want)
		}
	}
}

func TestValidate(t *testing.T) {
	prefix, address := netip.MustParsePrefix, netip.MustParseAddr
	everything := function.Interface{
		Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01", AllMulticast: true,
		Addresses: []netip.Prefix{prefix("10.1.0.5/24"), prefix("fd00::5/64")},
		Routes: []function.Route{
			{To: prefix("10.2.0.0/16"), Via: address("10.1.0.1"), Metric: 7},
			{To: prefix("fd01::/64"), Via: address("fd00::1")},
			{To: prefix("0.0.0.0/0")},
		},
	}

	tests := map[string]struct {
		change func(*function.Interface)
		want   string // "" if valid
	}{
		"name only":  {func(*function.Interface) {}, ""},
		"everything": {func(i *function.Interface) { *i = everything }, ""},
		"no name": {func(i *function.Interface) {
			i.Name = ""
		}, "interface name: is empty"},
		"MTU": {func(i *function.Interface) {
			i.MTU = 67
		}, "mtu 67: must be 68 or more"},
		"negative MTU": {func(i *function.Interface) { i.MTU = -1 }, "mtu -1"},
		"multicast MAC": {func(i *function.Interface) {
			i.MAC = "01:00:00:00:00:01"
		}, `mac "01:00:00:00:00:01": must be a unicast`},
		"zero MAC": {func(i *function.Interface) {
			i.MAC = "00:00:00:00:00:00"
		}, "must be a unicast"},
		"InfiniBand MAC": {func(i *function.Interface) {
			i.MAC = "02:00:00:00:00:00:00:01"
		}, "must be a unicast"},
		"address of InfiniBand": {func(i *function.Interface) {
			i.MAC = "80:00:10:28:fe:80:00:00:00:00:00:00:00:11:22:33:44:55:66:77"
		}, "must be absent: an InfiniBand interface has no MAC address that can be set"},
		"no address": {func(i *function.Interface) {
			i.Addresses = make([]netip.Prefix, 1)
		}, "addresses[0]: must be an address"},
		"address twice": {func(i *function.Interface) {
			i.Addresses = []netip.Prefix{prefix("10.0.0.1/8"), prefix("10.0.0.1/8")}
		}, "addresses[1] 10.0.0.1/8: is given twice"},
		"multicast": {func(i *function.Interface) {
			i.Addresses = []netip.Prefix{prefix("224.0.0.1/8")}
		}, "must be a unicast address"},
		"table": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), Table: -1}}
		}, "routes[0]: table -1: must be"},
		"scope": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), Scope: new(256)}}
		}, "routes[0]: scope 256: must be 0-255"},
		"route's MTU": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), MTU: -1}}
		}, "routes[0]: mtu -1"},
		"no netdev": {func(i *function.Interface) {
			i.Userspace, i.MAC = true, "02:00:00:00:00:01"
		}, ""},
		"no netdev, MTU": {func(i *function.Interface) {
			i.Userspace, i.MTU = true, 1400
		}, "mtu 1400: must be empty for a Function without a netdev"},
		"no netdev, all multicast": {func(i *function.Interface) {
			i.Userspace, i.AllMulticast = true, true
		}, "allMulticast: must be empty"},
		"no destination": {func(i *function.Interface) {
			i.Routes = make([]function.Route, 1)
		}, "routes[0]: to: must be a prefix"},
		"host bits": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.1.2.3/8")}}
		}, "must have no host bits, as in 10.0.0.0/8"},
		"mixed families": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), Via: address("fd00::1")}}
		}, "via fd00::1: must be of the same family"},
		"source of another family": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), Source: address("fd00::1")}}
		}, "source fd00::1: must be of the same family"},
		"on link without a gateway": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), OnLink: true}}
		}, "routes[0]: onLink: needs via"},
		"rules": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 1, Table: 1, From: prefix("10.0.0.0/8")},
				{Priority: 32765, Table: 5, Incoming: true}}
		}, ""},
		"rule before the kernel's": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Table: 5, Incoming: true}}
		}, "rules[0]: priority 0: must be 1-32765"},
		"rule without a table": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Incoming: true}}
		}, "rules[0]: table 0: must be 1-"},
		"rule for everything": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Table: 5}}
		}, "rules[0]: from, to, incoming, outgoing: one of them must be given"},
		"rule for everything, by a prefix": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Table: 5, From: prefix("0.0.0.0/0")}}
		}, "and no prefix with /0"},
		"rule for everything that comes in": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Table: 5, From: prefix("::/0"), Incoming: true}}
		}, ""},
		"rule of two families": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Table: 5, From: prefix("10.0.0.0/8"),
				To: prefix("fd00::/64")}}
		}, "must be of the same family"},
		"rule with host bits": {func(i *function.Interface) {
			i.Rules = []function.Rule{{Priority: 5, Table: 5, From: prefix("10.1.2.3/8")}}
		}, "from 10.1.2.3/8: must have no host bits, as in 10.0.0.0/8"},
		"rule twice": {func(i *function.Interface) {
			i.Rules = slices.Repeat([]function.Rule{{Priority: 5, Table: 5, Outgoing: true}}, 2)
		}, "rules[1]: priority 5: rules[0] has it; give each rule its own"},
		"many rules": {func(i *function.Interface) {
			for n := range 65 {
				i.Rules = append(i.Rules, function.Rule{Priority: n + 1, Table: 5, Outgoing: true})
			}
		}, "rules: has 65, at most 64"},
		"neighbor": {func(i *function.Interface) {
			i.Neighbors = []function.Neighbor{{Address: address("fe80::1"), MAC: "02:00:00:00:00:01"}}
		}, ""},
		"neighbor without MAC": {func(i *function.Interface) {
			i.Neighbors = []function.Neighbor{{Address: address("10.0.0.1")}}
		}, `neighbors[0].mac "": must be a unicast`},
		"neighbor in two forms": {func(i *function.Interface) {
			i.Neighbors = []function.Neighbor{
				{Address: address("::ffff:10.0.0.1"), MAC: "02:00:00:00:00:01"},
			}
		}, "neighbors[0].address ::ffff:10.0.0.1: must be a unicast address"},
		"neighbor twice": {func(i *function.Interface) {
			i.Neighbors = slices.Repeat([]function.Neighbor{
				{Address: address("10.0.0.1"), MAC: "02:00:00:00:00:01"},
			}, 2)
		}, "neighbors[1].address 10.0.0.1: is given twice"},
		"many neighbors": {func(i *function.Interface) {
			i.Neighbors = make([]function.Neighbor, 257)
		}, "neighbors: has 257, at most 256"},
		"VRF": {func(i *function.Interface) {
			i.VRF = &function.VRF{Name: "red", Table: 100}
		}, ""},
		"bond": {func(i *function.Interface) { i.Bond = bond("active-backup") }, ""},
		"bond by LACP": {func(i *function.Interface) {
			i.Bond = bond("802.3ad")
			i.Bond.LACPRate, i.Bond.XmitHashPolicy = "fast", "layer3+4"
		}, ""},
		"bond without a mode": {func(i *function.Interface) { i.Bond = bond("") },
			`bond.mode "": must be one of balance-rr, active-backup, `},
		"bond with the interface's name": {func(i *function.Interface) {
			i.Bond = bond("active-backup")
			i.Bond.Name = "net1"
		}, `bond.name "net1": is the name of another interface`},
		"bond with the VRF's name": {func(i *function.Interface) {
			i.Bond, i.VRF = bond("active-backup"), &function.VRF{Name: "bond0", Table: 1}
		}, `bond.name "bond0": is the name of another interface`},
		"bond without a name": {func(i *function.Interface) {
			i.Bond = bond("active-backup")
			i.Bond.Name = ""
		}, "bond.name: interface name: is empty"},
		"bond that never looks at the carrier": {func(i *function.Interface) {
			i.Bond = bond("active-backup")
			i.Bond.MIIMon = 0
		}, "bond.miimon 0: must be 10-10000"},
		"hash policy of a mode without one": {func(i *function.Interface) {
			i.Bond = bond("active-backup")
			i.Bond.XmitHashPolicy = "layer2"
		}, "bond.xmitHashPolicy: must be absent with mode active-backup; only balance-xor, 802.3ad has it"},
		"unknown hash policy": {func(i *function.Interface) {
			i.Bond = bond("balance-xor")
			i.Bond.XmitHashPolicy = "layer7"
		}, `bond.xmitHashPolicy "layer7": must be one of layer2, `},
		"LACP rate without LACP": {func(i *function.Interface) {
			i.Bond = bond("balance-xor")
			i.Bond.LACPRate = "fast"
		}, "bond.lacpRate: must be absent with mode balance-xor; only 802.3ad has it"},
		"primary port of a mode without one": {func(i *function.Interface) {
			i.Bond = bond("balance-rr")
			i.Bond.Primary = true
		}, "bond.primary: must be absent with mode balance-rr"},
		"MAC address of a port that gets the bond's": {func(i *function.Interface) {
			i.Bond, i.MAC = bond("802.3ad"), "02:00:00:00:00:01"
		}, "mac: must be absent with bond.mode 802.3ad"},
		"neighbors that another active port would drop": {func(i *function.Interface) {
			i.Bond = bond("active-backup")
			i.Neighbors = []function.Neighbor{
				{Address: netip.MustParseAddr("10.1.0.1"), MAC: "02:00:00:00:00:01"},
			}
		}, "neighbors: must be absent with bond.mode active-backup"},
		"bond of a trunk": {func(i *function.Interface) {
			i.Bond, i.VLANs = bond("802.3ad"), []function.VLAN{{Name: "a", Tag: 1}}
		}, "bond: must be absent for a Function with tagged networks"},
		"VLANs": {func(i *function.Interface) {
			i.VLANs = []function.VLAN{{Name: "a", Tag: 1}, {Name: "b", Tag: 4094}}
		}, ""},
		"VLAN with the interface's name": {func(i *function.Interface) {
			i.VLANs = []function.VLAN{{Name: "net1", Tag: 1}}
		}, `vlans[0] "net1": is the name of another interface`},
		"VLANs with one tag": {func(i *function.Interface) {
			i.VLANs = []function.VLAN{{Name: "a", Tag: 1}, {Name: "b", Tag: 1}}
		}, "vlans[1] tag 1: must be 1-4094, and the tag of one VLAN"},
		"VLAN without a tag": {func(i *function.Interface) {
			i.VLANs = []function.VLAN{{Name: "a"}}
		}, "vlans[0] tag 0: must be 1-4094"},
		"VLAN with a bad address": {func(i *function.Interface) {
			i.VLANs = []function.VLAN{{Name: "a", Tag: 1, Addresses: make([]netip.Prefix, 1)}}
		}, "vlans[0]: addresses[0]: must be an address"},
		"VRF with the interface's name": {func(i *function.Interface) {
			i.VRF = &function.VRF{Name: "net1", Table: 100}
		}, `vrf.name "net1": is the name of an interface`},
		"VRF without a name": {func(i *function.Interface) {
			i.VRF = &function.VRF{Table: 100}
		}, "vrf.name: interface name: is empty"},
		"VRF with the main table": {func(i *function.Interface) {
			i.VRF = &function.VRF{Name: "red", Table: 254}
		}, "vrf.table 254: must be 1-2147483647, and not 253-255"},
		"sysctl": {func(i *function.Interface) {
			i.Sysctls = map[string]string{"net.ipv4.conf.IFNAME.forwarding": "1",
				"net.ipv6.conf.IFNAME.addr_gen_mode": "1"}
		}, ""},
		"sysctl of all interfaces": {func(i *function.Interface) {
			i.Sysctls = map[string]string{"net.ipv4.conf.all.forwarding": "1"}
		}, `sysctls: "net.ipv4.conf.all.forwarding" cannot be set; of net.ipv4.conf.IFNAME can be accept_local, `},
		"sysctl by a path": {func(i *function.Interface) {
			i.Sysctls = map[string]string{"net.ipv4.conf.IFNAME.../../../kernel/core_pattern": "1"}
		}, "cannot be set"},
		"sysctl's text": {func(i *function.Interface) {
			i.Sysctls = map[string]string{"net.ipv4.conf.IFNAME.forwarding": "|/bin/sh"}
		}, `net.ipv4.conf.IFNAME.forwarding "|/bin/sh": must be a number`},
		"offload": {func(i *function.Interface) {
			i.Offload = &function.Offload{GSOMaxSize: 524280}
		}, ""},
		"large offload": {func(i *function.Interface) {
			i.Offload = &function.Offload{GROIPv4MaxSize: 524281}
		}, "offload.groIPv4MaxSize: must be 1-524280"},
		"ethtool": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"features": {"rx-gro": "off"}, "rings": {"rx": "64"}}
		}, ""},
		"ethtool group": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"eeprom": {"x": "1"}}
		}, `ethtool: "eeprom" is no group of settings; can be: private flags, channels`},
		"ethtool value": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"features": {"rx-gro": "1"}}
		}, `ethtool.features: "rx-gro" is "1": must be on or off`},
		"ethtool number": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"rings": {"rx": "-1"}}
		}, `ethtool.rings: "rx" is "-1": must be a number`},
		"ethtool name": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"features": {"a\nb": "on"}}
		}, "has a name that no driver has"},
		"RSS": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{
				"RSS": {"table": "weights 3 1", "hash key": "6d5a", "hash function": "1"},
			}
		}, ""},
		"RSS of equal shares": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "equal 1024"}}
		}, ""},
		"RSS of no queue": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "equal 0"}}
		}, `ethtool.rss.equal "0": must be 1-1024`},
		"RSS without a weight": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "weights 0 0"}}
		}, `ethtool.rss.weights: must have one that is not 0`},
		"RSS of too many weights": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "weights" + strings.Repeat(" 1", 1025)}}
		}, `ethtool.rss.weights: has 1025, at most 1024 may be given`},
		"RSS with a large weight": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "weights 1 65536"}}
		}, `ethtool.rss.weights "65536": must be 0-65535`},
		"RSS by a table": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"table": "0 1 2"}}
		}, `ethtool.rss: table "0 1 2": must be equal shares or weights`},
		"RSS with no key": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"hash key": "6d5"}}
		}, `ethtool.rss.hashKey: must be 1-128 bytes such as 6d:5a:56`},
		"RSS with another setting": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"input transformation": "1"}}
		}, `ethtool.rss: "input transformation" cannot be set`},
		"RSS with no function": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"RSS": {"hash function": "3"}}
		}, `ethtool.rss.hashFunction: must be one of crc32, toeplitz, xor`},
		"FEC": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"FEC": {"auto": "1"}}
		}, `ethtool: "FEC" is no group of settings`},
		"long ethtool name": {func(i *function.Interface) {
			i.Ethtool = function.Ethtool{"features": {strings.Repeat("a", 32): "on"}}
		}, "has a name that no driver has"},
		"no netdev, but its settings": {func(i *function.Interface) {
			i.Userspace, i.Offload = true, &function.Offload{GSOMaxSize: 9000}
			i.Ethtool = function.Ethtool{"features": {"rx-gro": "off"}}
			i.Sysctls = map[string]string{"net.ipv4.conf.IFNAME.forwarding": "1"}
			i.Rules = []function.Rule{{Priority: 5, Table: 5, Outgoing: true}}
			i.Neighbors = []function.Neighbor{{Address: address("10.0.0.1"), MAC: "02:00:00:00:00:01"}}
		}, "rules, neighbors, sysctls, offload, ethtool: must be empty"},
		"negative metric": {func(i *function.Interface) {
			i.Routes = []function.Route{{To: prefix("10.0.0.0/8"), Metric: -1}}
		}, "metric -1"},
		"VLAN": {func(i *function.Interface) {
			i.VF = &function.VFConfig{VLAN: new(4095)}
		}, "vf.vlan 4095: must be 0-4094"},
		"no VLAN": {func(i *function.Interface) {
			i.VF = &function.VFConfig{VLAN: new(0), QoS: new(0)}
		}, ""},
		"QoS without VLAN": {func(i *function.Interface) {
			i.VF = &function.VFConfig{QoS: new(1)}
		}, "vf.vlan: must be 1-4094"},
		"QoS": {func(i *function.Interface) {
			i.VF = &function.VFConfig{VLAN: new(1), QoS: new(8)}
		}, "vf.qos 8: must be 0-7"},
		"protocol": {func(i *function.Interface) {
			i.VF = &function.VFConfig{VLAN: new(1), Proto: "QinQ"}
		}, `vf.vlanProtocol "QinQ": must be one of 802.1q, 802.1ad`},
		"rates": {func(i *function.Interface) {
			i.VF = &function.VFConfig{MinTxRate: new(2), MaxTxRate: new(1)}
		}, "vf.minTxRate 2: must be at most vf.maxTxRate 1"},
		"no highest rate": {func(i *function.Interface) {
			i.VF = &function.VFConfig{MinTxRate: new(2), MaxTxRate: new(0)}
		}, ""},
		"link state": {func(i *function.Interface) {
			i.VF = &function.VFConfig{LinkState: "up"}
		}, `vf.linkState "up": must be one of auto, enable, disable`},
		"GUIDs": {func(i *function.Interface) {
			i.VF = &function.VFConfig{
				NodeGUID: "00:11:22:33:44:55:66:77", PortGUID: "00:11:22:33:44:55:66:78",
			}
		}, ""},
		"zeros as GUID": {func(i *function.Interface) {
			i.VF = &function.VFConfig{NodeGUID: "00:00:00:00:00:00:00:00"}
		}, `vf.nodeGUID "00:00:00:00:00:00:00:00": must be 8 bytes such as`},
		"ones as GUID": {func(i *function.Interface) {
			i.VF = &function.VFConfig{PortGUID: "ff:ff:ff:ff:ff:ff:ff:ff"}
		}, `vf.portGUID "ff:ff:ff:ff:ff:ff:ff:ff": must be 8 bytes such as`},
		"short GUID": {func(i *function.Interface) {
			i.VF = &function.VFConfig{PortGUID: "00:11:22:33:44:55"}
		}, `vf.portGUID "00:11:22:33:44:55": must be 8 bytes`},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			i := function.Interface{Name: "net1"}
			test.change(&i)
			err := i.Validate()
			if (err == nil) != (test.want == "") ||
				err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestMACText(t *testing.T) {
	for text, want := range map[string]function.MAC{
		`"02-00-00-00-00-AB"`: "02:00:00:00:00:ab", `"0200.0000.00ab"`: "02:00:00:00:00:ab",
		`""`: "",
		`"00:00:00:00:fe:80:00:00:00:00:00:00:02:00:5e:10:00:00:00:01"`: "00:00:00:00:fe:80:00:00:00:00:00:00:02:00:5e:10:00:00:00:01",
	} {
		var mac function.MAC
		if err := json.Unmarshal([]byte(text), &mac); err != nil || mac != want {
			t.Errorf("%s: %q, %v, want %q", text, mac, err, want)
		}
	}

	var mac function.MAC
	if err := json.Unmarshal([]byte(`"02:00"`), &mac); err == nil ||
		!strings.Contains(err.Error(), `MAC "02:00": must be`) {
		t.Errorf("error %v", err)
	}
}

// bond returns a bond of the mode.
func bond(mode string) *function.Bond {
	return &function.Bond{Name: "bond0", Mode: mode, MIIMon: 100}
}

// TestOfBond checks that a bond gets what is about packets, and that its port keeps what is about the
// link.
func TestOfBond(t *testing.T) {
	port := function.Interface{
		Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:01", Bond: bond("active-backup"),
		Addresses: []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24")}, AllMulticast: true,
		Sysctls: map[string]string{"net.ipv4.conf.IFNAME.arp_ignore": "1"},
		Offload: &function.Offload{GSOMaxSize: 1}, VF: &function.VFConfig{},
	}
	want := function.Interface{
		Name: "bond0", Addresses: port.Addresses, AllMulticast: true, Sysctls: port.Sysctls,
	}
	if got := port.OfBond(); !reflect.DeepEqual(got, want) {
		t.Errorf("the bond gets %+v, want %+v", got, want)
	}
}
