// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/netns"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// VFs returns the VFs of a PF by index.
func VFs(t *testing.T, pf pci.Address) []function.ID {
	t.Helper()
	var vfs []function.ID
	for i := range card.Number(t, pf, "sriov_numvfs") {
		vfs = append(vfs, function.ID{Address: card.VF(t, pf, i)})
	}
	return vfs
}

// State is all that must be the same after pods had Functions: the host's netdevs by device, and
// the settings of VFs that PFs enforce. It is read by netlink, and not by the product's code. A key
// is the name of the device on its bus.
type State map[string]NetdevState

// NetdevState is a netdev of a device on the host.
type NetdevState struct {
	Name, MAC, Alias string
	MTU, TxQLen      int
	Up               bool
	AltNames         []string
	Driver           string
	// VFs are the VFs by index. A VF that the PF does not report is missing.
	VFs map[int]VFState
}

// VFState has the settings of a VF that the PF enforces.
type VFState struct {
	MAC               string
	VLAN, QoS, Proto  int
	MinRate, MaxRate  uint32
	SpoofCheck, Trust bool
	LinkState         uint32
}

// HostState returns the present State.
func HostState(t *testing.T) State {
	t.Helper()
	links, err := netns.Listed(linksWithVFs)
	must.Succeed(t, err)
	state := State{}
	for _, l := range links {
		a := l.link.Attrs()
		if a.ParentDev == "" || a.Name == plan.HostNetdev {
			continue
		}

		s := NetdevState{
			Name: a.Name, MAC: a.HardwareAddr.String(), Alias: a.Alias, MTU: a.MTU,
			TxQLen: a.TxQLen,
			Up:     a.Flags&net.FlagUp != 0, AltNames: slices.Sorted(slices.Values(a.AltNames)),
			Driver: card.Link(pci.Address(a.ParentDev), "driver"),
		}

		for i, vf := range a.Vfs {
			if s.VFs == nil {
				s.VFs = map[int]VFState{}
			}
			s.VFs[l.vfs[i]] = VFState{
				MAC: vf.Mac.String(), VLAN: vf.Vlan, QoS: vf.Qos, Proto: vf.VlanProto,
				MinRate: vf.MinTxRate,
				MaxRate: vf.MaxTxRate, SpoofCheck: vf.Spoofchk, Trust: vf.Trust == 1,
				LinkState: vf.LinkState,
			}
		}

		state[a.ParentDev+representing(a.Name)] = s
	}

	return state
}

// linkWithVFs is a netdev, and the indexes of the VFs that it reports. The netlink package numbers
// the VFs itself, so that the numbers are wrong after a VF that is left out.
type linkWithVFs struct {
	link netlink.Link
	vfs  []int
}

func linksWithVFs() ([]linkWithVFs, error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETLINK, unix.NLM_F_DUMP)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(nl.RTEXT_FILTER_VF)))
	messages, failed := request.Execute(unix.NETLINK_ROUTE, 0)
	if failed != nil {
		return nil, failed
	}

	var links []linkWithVFs
	for _, m := range messages {
		link, err := netlink.LinkDeserialize(nil, m)
		if err != nil {
			return nil, err
		}

		vfs, err := indexesOfVFs(m)
		if err != nil {
			return nil, err
		}
		links = append(links, linkWithVFs{link, vfs})
	}

	return links, nil
}

// indexesOfVFs returns the indexes of the VFs in a message about a netdev, in its order. The field
// with a VF's MAC begins with the index (struct ifla_vf_mac of linux/if_link.h).
func indexesOfVFs(message []byte) ([]int, error) {
	attributes, err := nl.ParseRouteAttr(message[unix.SizeofIfInfomsg:])
	if err != nil {
		return nil, err
	}

	var indexes []int
	for _, a := range attributes {
		if a.Attr.Type&^unix.NLA_F_NESTED != unix.IFLA_VFINFO_LIST {
			continue
		}

		vfs, err := nl.ParseRouteAttr(a.Value)
		if err != nil {
			return nil, err
		}

		for _, vf := range vfs {
			fields, err := nl.ParseRouteAttr(vf.Value)
			if err != nil {
				return nil, err
			}
			for _, f := range fields {
				if f.Attr.Type == nl.IFLA_VF_MAC {
					indexes = append(indexes, int(binary.NativeEndian.Uint32(f.Value)))
				}
			}
		}
	}

	return indexes, nil
}

// representing distinguishes the netdevs of a PF in mode switchdev: " pf0vf3" for the representor
// of its fourth VF, "" for the PF's own netdev.
func representing(netdev string) string {
	content, err := os.ReadFile(filepath.Join("/sys/class/net", netdev, "phys_port_name"))
	name := strings.TrimSpace(string(content))
	if err != nil || !strings.ContainsAny(name, "vs") { // most drivers return EOPNOTSUPP
		return ""
	}
	return " " + name
}

// WantState waits until the host is as it was.
func WantState(t *testing.T, want State) {
	t.Helper()
	var diff string
	for end := time.Now().Add(5 * time.Second); time.Now().
		Before(end); time.Sleep(50 * time.Millisecond) {
		if diff = cmp.Diff(want, HostState(t)); diff == "" {
			return
		}
	}

	t.Errorf("the host's netdevs (-before +now):\n%s", diff)
}

// VF returns the settings that the PF enforces for one of its VFs.
func (s State) VF(t *testing.T, pf pci.Address, index int) VFState {
	t.Helper()
	if vf, told := s[string(pf)].VFs[index]; told {
		return vf
	}
	t.Fatalf("PF %s tells nothing about VF %d: it is %+v", pf, index, s[string(pf)])
	return VFState{}
}

// Carrier waits until the netdevs of these devices have a carrier. igb resets a PF some 0.3 s after
// its VFs were made, and then has no carrier for some seconds.
func Carrier(t *testing.T, pfs ...pci.Address) {
	t.Helper()
	for _, pf := range pfs {
		must.Eventually(t, "carrier of "+string(pf), func() bool {
			content, err := os.ReadFile(filepath.Join(card.Devices, string(pf), "net",
				card.Netdev(pf), "carrier"))
			return err == nil && strings.TrimSpace(string(content)) == "1"
		})
	}
}
