// SPDX-License-Identifier: Apache-2.0

// Package stage makes the simulated NIC of a guest play the drivers of other cards, for tests. It
// reads the settings that are really in effect, whatever the PF reports.
package stage

import (
	"flag"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/zoo"
)

// names is the flag with which qemutest selects personalities.
var names = flag.String("personalities", "",
	"play these only, by name, with commas between; all if it is empty")

// patience bounds the time until a PF is as it was.
const patience = 20 * time.Second

// Personalities returns the personalities that the test must play.
func Personalities(t *testing.T) []personality.Personality {
	t.Helper()
	all, err := zoo.All()
	must.Succeed(t, err)
	if *names == "" {
		return all
	}

	wanted := strings.Split(*names, ",")
	all = slices.DeleteFunc(all, func(p personality.Personality) bool {
		return !slices.Contains(wanted, p.Name)
	})
	if len(all) != len(wanted) {
		t.Fatalf("there are %d of the personalities %q", len(all), wanted)
	}

	return all
}

// Stage is a PF of the guest simnic with its VFs.
type Stage struct {
	pf      pci.Address
	vfs     []pci.Address
	own     []string // MAC addresses of the VFs' netdevs, by index
	netdevs []string // names of the VFs' netdevs, by index
	devlink *devlink.Conn
}

// New returns a stage on a PF. When the test ends, everything is as before.
func New(t *testing.T, pf pci.Address) *Stage {
	t.Helper()
	conn, err := devlink.Dial("")
	must.Succeed(t, err)
	t.Cleanup(conn.Close)

	s := &Stage{pf: pf, devlink: conn}
	for i := range card.Number(t, pf, "sriov_numvfs") {
		s.vfs = append(s.vfs, card.VF(t, pf, i))
		s.own = append(s.own, s.VF(t, i).Own)
		s.netdevs = append(s.netdevs, card.Netdev(s.vfs[i]))
	}

	return s
}

// Play makes the PF play a personality until the test ends.
func (s *Stage) Play(t *testing.T, p personality.Personality) {
	t.Helper()
	if p.Switchdev {
		must.Succeed(t, s.devlink.SetEswitchMode(devlink.OfPCI(s.pf), devlink.Switchdev))
	}

	t.Cleanup(func() {
		s.Write(t, "")
		if p.Switchdev {
			must.Succeed(t, s.devlink.SetEswitchMode(devlink.OfPCI(s.pf), devlink.Legacy))
		}
		s.Clear(t)
	})

	s.Write(t, p.Script())
}

// Write sets the knobs in the lines, and all others to their defaults.
func (s *Stage) Write(t *testing.T, lines string) {
	t.Helper()
	card.SetAttribute(t, s.pf, "simnic_personality", lines+"\n")
}

// Clear restores the VFs, so that one test does not make the next one fail. It uses the default
// personality, which accepts everything at once.
func (s *Stage) Clear(t *testing.T) {
	t.Helper()
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	must.Succeed(t, err)
	defer handle.Close()

	pf, err := handle.LinkByName(card.Netdev(s.pf))
	must.Succeed(t, err)
	must.Succeed(t, handle.LinkSetUp(pf))

	for i := range s.vfs {
		s.awaitHost(t, i)
		s.freeName(t, handle, i)
	}

	for i := range s.vfs {
		must.Succeed(t, handle.LinkSetVfHardwareAddr(pf, i, make([]byte, 6)))
		must.Succeed(t, handle.LinkSetVfVlanQos(pf, i, 0, 0))
		must.Succeed(t, handle.LinkSetVfRate(pf, i, 0, 0))
		must.Succeed(t, handle.LinkSetVfSpoofchk(pf, i, false))
		must.Succeed(t, handle.LinkSetVfTrust(pf, i, false))
		must.Succeed(t, handle.LinkSetVfState(pf, i, 0))
		s.clearNetdev(t, handle, i)
	}
}

