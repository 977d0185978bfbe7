package inventory

import (
	"cmp"
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
	netdev     seenNetdev
	down       bool       // a PF's netdev had no link
	ddp        ddpProfile // a PF's
	rdma       []string
	pkey       string
	iommuRead  bool
	iommuGroup string
	driver     string // when iommuGroup was read
}

// seenNetdev is a netdev as it was when it was last on the host.
type seenNetdev struct{ name, linkType string }

// of is the memory of this device, and none of an earlier one with the same ID.
func (m lastSeen) of(now instance) lastSeen {
	if m.instance != now {
		return lastSeen{instance: now}
	}
	return m
}

// complete fills in what can change while the Function exists, and remembers it. A PF must be completed before its VFs
// and SFs.
func (s *scanner) complete(f function.Function, device sysfs.Dir, now instance) function.Function {
	before := s.before[f.ID]
	m := before.of(now)
	if f.Kind == function.PF {
		m.netdev, m.down, m.ddp = before.netdev, before.down, before.ddp // until another netdev is seen
	}
	f.VDPA = s.vdpas[filepath.Base(string(device))]
	f.Driver, f.Netdev = s.readNetdev(device, &m.netdev)
	f.DefaultRoute = f.Netdev != "" && (s.routed == nil || s.routed[f.Netdev])
	if f.Kind == function.PF {
		s.readLink(&f, device, &m)
		m.ddp = s.readDDPProfile(f.PF, ddpKey{now, f.Driver, f.Netdev}, m.ddp)
		f.PFName, f.PFDriver, f.LinkType, f.DDPProfile = m.netdev.name, f.Driver, m.netdev.linkType, m.ddp.name
	} else {
		pf := s.pfs[f.PF]
		f.PFName, f.PFDriver, f.LinkUp, f.DDPProfile = pf.PFName, pf.PFDriver, pf.LinkUp, pf.DDPProfile
		f.LinkType = cmp.Or(m.netdev.linkType, pf.LinkType)
	}
	s.readRDMA(&f, device, &m)
	if f.Kind != function.SF {
		s.readIOMMUGroup(&f, device, &m)
	}
	s.lastSeen[f.ID] = m
	return f
}

// readNetdev reads a device's driver and netdev, either "" if there is none on the host, and brings seen up to date.
func (s *scanner) readNetdev(device sysfs.Dir, seen *seenNetdev) (driver, name string) {
	driver, err := device.Link("driver")
	if err != nil {
		s.report(device, reasonDriver, err)
	}
	name, _, err = netdev(device)
	if err != nil {
		s.report(device, reasonNetdev, err)
	}
	if name != "" && (name != seen.name || seen.linkType == "") {
		*seen = seenNetdev{name, s.linkType(device, name)}
	}
	return driver, name
}

// readLink looks whether a PF's netdev has a link. While the netdev is away, in a pod for instance, what was seen last
// still counts. A link that was never seen counts as up, because only a link that is known to be down is a reason not to
// use a VF. The kernel refuses to read carrier while the netdev is down.
func (s *scanner) readLink(f *function.Function, device sysfs.Dir, m *lastSeen) {
	if f.Netdev != "" {
		dir := s.netdevDir(device, f.Netdev)
		if carrier, err := dir.Attribute("carrier"); err == nil {
			m.down = carrier != "1"
		} else if state, err := dir.Attribute("operstate"); err == nil {
			m.down = state != "up"
		} else if !errors.Is(err, fs.ErrNotExist) {
			s.report(device, reasonCarrier, fmt.Errorf("netdev %s: %w", f.Netdev, err))
		}
	}
	f.LinkUp = !m.down
}

// linkType of a device's netdev is "" if it is neither of those known, or cannot be read.
func (s *scanner) linkType(device sysfs.Dir, netdev string) string {
	number, err := s.netdevDir(device, netdev).Attribute("type")
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the netdev may just have gone
		s.report(device, reasonLinkType, fmt.Errorf("netdev %s: %w", netdev, err))
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
		s.report(device, reasonRDMA, err)
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
		m.pkey, err = device.Dir("infiniband", found[0], "ports/1/pkeys").Attribute("0")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.report(device, reasonRDMA, err)
		}
	}
	f.RDMA, f.RDMADevices, f.PKey = true, m.rdma, m.pkey
}

// readIOMMUGroup reads the group once, as it is as old as the device. Only where there is no IOMMU does it come and go,
// with vfio-pci, a little later than the driver's link.
func (s *scanner) readIOMMUGroup(f *function.Function, device sysfs.Dir, m *lastSeen) {
	coming := m.iommuGroup == "" && f.Driver == "vfio-pci"
	if !m.iommuRead || m.driver != f.Driver || coming {
		group, err := iommuGroup(device)
		if err != nil {
			s.report(device, reasonIOMMU, err)
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
	bus := s.sysfs.Dir(sysfs.VDPADevices)
	entries, err := bus.Sorted()
	if err != nil {
		s.report(bus, reasonVDPA, err)
		return
	}
	for _, name := range entries {
		parent, vdpa, err := readVDPA(name, bus.Dir(name))
		if err != nil {
			s.report(bus.Dir(name), reasonVDPA, err)
			continue
		}
		if _, taken := s.vdpas[parent]; !taken {
			s.vdpas[parent] = vdpa
		}
	}
}

// readVDPA reads a vDPA device, and the name of the device that it is made of.
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
