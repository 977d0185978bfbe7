// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"encoding/binary"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// pfMessage returns the attributes of a PF's RTM_NEWLINK with some VFs.
func pfMessage(vfs ...func(info *nl.RtAttr)) []byte {
	list := nl.NewRtAttr(unix.IFLA_VFINFO_LIST|unix.NLA_F_NESTED, nil)
	for _, vf := range vfs {
		vf(list.AddRtAttr(nl.IFLA_VF_INFO, nil))
	}
	return append(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("ens3f0")).Serialize(),
		list.Serialize()...)
}

func words(values ...uint32) []byte {
	var b []byte
	for _, v := range values {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

// describe writes a VF as the kernel does (rtnl_fill_vfinfo of net/core/rtnetlink.c).
func describe(
	index uint32, ethertype uint16, spoofCheck, trust, linkState uint32,
) func(*nl.RtAttr) {
	return func(info *nl.RtAttr) {
		mac := make([]byte, 36)
		copy(mac, words(index))
		copy(mac[4:], []byte{2, 0, 0, 0, 0, byte(index)})
		info.AddRtAttr(nl.IFLA_VF_MAC, mac)
		info.AddRtAttr(nl.IFLA_VF_VLAN, words(index, 100+index, 3))
		info.AddRtAttr(nl.IFLA_VF_RATE, words(index, 10, 1000))
		info.AddRtAttr(nl.IFLA_VF_TX_RATE, words(index, 1000))
		info.AddRtAttr(nl.IFLA_VF_SPOOFCHK, words(index, spoofCheck))
		info.AddRtAttr(nl.IFLA_VF_LINK_STATE, words(index, linkState))
		info.AddRtAttr(nl.IFLA_VF_RSS_QUERY_EN, words(index, unknown))
		info.AddRtAttr(nl.IFLA_VF_TRUST, words(index, trust))
		vlan := binary.BigEndian.AppendUint16(words(index, 100+index, 3), ethertype)
		info.AddRtAttr(nl.IFLA_VF_VLAN_LIST, nil).AddRtAttr(nl.IFLA_VF_VLAN_INFO,
			append(vlan, 0, 0))
	}
}

func TestParseVF(t *testing.T) {
	message := pfMessage(
		describe(0, unix.ETH_P_8021Q, 1, 0, nl.IFLA_VF_LINK_STATE_AUTO),
		describe(1, unix.ETH_P_8021AD, unknown, unknown, nl.IFLA_VF_LINK_STATE_DISABLE),
	)

	for vf, want := range []VFState{
		{MAC: "02:00:00:00:00:00", VLAN: 100, QoS: 3, Proto: "802.1q", MinTxRate: 10,
			MaxTxRate: 1000, SpoofCheck: new(true), Trust: new(false), LinkState: "auto"},
		{MAC: "02:00:00:00:00:01", VLAN: 101, QoS: 3, Proto: "802.1ad", MinTxRate: 10,
			MaxTxRate: 1000, LinkState: "disable"},
	} {
		if diff := cmp.Diff(&want, parsePF(message, vf).vf); diff != "" {
			t.Errorf("VF %d (-want +got):\n%s", vf, diff)
		}
	}

	for name, message := range map[string][]byte{
		"other VFs only": message, "no VFs": pfMessage(), "short": {1, 2, 3},
	} {
		if got := parsePF(message, 7).vf; got != nil {
			t.Errorf("%s: %+v, want nothing", name, got)
		}
	}
}

// TestParseGUIDs covers the VF of an InfiniBand PF (ipoib_get_vf_guid).
func TestParseGUIDs(t *testing.T) {
	message := pfMessage(func(info *nl.RtAttr) {
		info.AddRtAttr(nl.IFLA_VF_MAC, append(words(3), make([]byte, 32)...))
		node := nl.VfGUID{Vf: 3, GUID: 0x0011223344556677}
		info.AddRtAttr(nl.IFLA_VF_IB_NODE_GUID, node.Serialize())
		info.AddRtAttr(nl.IFLA_VF_IB_PORT_GUID, words(3, 0, 0, 0))
	})
	got := parsePF(message, 3).vf
	if got == nil || got.NodeGUID != "00:11:22:33:44:55:66:77" ||
		got.PortGUID != "00:00:00:00:00:00:00:00" {
		t.Errorf("%+v", got)
	}

	short := pfMessage(func(info *nl.RtAttr) {
		info.AddRtAttr(nl.IFLA_VF_MAC, append(words(3), make([]byte, 32)...))
		info.AddRtAttr(nl.IFLA_VF_IB_NODE_GUID, words(3, 0, 1))
	})
	if got := parsePF(short, 3).vf; got == nil || got.NodeGUID != "" {
		t.Errorf("of a short attribute: %+v", got)
	}
}

// TestParseOddVF covers what some drivers report if there is no VLAN: number 4095 (mlx4), and no
// protocol.
func TestParseOddVF(t *testing.T) {
	message := pfMessage(func(info *nl.RtAttr) {
		info.AddRtAttr(nl.IFLA_VF_MAC, append(words(0), make([]byte, 32)...))
		info.AddRtAttr(nl.IFLA_VF_VLAN, words(0, 4095, 7))
		info.AddRtAttr(nl.IFLA_VF_TRUST, words(0, unknown))
		info.AddRtAttr(nl.IFLA_VF_VLAN_LIST, nil).AddRtAttr(nl.IFLA_VF_VLAN_INFO,
			append(words(0, 4095, 7), 0, 0, 0, 0))
	})

	want := &VFState{MAC: "00:00:00:00:00:00", Proto: "802.1q"}
	if diff := cmp.Diff(want, parsePF(message, 0).vf); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestParsePF covers a driver without operations for VFs, a driver that leaves out a VF, and a PF
// without VFs.
func TestParsePF(t *testing.T) {
	header := func(vfs uint32) []byte {
		return slices.Concat(
			nl.NewRtAttr(unix.IFLA_PARENT_DEV_NAME, nl.ZeroTerminated("0000:3b:00.0")).Serialize(),
			nl.NewRtAttr(unix.IFLA_PARENT_DEV_BUS_NAME, nl.ZeroTerminated("pci")).Serialize(),
			nl.NewRtAttr(unix.IFLA_NUM_VF, words(vfs)).Serialize())
	}

	vf1 := pfMessage(describe(1, unix.ETH_P_8021Q, 1, 0, 0))
	for name, test := range map[string]struct {
		message []byte
		want    pfReport
		silent  bool
	}{
		"no operations": {header(2), pfReport{vfs: 2}, false},
		"none is told": {
			append(header(2), pfMessage()...), pfReport{vfs: 2, operations: true}, true,
		},
		"another one is told": {
			append(header(2), vf1...), pfReport{vfs: 2, operations: true, others: true}, true,
		},
		"it does not exist": {
			append(header(0), pfMessage()...), pfReport{operations: true}, false,
		},
		"no netdev of hardware": {pfMessage()[:0], pfReport{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			got := parsePF(test.message, 0)
			if len(test.message) > 0 {
				test.want.bus, test.want.parent = "pci", "0000:3b:00.0"
			}
			if got != test.want || got.silent(0) != test.silent {
				t.Errorf("%+v, want %+v", got, test.want)
			}
		})
	}
}

func FuzzParseVF(f *testing.F) {
	f.Add(pfMessage(describe(0, unix.ETH_P_8021Q, 1, 0, 0)), 0)
	f.Add(pfMessage(), 1)

	f.Fuzz(func(t *testing.T, message []byte, vf int) {
		state := parsePF(message, vf).vf
		if state == nil {
			return
		}
		if changes := vfChanges(*state, *state); len(changes) > 0 {
			t.Fatalf("changes from a state to itself: %+v", changes)
		}
	})
}

func TestVFChanges(t *testing.T) {
	plain := VFState{MAC: "00:00:00:00:00:00", Proto: "802.1q", SpoofCheck: new(true),
		Trust: new(false), LinkState: "auto"}
	tests := map[string]struct {
		from VFState
		want function.VFConfig
		mac  function.MAC
		says []string
	}{
		"nothing": {from: plain},
		"as it is": {
			from: plain,
			want: function.VFConfig{VLAN: new(0), SpoofCheck: new(true), Trust: new(false),
				LinkState: "auto", MaxTxRate: new(0)},
		},
		"MAC": {
			from: plain, mac: "02:00:00:00:00:01", says: []string{"MAC 02:00:00:00:00:01"},
		},
		"VLAN": {
			from: plain, want: function.VFConfig{VLAN: new(100)},
			says: []string{"VLAN 100 qos 0 proto 802.1q"},
		},
		"QinQ": {
			from: plain, want: function.VFConfig{VLAN: new(100), QoS: new(3), Proto: "802.1ad"},
			says: []string{"VLAN 100 qos 3 proto 802.1ad"},
		},
		"VLAN away": {
			from: VFState{VLAN: 7, QoS: 2, Proto: "802.1ad"}, want: function.VFConfig{VLAN: new(0)},
			says: []string{"VLAN none"},
		},
		"one rate": {
			from: VFState{MinTxRate: 5, MaxTxRate: 9}, want: function.VFConfig{MaxTxRate: new(100)},
			says: []string{"rates of 5-100 Mbit/s"},
		},
		"trust, spoof check": {
			from: plain, want: function.VFConfig{Trust: new(true), SpoofCheck: new(false)},
			says: []string{"spoof check off", "trust on"},
		},
		"unknown to the PF": {
			from: VFState{}, want: function.VFConfig{Trust: new(true)}, says: []string{"trust on"},
		},
		"link state": {
			from: plain, want: function.VFConfig{LinkState: "enable"},
			says: []string{"link state enable"},
		},
	}

	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			to := test.from.with(&test.want, test.mac)
			var says []string
			for _, c := range vfChanges(test.from, to) {
				says = append(says, c.what)
			}
			if diff := cmp.Diff(test.says, says); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
			if left := vfChanges(to, to.with(&test.want, test.mac)); len(left) > 0 {
				t.Errorf("a second time: %+v", left)
			}
		})
	}
}

