package inventory

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// memory is what was seen of a Function: what still counts while a pod has its netdev and RDMA devices, and what need
// not be read again.
type memory struct {
	incarnation incarnation
	netdev      string // when it was last seen; linkType is its
	linkType    string
	rdma        []string
	pkey        string
	iommuRead   bool
	iommuGroup  string
	driver      string // when iommuGroup was read
}

// of is the memory of this device, and none of an earlier one with the same ID.
func (m memory) of(now incarnation) memory {
	if m.incarnation != now {
		return memory{incarnation: now}
	}
	return m
}

// complete fills in what can change while the Function exists, and remembers it.
func (s *scanner) complete(f function.Function, device string, m memory) function.Function {
	u := s.uplinks[f.PF]
	f.PFName, f.PFDriver, f.LinkUp, f.DDPProfile = u.name, u.driver, u.up, u.ddp.name
	f.VDPA = s.vdpas[filepath.Base(device)]
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
	s.memories[f.ID] = m
	return f
}

func (s *scanner) readDriver(f *function.Function, device string) {
	var err error
	if f.Driver, err = target(device, "driver"); err != nil {
		s.complain(s.entry(device), reasonDriver, err)
	}
}

func (s *scanner) readNetdev(f *function.Function, device string, m *memory) {
	var err error
	if f.Netdev, _, err = s.sysfs.netdev(device); err != nil {
		s.complain(s.entry(device), reasonNetdev, err)
	}
	if f.Netdev != "" && (f.Netdev != m.netdev || m.linkType == "") {
		m.netdev, m.linkType = f.Netdev, s.linkType(device, f.Netdev)
	}
}

// linkType of a device's netdev is "" if it is neither of those known, or cannot be read.
func (s *scanner) linkType(device, netdev string) string {
	number, err := attribute(s.sysfs.netdevDir(device, netdev), "type")
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the netdev may just have gone
		s.complain(s.entry(device), reasonLinkType, fmt.Errorf("netdev %s: %w", netdev, err))
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
func (s *scanner) readRDMA(f *function.Function, device string, m *memory) {
	found, exists, err := list(filepath.Join(device, "infiniband"))
	if err != nil {
		s.complain(s.entry(device), reasonRDMA, err)
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

func (s *scanner) readPKey(device, rdma string) string {
	pkey, err := attribute(filepath.Join(device, "infiniband", rdma, "ports/1/pkeys"), "0")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.complain(s.entry(device), reasonRDMA, err)
	}
	return pkey
}

// readIOMMUGroup reads the group once, as it is as old as the device. Only where there is no IOMMU does it come and go,
// with vfio-pci, a little later than the driver's link.
func (s *scanner) readIOMMUGroup(f *function.Function, device string, m *memory) {
	coming := m.iommuGroup == "" && f.Driver == "vfio-pci"
	if !m.iommuRead || m.driver != f.Driver || coming {
		group, err := iommuGroup(device)
		if err != nil {
			s.complain(s.entry(device), reasonIOMMU, err)
		}
		m.driver, m.iommuGroup, m.iommuRead = f.Driver, group, err == nil
	}
	f.IOMMUGroup = m.iommuGroup
}

func iommuGroup(device string) (string, error) {
	group, err := target(device, "iommu_group")
	if err != nil || group == "" {
		return "", err
	}
	// Real groups have no name; drivers/vfio/group.c gives this one to those that it makes up.
	if name, err := attribute(filepath.Join(device, "iommu_group"), "name"); err == nil && name == "vfio-noiommu" {
		return "noiommu-" + group, nil
	}
	return group, nil
}

// readVDPAs lists the vDPA devices of the node. Where a parent has several, the first by name counts.
func (s *scanner) readVDPAs() {
	s.vdpas = map[string]function.VDPA{}
	entries, err := names(filepath.Join(s.sysfs.root, vdpaDevices))
	if err != nil {
		s.complain(vdpaDevices, reasonVDPA, err)
		return
	}
	slices.Sort(entries)
	for _, name := range entries {
		entry := filepath.Join(vdpaDevices, name)
		dir := filepath.Join(s.sysfs.root, entry)
		link, err := os.Readlink(dir)
		if err != nil {
			s.complain(entry, reasonVDPA, err)
			continue
		}
		parent := filepath.Base(filepath.Dir(link))
		if _, taken := s.vdpas[parent]; taken {
			continue
		}
		vdpa, err := readVDPA(dir)
		if err != nil {
			s.complain(entry, reasonVDPA, err)
			continue
		}
		s.vdpas[parent] = vdpa
	}
}

func readVDPA(dir string) (function.VDPA, error) {
	driver, err := target(dir, "driver")
	if err != nil {
		return function.VDPA{}, err
	}
	vdpa := function.VDPA{Name: filepath.Base(dir), Driver: driver}
	if driver != "vhost_vdpa" {
		return vdpa, nil
	}
	children, err := names(dir)
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
