// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// lastSeen is what was last seen of a Function. It is used while a pod has the netdev and RDMA
// devices, and for properties that are read once.
type lastSeen struct {
	instance instance
	netdev   string
	altNames []string // of a PF's netdev; nil until they are known
	linkType string   // of the netdev
	// down says that a PF's netdev had no link.
	down bool
	// adminDown says that it had no link because it was set down. downBefore is the value of down
	// before that.
	adminDown  bool
	downBefore bool
	// speed is the speed of a PF's link in Mbit/s; 0 until it is known.
	speed int
	// switchID identifies a PF's eswitch.
	switchID string
	// ddpNetdev is the netdev that a PF had when its DDP package was last asked for.
	ddpNetdev string
	rdma      []string
	pkey      string

	// bound is the driver of the Function, and passthrough what that driver is.
	bound       string
	passthrough function.Passthrough
	// netdevRead says that it could be read whether there is a netdev. onHost and noNetdev are the
	// result.
	netdevRead bool
	onHost     string
	noNetdev   bool

	iommuRead  bool
	iommuGroup string
	driver     string // when iommuGroup was read
}

// complete sets the properties that can change while the Function exists. A PF must be completed
// before its VFs and SFs.
func (s *scanner) complete(f function.Function, device sysfs.Dir, now instance) function.Function {
	m := s.previous[f.ID]
	switch {
	case m.instance == now:
	case f.Kind == function.PF:
		// The VFs and SFs keep the properties of the PF until others are seen.
		m = lastSeen{
			instance: now, netdev: m.netdev, altNames: m.altNames, linkType: m.linkType, speed: m.speed,
			switchID: m.switchID,
			down:     m.down, adminDown: m.adminDown, downBefore: m.downBefore,
		}
	default:
		m = lastSeen{instance: now} // it was another device with the same ID
	}

	f.VDPA = s.vdpas[filepath.Base(string(device))]
	s.readNetdev(&f, device, &m)
	f.DefaultRoute = f.Netdev != "" && (s.routed == nil || s.routed[f.Netdev])
	f.HostUse = s.hostUse(f.Netdev, device)
	if !m.netdevRead {
		f.DefaultRoute, f.HostUse = true, "may be used by the host: its netdevs cannot be read"
	}
	if f.Kind == function.PF {
		f.DDPProfile = s.readDDPProfile(f, device, &m)
		m.altNames = s.altNames(f.Netdev, device, m)
		f.PFName, f.PFAltNames, f.PFDriver = m.netdev, m.altNames, f.Driver
		f.LinkType, f.LinkSpeed, f.SwitchID = m.linkType, m.speed, m.switchID
		f.LinkUp, f.AdminDown = !m.down, m.adminDown
	} else {
		pf := s.pfs[f.PF]
		f.PFName, f.PFAltNames = pf.PFName, pf.PFAltNames
		f.PFDriver, f.DDPProfile = pf.PFDriver, pf.DDPProfile
		f.LinkUp, f.AdminDown = pf.LinkUp, pf.AdminDown
		f.LinkSpeed, f.SwitchID = pf.LinkSpeed, pf.SwitchID
		f.DataDirectRoots, f.DataDirectAwaited = pf.DataDirectRoots, pf.DataDirectAwaited
		f.LinkType = cmp.Or(m.linkType, pf.LinkType)
	}

	s.readRDMA(&f, device, &m)
	if f.Kind != function.SF {
		s.readIOMMUGroup(&f, device, &m)
	}

	s.lastSeen[f.ID] = m
	return f
}

// readNetdev reads the driver and the netdev. What cannot be read is as it was last seen. While the
// netdev is not on the host, for example in a pod, its last seen properties count.
func (s *scanner) readNetdev(f *function.Function, device sysfs.Dir, m *lastSeen) {
	driver, err := device.Link("driver")
	s.report(device, reasonDriver, err)
	if err == nil && driver != m.bound {
		m.bound, m.passthrough = driver, ""
	}

	netdevs, names, err := netdevsOf(device, virtioVDPA(f.VDPA))
	s.report(device, reasonNetdev, err)
	if err == nil {
		m.netdevRead, m.onHost, m.noNetdev = true, ownNetdev(netdevs, names), netdevs == ""
		s.readPassthrough(device, m)
	}

	f.Driver, f.Netdev, f.NoNetdev = m.bound, m.onHost, m.noNetdev
	f.Passthrough = m.passthrough
	if err != nil {
		return
	}

	if f.Netdev == "" {
		// The netdev is set down before it moves to another namespace (dev_change_net_namespace in
		// net/core/dev.c), which does not count.
		if m.adminDown {
			m.down, m.adminDown = m.downBefore, false
		}
		return
	}

	dir := netdevs.Dir(f.Netdev)
	if f.Netdev != m.netdev || m.linkType == "" {
		m.netdev, m.linkType = f.Netdev, linkTypes[s.attribute(device, dir, "type", reasonLinkType)]
	}

	if f.Kind == function.PF {
		s.readLink(device, dir, m)
		s.readSwitchID(device, dir, m)
	}
}

