// SPDX-License-Identifier: Apache-2.0

// Package inventory serves the OPI InventoryService on an xPU: what machine it is, which PCI
// devices it has, and which PFs it gives its host.
package inventory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/bridge/representor"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/cardid"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// Server serves InventoryService. It reads sysfs for each call. A field that sysfs does not have is
// empty.
type Server struct {
	inventory.UnimplementedInventoryServiceServer
	root    string // the directory with /sys and /proc; empty is "/"
	hostPFs []representor.HostPF
	ports   func() ([]devlink.Port, error)
	// card reads which card a PF of this machine belongs to.
	card func(sysRoot string, pf pci.Address) (function.Card, error)
}

// NewServer returns a Server. The host PFs complete what devlink knows of them, or replace it.
func NewServer(hostPFs []representor.HostPF) *Server {
	ports := representor.NewPortLister(devlinkPorts)
	return &Server{hostPFs: hostPFs, ports: ports.List, card: cardid.Read}
}

// GetInventory describes the xPU. There is only one inventory, whatever name the request has.
func (s *Server) GetInventory(
	context.Context, *inventory.GetInventoryRequest,
) (*inventory.Inventory, error) {
	sys := sysfs.Root(filepath.Join("/", s.root, "sys"))
	// Documentation/ABI/testing/sysfs-class-dmi of the kernel
	dmi := func(name string) string { return text(sys.Dir("class/dmi/id"), name) }
	meminfo, _ := os.ReadFile(filepath.Join("/", s.root, "proc/meminfo"))
	var memory int64
	_, _ = fmt.Sscanf(string(meminfo), "MemTotal: %d kB", &memory) // the first line

	inv := &inventory.Inventory{
		Bios: &inventory.BIOSInfo{
			Vendor: dmi("bios_vendor"), Version: dmi("bios_version"), Date: dmi("bios_date"),
		},
		System: &inventory.SystemInfo{
			Family: dmi("product_family"), Name: dmi("product_name"), Vendor: dmi("sys_vendor"),
			SerialNumber: dmi("product_serial"),
			Uuid:         dmi("product_uuid"), Sku: dmi("product_sku"),
			Version: dmi("product_version"),
		},
		Baseboard: &inventory.BaseboardInfo{
			AssetTag: dmi("board_asset_tag"), SerialNumber: dmi("board_serial"),
			Vendor:  dmi("board_vendor"),
			Version: dmi("board_version"), Product: dmi("board_name"),
		},
		Chassis: &inventory.ChassisInfo{
			AssetTag: dmi("chassis_asset_tag"), SerialNumber: dmi("chassis_serial"),
			Vendor:  dmi("chassis_vendor"),
			Version: dmi("chassis_version"), Type: dmi("chassis_type"),
			TypeDescription: chassisTypes[dmi("chassis_type")],
		},
		Processor: processor(sys),
		Memory: &inventory.MemoryInfo{
			TotalPhysicalBytes: physicalBytes(sys), TotalUsableBytes: memory << 10,
		},
		Pci: pciDevices(sys.Dir(sysfs.PCIDevices)),
	}

	deviceTree := sys.Dir("firmware/devicetree/base")
	inv.System.Name = cmp.Or(inv.System.Name, text(deviceTree, "model"))
	inv.System.SerialNumber = cmp.Or(inv.System.SerialNumber, text(deviceTree, "serial-number"))
	hostPFs, err := s.findHostPFs(sys)
	if err != nil {
		return nil, status.Errorf(codes.Internal, "the host's PFs: %v", err)
	}

	for _, pf := range hostPFs {
		inv.Pci = append(inv.Pci,
			&inventory.PCIeDeviceInfo{Subsystem: pf.String(), Class: "0x02", Subclass: "0x00"})
	}

	return inv, nil
}

// devlinkPorts lists the ports of all cards. It has a socket of its own, because the data plane
// must not wait for a card that hangs.
func devlinkPorts() ([]devlink.Port, error) {
	conn, err := devlink.Dial("")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Ports()
}