// awaitHost waits until a VF is settled and its netdev is on the host, to which it comes when its
// namespace has ended. awaitHost is called after the test has ended, so it cannot use the test's
// context.
func (s *Stage) awaitHost(t *testing.T, index int) {
	t.Helper()
	s.Settled(t, index)
	for end := time.Now().Add(patience); card.Netdev(s.vfs[index]) == ""; {
		if time.Now().After(end) {
			t.Fatalf("VF %d of %s has no netdev on the host", index, s.pf)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// freeName renames a VF's netdev that has another VF's name.
func (s *Stage) freeName(t *testing.T, handle *netlink.Handle, index int) {
	t.Helper()
	name := card.Netdev(s.vfs[index])
	if name == s.netdevs[index] || !slices.Contains(s.netdevs, name) {
		return
	}

	link, err := handle.LinkByName(name)
	must.Succeed(t, err)
	must.Succeed(t, handle.LinkSetDown(link))
	must.Succeed(t, handle.LinkSetName(link, fmt.Sprintf("played%d", index)))
}

// clearNetdev restores a VF's netdev: down, with its name, MAC and MTU and nothing else.
func (s *Stage) clearNetdev(t *testing.T, handle *netlink.Handle, index int) {
	t.Helper()
	link, err := handle.LinkByName(card.Netdev(s.vfs[index]))
	must.Succeed(t, err)
	must.Succeed(t, handle.LinkSetDown(link))
	must.Succeed(t, handle.LinkSetName(link, s.netdevs[index]))
	must.Succeed(t, handle.LinkSetMTU(link, 1500))
	must.Succeed(t, handle.LinkSetAlias(link, ""))
	must.Succeed(t, handle.SetPromiscOff(link))
	must.Succeed(t, handle.LinkSetAllmulticastOff(link))

	for _, name := range link.Attrs().AltNames {
		must.Succeed(t, handle.LinkDelAltName(link, name))
	}

	if own := s.own[index]; link.Attrs().HardwareAddr.String() != own {
		address, err := net.ParseMAC(own)
		must.Succeed(t, err)
		must.Succeed(t, handle.LinkSetHardwareAddr(link, address))
	}
}

// VF has the settings that are in effect for a VF.
type VF struct {
	MAC       string // administrative MAC; zeros for none
	VLAN, QoS int
	Proto     string // "8100" or "88a8"
	Min, Max  int    // Mbit/s
	SpoofChk  int
	Trust     int
	Link      int    // IFLA_VF_LINK_STATE_* of linux/if_link.h
	Own       string // MAC of the VF's netdev, in any namespace
	Resets    bool   // a reset, or a setting that takes effect later, is pending
}

// VF returns the settings that are in effect for a VF.
func (s *Stage) VF(t *testing.T, index int) VF {
	t.Helper()
	lines := strings.Split(card.Attribute(t, s.pf, "simnic_vfs"), "\n")
	if index >= len(lines) {
		t.Fatalf("%s has no VF %d: %q", s.pf, index, lines)
	}

	var vf VF
	var number, resets int
	_, err := fmt.Sscanf(lines[index],
		"%d mac %s vlan %d qos %d proto %s min %d max %d spoofchk %d trust %d link %d own %s "+
			"resets %d",
		&number, &vf.MAC, &vf.VLAN, &vf.QoS, &vf.Proto, &vf.Min, &vf.Max, &vf.SpoofChk, &vf.Trust,
		&vf.Link, &vf.Own, &resets)

	if err != nil || number != index {
		t.Fatalf("%s of %s: %q: %v", "simnic_vfs", s.pf, lines[index], err)
	}

	vf.Resets = resets != 0
	return vf
}

// Settled returns the settings that are in effect for a VF when no reset is pending.
func (s *Stage) Settled(t *testing.T, index int) VF {
	t.Helper()
	var vf VF
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if vf = s.VF(t, index); !vf.Resets {
			return vf
		}
	}

	t.Fatalf("VF %d of %s resets for more than %s", index, filepath.Base(string(s.pf)), patience)
	return vf
}