// readPassthrough reads how the driver passes the device to a program, if it makes no netdev.
func (s *scanner) readPassthrough(device sysfs.Dir, m *lastSeen) {
	if !m.noNetdev || m.bound == "" {
		m.passthrough = ""
		return
	}

	how, err := device.Passthrough(m.bound, s.sysfs)
	if err != nil {
		s.report(device, reasonDriver, err)
		return
	}
	m.passthrough = how
}

// readLink reads whether a PF's netdev has a link. If this cannot be read, nothing changes.
func (s *scanner) readLink(device, netdev sysfs.Dir, m *lastSeen) {
	// the kernel returns an error while the netdev is down
	if carrier, err := netdev.Attribute("carrier"); err == nil {
		m.down, m.adminDown = carrier != "1", false
		m.speed = cmp.Or(readSpeed(netdev), m.speed)
		return
	}

	state := s.attribute(device, netdev, "operstate", reasonCarrier)
	if state == "" {
		return
	}

	if !m.adminDown {
		m.downBefore = m.down
	}

	m.down, m.adminDown = state != "up", state != "up"
}

// readSpeed reads the speed of a link in Mbit/s. It is 0 if the driver does not report it, and
// while there is no link: some drivers then report SPEED_UNKNOWN, which is -1, and the files of
// others cannot be read (speed_show in net/core/net-sysfs.c).
func readSpeed(netdev sysfs.Dir) int {
	text, err := netdev.Attribute("speed")
	if err != nil {
		return 0
	}

	speed, err := strconv.Atoi(text)
	if err != nil || speed < 0 {
		return 0
	}
	return speed
}

// readSwitchID reads the identifier of a PF's eswitch. It stays the last one if it cannot be read.
// The kernel answers EOPNOTSUPP if there is no eswitch, as in eswitch mode legacy with most drivers
// (phys_switch_id_show in net/core/net-sysfs.c).
func (s *scanner) readSwitchID(device, netdev sysfs.Dir, m *lastSeen) {
	id, err := netdev.Attribute("phys_switch_id")
	switch _, notHex := hex.DecodeString(id); {
	case errors.Is(err, unix.EOPNOTSUPP):
		m.switchID = ""
	case errors.Is(err, fs.ErrNotExist): // the netdev is just being removed
	case err != nil:
		s.report(device, reasonSwitchID, err)
	case notHex != nil:
		s.report(device, reasonSwitchID, fmt.Errorf("phys_switch_id %q: must be hex", id))
	default:
		m.switchID = id
	}
}

// linkTypes has the types of include/uapi/linux/if_arp.h that a Function can have.
var linkTypes = map[string]string{"1": function.Ethernet, "32": function.InfiniBand}

// attribute reads a file. It returns "" if the file cannot be read, and reports a problem unless
// the file is missing, because the netdev may have been removed.
func (s *scanner) attribute(device, of sysfs.Dir, name string, why reason) string {
	text, err := of.Attribute(name)
	if !errors.Is(err, fs.ErrNotExist) {
		s.report(device, why, err)
	}
	return text
}

// readRDMA reads the RDMA devices. Their directory exists, but is empty, while they are in another
// network namespace. If it cannot be read, the devices that were last seen are kept for later.
func (s *scanner) readRDMA(f *function.Function, device sysfs.Dir, m *lastSeen) {
	found, exists, err := device.Dir("infiniband").Names()
	s.report(device, reasonRDMA, err)
	f.RDMAUnknown = err != nil
	f.RDMAMode = "" // until here, an SF has the mode of its PF
	switch {
	case err != nil:
		return
	case !exists:
		m.rdma, m.pkey = nil, ""
		return
	}

	slices.Sort(found)
	if len(found) > 0 && !slices.Equal(found, m.rdma) {
		m.rdma, m.pkey = found, ""
	}

	if len(found) > 0 && f.LinkType == function.InfiniBand {
		m.pkey = s.attribute(device, device.Dir("infiniband", found[0], "ports/1/pkeys"), "0",
			reasonRDMA)
	}

	f.RDMA, f.RDMADevices, f.RDMAMode, f.PKey = true, m.rdma, s.rdmaMode(), m.pkey
}

// readRDMAMode reads the mode of the node's RDMA system. It returns "" if the mode cannot be read.
// The parameter of ib_core shows the variable that RDMA_NLDEV_CMD_SYS_SET changes
// (drivers/infiniband/core), and needs no socket. Linux has it since 5.2, on every node with an
// RDMA device.
func (s *scanner) readRDMAMode() function.RDMAMode {
	shared, err := s.sysfs.Dir("module/ib_core/parameters").Attribute("netns_mode")
	switch {
	case err != nil:
		err = fmt.Errorf("mode of the RDMA system: %w", err)
	case shared == "Y":
		return function.RDMAShared
	case shared == "N":
		return function.RDMAExclusive
	default:
		err = fmt.Errorf("mode of the RDMA system: netns_mode of ib_core: %q: must be Y or N",
			shared)
	}

	s.report("", reasonRDMA, err)
	return ""
}