// findHostPFs returns the PFs that the xPU gives its host, sorted by name: the PFs that have a port
// at an eswitch, and the configured host PFs. It leaves out the configured host PFs that have an
// address at the host, because clients name the Functions of these PFs by their addresses.
func (s *Server) findHostPFs(sys sysfs.Root) ([]opi.HostPF, error) {
	ports, err := s.ports()
	if err != nil && !errors.Is(err, devlink.ErrNoDevlink) {
		return nil, err
	}

	found := map[string]opi.HostPF{}
	for _, port := range ports {
		if port.Flavour != devlink.PCIPF || !port.External {
			continue
		}

		pf := opi.HostPF{Name: representor.PFName(port), MAC: port.Function.MAC}
		if address, err := pci.Parse(port.Device.Name); err == nil {
			card, err := s.card(string(sys), address)
			if err != nil {
				return nil, fmt.Errorf("serial number of the card at %s: %w", address, err)
			}
			pf.Serial = card.Serial
		}

		found[pf.Name] = pf
	}

	for _, p := range s.hostPFs {
		if p.Address != "" {
			delete(found, p.Name)
			continue
		}
		pf := found[p.Name]
		found[p.Name] = opi.HostPF{
			Name: p.Name, MAC: cmp.Or(p.MAC, pf.MAC), Serial: cmp.Or(p.Serial, pf.Serial),
		}
	}

	return slices.SortedFunc(maps.Values(found), func(a, b opi.HostPF) int {
		return cmp.Compare(a.Name, b.Name)
	}), nil
}

// text reads an attribute. It returns "" if the attribute does not exist or cannot be read.
func text(dir sysfs.Dir, name string) string {
	text, _ := dir.Attribute(name)
	return text
}

// chassisTypes are the types of a chassis that an xPU or its host may have, by the number in
// chassis_type (SMBIOS specification, section 7.4.1).
var chassisTypes = map[string]string{
	"1": "Other", "2": "Unknown", "3": "Desktop", "7": "Tower", "17": "Main Server Chassis",
	"18": "Expansion Chassis", "19": "SubChassis", "22": "RAID Chassis", "23": "Rack Mount Chassis",
	"25": "Multi-system chassis", "26": "Compact PCI", "27": "Advanced TCA", "28": "Blade",
	"29": "Blade Enclosure", "33": "IoT Gateway", "34": "Embedded PC",
}

// physicalBytes returns the size of the memory blocks that the kernel has
// (Documentation/admin-guide/mm/memory-hotplug.rst), or 0 if it has none that can be plugged.
func physicalBytes(sys sysfs.Root) int64 {
	memory := sys.Dir("devices/system/memory")
	size, err := strconv.ParseInt(text(memory, "block_size_bytes"), 16, 64)
	if err != nil {
		return 0
	}
	blocks, _ := filepath.Glob(string(memory.Dir("memory[0-9]*")))
	return size * int64(len(blocks))
}

func processor(sys sysfs.Root) *inventory.CPUInfo {
	// The pattern leaves out cpufreq and cpuidle.
	cpus, _ := filepath.Glob(string(sys.Dir("devices/system/cpu/cpu[0-9]*")))
	cores := map[[2]string]bool{}
	for _, cpu := range cpus {
		topology := sysfs.Dir(cpu).Dir("topology")
		if core := text(topology, "core_id"); core != "" {
			cores[[2]string{text(topology, "physical_package_id"), core}] = true
		}
	}

	return &inventory.CPUInfo{TotalCores: int32(len(cores)), TotalThreads: int32(len(cpus))}
}

// pciDevices lists the devices of a bus by address. Ids are hexadecimal as in sysfs, because the
// agent has no database of names.
func pciDevices(bus sysfs.Dir) []*inventory.PCIeDeviceInfo {
	names, _ := bus.Sorted()
	var devices []*inventory.PCIeDeviceInfo
	for _, name := range names {
		device := bus.Dir(name)
		d := &inventory.PCIeDeviceInfo{
			Address: name, Vendor: text(device, "vendor"), Product: text(device, "device"),
			Revision:  text(device, "revision"),
			Subsystem: text(device, "subsystem_device"),
		}

		// class is 0xCCSSPP: base class, subclass, programming interface
		if class := text(device, "class"); len(class) == len("0xccsspp") {
			d.Class, d.Subclass = class[:4], "0x"+class[4:6]
		}

		d.Driver, _ = device.Link("driver")
		devices = append(devices, d)
	}

	return devices
}