func TestDiff(t *testing.T) {
	before := Snapshot{Name: "ens1", AltNames: []string{"a"}, Alias: "x", MTU: 1500,
		MAC: "02:00:00:00:00:01", TxQLen: 1000, Up: true,
		VF: &VFState{MAC: "02:00:00:00:00:01", VLAN: 5, Proto: "802.1q", MinTxRate: 1,
			MaxTxRate: 2, Trust: new(true), LinkState: "auto"},
		Identity: Identity{Index: 3}}

	now := Snapshot{Name: "net1", MTU: 1400, MAC: "02:00:00:00:00:02", TxQLen: 5, NoARP: true,
		Promiscuous: true, AllMulticast: true,
		VF: &VFState{Trust: new(false), SpoofCheck: new(true)}, Identity: Identity{Index: 9}}

	want := []string{
		`name is "net1", was "ens1"`, `altnames are [], were ["a"]`, `alias is "", was "x"`,
		"mtu is 1400, was 1500",
		"mac is 02:00:00:00:00:02, was 02:00:00:00:00:01", "txqlen is 5, was 1000",
		"up is false, was true",
		"noarp is true, was false", "promiscuous is true, was false",
		"allmulticast is true, was false",
		"vf mac is , was 02:00:00:00:00:01", `vf vlan is "none", was "5 qos 0 proto 802.1q"`,
		"vf min_tx_rate is 0, was 1", "vf max_tx_rate is 0, was 2",
		`vf spoofchk is "on", was "unknown"`,
		`vf trust is "off", was "on"`, `vf link-state is "", was "auto"`,
	}

	if diff := cmp.Diff(want, Diff(before, now)); diff != "" {
		t.Errorf("diff (-want +got):\n%s", diff)
	}
	if same := Diff(before, before); len(same) > 0 {
		t.Errorf("from itself it differs: %q", same)
	}

	now = before
	now.VF, now.Identity.Index = nil, 9
	if same := Diff(before, now); len(same) > 0 {
		t.Errorf("without what the PF tells and under another index it differs: %q", same)
	}
}
