// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// lastSeen is what was seen of a Function, for while a pod has the netdev and RDMA devices, and for
// what is read once.
type lastSeen struct {
	instance instance
	netdev   string
	linkType string // of the netdev
	down     bool   // a PF's netdev had no link
	closed   bool   // it had none because it was set down; downOpen is what was before that
	downOpen bool
	speed    int         // of a PF's link in Mbit/s; 0 until it is known
	ddp      *ddpProfile // a PF's; nil until it is known
	rdma     []string
	pkey     string

	iommuRead  bool
	iommuGroup string
	driver     string // when iommuGroup was read
}

// complete fills in what can change while the Function exists. A PF must be completed before its
// VFs and SFs.
func (s *scanner) complete(f function.Function, device sysfs.Dir, now instance) function.Function {
	m := s.before[f.ID]
	switch {
	case m.instance == now:
	case f.Kind == function.PF:
		// its VFs and SFs keep what they have of it until something else is seen
		m = lastSeen{
			instance: now, netdev: m.netdev, linkType: m.linkType, down: m.down, closed: m.closed,
			downOpen: m.downOpen,
			speed:    m.speed,
		}
	default:
		m = lastSeen{instance: now} // it was another device with the same ID
	}

	f.VDPA = s.vdpas[filepath.Base(string(device))]
	s.readNetdev(&f, device, &m)
	f.DefaultRoute = f.Netdev != "" && (s.routed == nil || s.routed[f.Netdev])
	f.HostUse = s.hostUse(f.Netdev, device)
	if f.Kind == function.PF {
		f.DDPProfile = s.readDDPProfile(f, device, &m)
		f.PFName, f.PFDriver, f.LinkUp, f.LinkType, f.LinkSpeed = m.netdev, f.Driver, !m.down, m.linkType, m.speed
		f.AdminDown = m.closed
	} else {
		pf := s.pfs[f.PF]
		f.PFName, f.PFDriver, f.LinkUp, f.AdminDown, f.DDPProfile = pf.PFName, pf.PFDriver, pf.LinkUp, pf.AdminDown, pf.DDPProfile
		f.LinkType = cmp.Or(m.linkType, pf.LinkType)
	}

	s.readRDMA(&f, device, &m)
	if f.Kind != function.SF {
		s.readIOMMUGroup(&f, device, &m)
	}

	s.lastSeen[f.ID] = m
	return f
}

// readNetdev reads the driver and the netdev. What was seen last of the netdev counts while it is
// away, as in a pod.
func (s *scanner) readNetdev(f *function.Function, device sysfs.Dir, m *lastSeen) {
	var err error
	f.Driver, err = device.Link("driver")
	s.report(device, reasonDriver, err)
	netdevs, names, err := netdevsOf(device, virtioVDPA(f.VDPA))
	s.report(device, reasonNetdev, err)
	f.Netdev, f.NoNetdev = ownNetdev(netdevs, names), netdevs == "" && err == nil
	if f.NoNetdev && f.Driver != "" {
		f.Passthrough, err = device.Passthrough(f.Driver, s.sysfs)
		s.report(device, reasonDriver, err)
	}

	if f.Netdev == "" {
		// a netdev is set down before it moves to another namespace (dev_change_net_namespace in
		// net/core/dev.c)
		if m.closed {
			m.down, m.closed = m.downOpen, false
		}
		return
	}

	dir := netdevs.Dir(f.Netdev)
	if f.Netdev != m.netdev || m.linkType == "" {
		m.netdev, m.linkType = f.Netdev, linkTypes[s.attribute(device, dir, "type", reasonLinkType)]
	}

	if f.Kind == function.PF {
		s.readLink(device, dir, m)
	}
}

// readLink reads whether a PF's netdev has a link. Nothing changes if that cannot be read.
func (s *scanner) readLink(device, netdev sysfs.Dir, m *lastSeen) {
	// the kernel refuses while the netdev is down
	if carrier, err := netdev.Attribute("carrier"); err == nil {
		m.down, m.closed = carrier != "1", false
		m.speed = cmp.Or(readSpeed(netdev), m.speed)
		return
	}

	state := s.attribute(device, netdev, "operstate", reasonCarrier)
	if state == "" {
		return
	}

	if !m.closed {
		m.downOpen = m.down
	}

	m.down, m.closed = state != "up", state != "up"
}

