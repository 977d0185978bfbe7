package inventory

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/quirk"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// lastSeen is what was seen of a Function: what still counts while a pod has its netdev and RDMA devices, and what need
// not be read again.
type lastSeen struct {
	instance   instance
	netdev     string // when it was last seen; linkType is its
	linkType   string
	rdma       []string
	pkey       string
	iommuRead  bool
	iommuGroup string
	driver     string // when iommuGroup was read
}

// of is the memory of this device, and none of an earlier one with the same ID.
func (m lastSeen) of(now instance) lastSeen {
	if m.instance != now {
		return lastSeen{instance: now}
	}
	return m
}

// complete fills in what can change while the Function exists, and remembers it.
func (s *scanner) complete(f function.Function, device sysfs.Dir, m lastSeen) function.Function {
	u := s.uplinks[f.PF]
	f.PFName, f.PFDriver, f.LinkUp, f.DDPProfile = u.name, u.driver, u.up, u.ddp.name
	f.VDPA = s.vdpas[filepath.Base(string(device))]
	if f.Kind == function.PF {
		f.Driver, f.Netdev, f.LinkType, f.NumVFs = u.driver, u.netdev, u.linkType, u.numVFs
	} else {
		s.readDriver(&f, device)
		s.readNetdev(&f, device, &m)
		f.LinkType = m.linkType
		if f.LinkType == "" {
			f.LinkType = u.linkType
		}
	}
	f.DefaultRoute = f.Netdev != "" && (s.routed == nil || s.routed[f.Netdev])
	s.readRDMA(&f, device, &m)
	if f.Kind != function.SF {
		s.readIOMMUGroup(&f, device, &m)
	}
	s.lastSeen[f.ID] = m
	return f
}

func (s *scanner) readDriver(f *function.Function, device sysfs.Dir) {
	var err error
	if f.Driver, err = device.Link("driver"); err != nil {
		s.report(s.entry(device), reasonDriver, err)
	}
}

func (s *scanner) readNetdev(f *function.Function, device sysfs.Dir, m *lastSeen) {
	var err error
	if f.Netdev, _, err = netdev(device); err != nil {
		s.report(s.entry(device), reasonNetdev, err)
	}
	if f.Netdev != "" && (f.Netdev != m.netdev || m.linkType == "") {
		m.netdev, m.linkType = f.Netdev, s.linkType(device, f.Netdev)
	}
}

// linkType of a device's netdev is "" if it is neither of those known, or cannot be read.
func (s *scanner) linkType(device sysfs.Dir, netdev string) string {
	number, err := s.netdevDir(device, netdev).Attribute("type")
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the netdev may just have gone
		s.report(s.entry(device), reasonLinkType, fmt.Errorf("netdev %s: %w", netdev, err))
	}
	switch number { // include/uapi/linux/if_arp.h
	case "1":
		return "ether"
	case "32":
		return "infiniband"
	}
	return ""
}

// readRDMA looks at the RDMA devices. The directory that the kernel keeps them in stays, and looks empty, while they
// are in another network namespace.
func (s *scanner) readRDMA(f *function.Function, device sysfs.Dir, m *lastSeen) {
	found, exists, err := device.Dir("infiniband").Names()
	if err != nil {
		s.report(s.entry(device), reasonRDMA, err)
	}
	if !exists {
		m.rdma, m.pkey = nil, ""
		return
	}
	slices.Sort(found)
	if len(found) > 0 && !slices.Equal(found, m.rdma) {
		m.rdma, m.pkey = found, ""
	}
	if len(found) > 0 && f.LinkType == "infiniband" {
		m.pkey = s.readPKey(device, found[0])
	}
	f.RDMA, f.RDMADevices, f.PKey = true, m.rdma, m.pkey
}

func (s *scanner) readPKey(device sysfs.Dir, rdma string) string {
	pkey, err := device.Dir("infiniband", rdma, "ports/1/pkeys").Attribute("0")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.report(s.entry(device), reasonRDMA, err)
	}
	return pkey
}

// readIOMMUGroup reads the group once, as it is as old as the device. Only where there is no IOMMU does it come and go,
// with vfio-pci, a little later than the driver's link.
func (s *scanner) readIOMMUGroup(f *function.Function, device sysfs.Dir, m *lastSeen) {
	coming := m.iommuGroup == "" && f.Driver == "vfio-pci"
	if !m.iommuRead || m.driver != f.Driver || coming {
		group, err := iommuGroup(device)
		if err != nil {
			s.report(s.entry(device), reasonIOMMU, err)
		}
		m.driver, m.iommuGroup, m.iommuRead = f.Driver, group, err == nil
	}
	f.IOMMUGroup = m.iommuGroup
}

func iommuGroup(device sysfs.Dir) (string, error) {
	group, err := device.Link("iommu_group")
	if err != nil || group == "" {
		return "", err
	}
	// Real groups have no name.
	if name, err := device.Dir("iommu_group").Attribute("name"); err == nil && name == quirk.NoIOMMUGroup {
		return quirk.NoIOMMUPrefix + group, nil
	}
	return group, nil
}

// readVDPAs lists the vDPA devices of the node. Where a parent has several, the first by name counts.
func (s *scanner) readVDPAs() {
	s.vdpas = map[string]function.VDPA{}
	entries, err := s.sysfs.Dir(sysfs.VDPADevices).Sorted()
	if err != nil {
		s.report(sysfs.VDPADevices, reasonVDPA, err)
		return
	}
	for _, name := range entries {
		entry := filepath.Join(sysfs.VDPADevices, name)
		dir := s.sysfs.Dir(entry)
		link, err := dir.Target()
		if err != nil {
			s.report(entry, reasonVDPA, err)
			continue
		}
		parent := filepath.Base(filepath.Dir(link))
		if _, taken := s.vdpas[parent]; taken {
			continue
		}
		vdpa, err := readVDPA(name, dir)
		if err != nil {
			s.report(entry, reasonVDPA, err)
			continue
		}
		s.vdpas[parent] = vdpa
	}
}

func readVDPA(name string, dir sysfs.Dir) (function.VDPA, error) {
	driver, err := dir.Link("driver")
	if err != nil {
		return function.VDPA{}, err
	}
	vdpa := function.VDPA{Name: name, Driver: driver}
	if driver != "vhost_vdpa" {
		return vdpa, nil
	}
	children, _, err := dir.Names()
	if err != nil {
		return function.VDPA{}, err
	}
	for _, child := range children {
		if strings.HasPrefix(child, "vhost-vdpa-") {
			vdpa.CharDevice = child
		}
	}
	return vdpa, nil
}