// readIOMMUGroup reads the group once for each driver. Without an IOMMU, vfio creates a group a
// little after the link to vfio-pci appears, and removes it with the driver.
func (s *scanner) readIOMMUGroup(f *function.Function, device sysfs.Dir, m *lastSeen) {
	coming := m.iommuGroup == "" && f.HandedBy() == function.VFIO
	if !m.iommuRead || m.driver != f.Driver || coming {
		group, err := iommuGroup(device)
		s.report(device, reasonIOMMU, err)
		m.driver, m.iommuGroup, m.iommuRead = f.Driver, group, err == nil
	}

	f.IOMMUGroup = m.iommuGroup
}

// iommuGroup reads the IOMMU group of a device. A group that vfio has made without an IOMMU gets a
// prefix.
func iommuGroup(device sysfs.Dir) (string, error) {
	group, err := device.Link("iommu_group")
	if group == "" || err != nil {
		return "", err
	}

	name, err := device.Dir("iommu_group").Attribute("name")
	switch {
	case errors.Is(err, fs.ErrNotExist): // real groups have no name
		return group, nil
	case err != nil:
		return "", err
	case name == quirk.NoIOMMUGroup:
		return quirk.NoIOMMUPrefix + group, nil
	}

	return group, nil
}

// readVDPAs lists the vDPA devices of the node. If several have the same parent, the first one by
// name counts. Those that cannot be read stay as they were last seen.
func (s *scanner) readVDPAs() {
	bus := s.sysfs.Dir(sysfs.VDPADevices)
	entries, err := bus.Sorted()
	s.report(bus, reasonVDPA, err)
	if err != nil {
		return
	}

	before := s.vdpas
	s.vdpas = map[string]function.VDPA{}
	for _, name := range entries {
		parent, vdpa, err := readVDPA(name, bus.Dir(name))
		s.report(bus.Dir(name), reasonVDPA, err)
		if err != nil {
			parent, vdpa = vdpaNamed(name, before)
		}
		if _, taken := s.vdpas[parent]; !taken && vdpa.Name != "" {
			s.vdpas[parent] = vdpa
		}
	}
}

// vdpaNamed returns the vDPA device with a name, and the name of its parent device. Both are empty
// if it is not listed.
func vdpaNamed(
	name string, listed map[string]function.VDPA,
) (parent string, vdpa function.VDPA) {
	for parent, vdpa := range listed {
		if vdpa.Name == name {
			return parent, vdpa
		}
	}
	return "", function.VDPA{}
}

// readVDPA reads a vDPA device, and the name of its parent device.
func readVDPA(name string, dir sysfs.Dir) (parent string, vdpa function.VDPA, err error) {
	link, err := dir.Target()
	if err != nil {
		return "", vdpa, err
	}

	parent, vdpa.Name = filepath.Base(filepath.Dir(link)), name
	vdpa.Driver, err = dir.Link("driver")
	if err != nil || vdpa.Driver != "vhost_vdpa" {
		return parent, vdpa, err
	}

	children, _, err := dir.Names()
	for _, child := range children {
		if strings.HasPrefix(child, "vhost-vdpa-") {
			vdpa.CharDevice = child
		}
	}

	return parent, vdpa, err
}

// ddpTime is how long a scan waits for the first answer about the DDP package of a PF, so that the
// PF's Functions are not without it for a moment. Firmware usually answers within some 100 ms.
const ddpTime = 2 * time.Second

// readDDPProfile asks devlink only if the answer may have changed, because the firmware is slow.
// Another package can be loaded only when the driver is bound or reloaded, which makes a new
// netdev.
func (s *scanner) readDDPProfile(f function.Function, device sysfs.Dir, m *lastSeen) string {
	if f.Driver != quirk.DDPDriver {
		m.ddpNetdev = ""
		s.ddp.forget(func(address pci.Address) bool { return address == f.PF })
		return ""
	}

	m.ddpNetdev = cmp.Or(f.Netdev, m.ddpNetdev) // the netdev is "" while it is in a pod
	name, err := s.ddp.of(f.PF, question{m.instance, m.ddpNetdev}, func() (string, error) {
		return s.options.DDPProfile(f.PF)
	})
	s.report(device, reasonDDP, err)
	return name
}

// devlinkDDPProfile returns what "devlink dev info" shows as fw.app.name, or "" if the driver does
// not support it.
func devlinkDDPProfile(netNS string, pf pci.Address) (string, error) {
	conn, err := devlink.Dial(netNS)
	if err != nil {
		return "", err
	}
	defer conn.Close()

	info, err := conn.Info(devlink.OfPCI(pf))
	if errors.Is(err, unix.EOPNOTSUPP) {
		return "", nil
	}

	return info.Running[quirk.DDPVersion], err
}