// readSpeed reads the speed of a link in Mbit/s. It is 0 if the driver does not tell it, and while
// there is no link: some drivers then tell SPEED_UNKNOWN, which is -1, and of others the file
// cannot be read (speed_show in net/core/net-sysfs.c).
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

// linkTypes are those of include/uapi/linux/if_arp.h that a Function can have.
var linkTypes = map[string]string{"1": "ether", "32": "infiniband"}

// attribute reads a file, "" if it cannot be read. A missing file is no problem, as the netdev may
// have been removed.
func (s *scanner) attribute(device, of sysfs.Dir, name string, why reason) string {
	text, err := of.Attribute(name)
	if !errors.Is(err, fs.ErrNotExist) {
		s.report(device, why, err)
	}
	return text
}

// readRDMA reads the RDMA devices. Their directory exists, but is empty, while they are in another
// network namespace.
func (s *scanner) readRDMA(f *function.Function, device sysfs.Dir, m *lastSeen) {
	found, exists, err := device.Dir("infiniband").Names()
	s.report(device, reasonRDMA, err)
	f.RDMAMode = "" // an SF has its PF's so far
	if !exists {
		m.rdma, m.pkey = nil, ""
		return
	}

	slices.Sort(found)
	if len(found) > 0 && !slices.Equal(found, m.rdma) {
		m.rdma, m.pkey = found, ""
	}

	if len(found) > 0 && f.LinkType == "infiniband" {
		m.pkey = s.attribute(device, device.Dir("infiniband", found[0], "ports/1/pkeys"), "0",
			reasonRDMA)
	}

	f.RDMA, f.RDMADevices, f.RDMAMode, f.PKey = true, m.rdma, s.rdmaMode(), m.pkey
}

// readRDMAMode reads the mode of the node's RDMA system, "" if that cannot be read. The parameter
// of ib_core shows the variable that RDMA_NLDEV_CMD_SYS_SET changes (drivers/infiniband/core), and
// no socket is needed for it. Linux has it since 5.2, wherever there is an RDMA device.
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

// readIOMMUGroup reads the group once for each driver. Without an IOMMU, vfio makes up a group a
// little after the link to vfio-pci appears, and takes it away with the driver.
func (s *scanner) readIOMMUGroup(f *function.Function, device sysfs.Dir, m *lastSeen) {
	coming := m.iommuGroup == "" && f.HandedBy() == function.VFIO
	if !m.iommuRead || m.driver != f.Driver || coming {
		group, err := device.Link("iommu_group")
		s.report(device, reasonIOMMU, err)
		// real groups have no name
		if name, _ := device.Dir("iommu_group").Attribute("name"); name == quirk.NoIOMMUGroup {
			group = quirk.NoIOMMUPrefix + group
		}
		m.driver, m.iommuGroup, m.iommuRead = f.Driver, group, err == nil
	}

	f.IOMMUGroup = m.iommuGroup
}

// readVDPAs lists the vDPA devices of the node. Of several with one parent it takes the first by
// name.
func (s *scanner) readVDPAs() {
	s.vdpas = map[string]function.VDPA{}
	bus := s.sysfs.Dir(sysfs.VDPADevices)
	entries, err := bus.Sorted()
	s.report(bus, reasonVDPA, err)

	for _, name := range entries {
		parent, vdpa, err := readVDPA(name, bus.Dir(name))
		s.report(bus.Dir(name), reasonVDPA, err)
		if _, taken := s.vdpas[parent]; !taken && err == nil {
			s.vdpas[parent] = vdpa
		}
	}
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

// ddpProfile is the DDP package of a PF that had this netdev. Another package can be loaded only
// when the driver is bound or reloaded, which makes a new netdev.
type ddpProfile struct{ netdev, name string }

// readDDPProfile asks devlink only when the answer may have changed, because the firmware takes a
// while.
func (s *scanner) readDDPProfile(f function.Function, device sysfs.Dir, m *lastSeen) string {
	known := m.ddp
	m.ddp = nil
	if f.Driver != quirk.DDPDriver {
		return ""
	}

	if known == nil || f.Netdev != "" && f.Netdev != known.netdev { // it is "" while it is in a pod
		name, err := s.options.DDPProfile(f.PF)
		if err != nil {
			s.report(device, reasonDDP, err)
			return ""
		}
		known = &ddpProfile{f.Netdev, name}
	}

	m.ddp = known
	return known.name
}

// devlinkDDPProfile reads what "devlink dev info" shows as fw.app.name, "" where a driver has no
// such thing.
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
