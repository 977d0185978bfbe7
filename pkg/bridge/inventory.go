package bridge

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"

	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
)

// inventoryServer serves InventoryService. It reads sysfs for each call, and leaves a field empty that sysfs does not have.
type inventoryServer struct {
	inventory.UnimplementedInventoryServiceServer
	root string // where /sys and /proc are; empty is "/"
}

// GetInventory describes the xPU. The request's name is ignored: there is one inventory.
func (s inventoryServer) GetInventory(context.Context, *inventory.GetInventoryRequest) (*inventory.Inventory, error) {
	sys := sysfs.Root(filepath.Join("/", s.root, "sys"))
	// Documentation/ABI/testing/sysfs-class-dmi of the kernel
	dmi := func(name string) string { return text(sys.Dir("class/dmi/id"), name) }
	meminfo, _ := os.ReadFile(filepath.Join("/", s.root, "proc/meminfo"))
	var memory int64
	_, _ = fmt.Sscanf(string(meminfo), "MemTotal: %d kB", &memory) // the first line
	inv := &inventory.Inventory{
		Bios: &inventory.BIOSInfo{Vendor: dmi("bios_vendor"), Version: dmi("bios_version"), Date: dmi("bios_date")},
		System: &inventory.SystemInfo{
			Family: dmi("product_family"), Name: dmi("product_name"), Vendor: dmi("sys_vendor"), SerialNumber: dmi("product_serial"),
			Uuid: dmi("product_uuid"), Sku: dmi("product_sku"), Version: dmi("product_version"),
		},
		Baseboard: &inventory.BaseboardInfo{
			AssetTag: dmi("board_asset_tag"), SerialNumber: dmi("board_serial"), Vendor: dmi("board_vendor"),
			Version: dmi("board_version"), Product: dmi("board_name"),
		},
		Chassis: &inventory.ChassisInfo{
			AssetTag: dmi("chassis_asset_tag"), SerialNumber: dmi("chassis_serial"), Vendor: dmi("chassis_vendor"),
			Version: dmi("chassis_version"), Type: dmi("chassis_type"),
		},
		Processor: processor(sys),
		Memory:    &inventory.MemoryInfo{TotalUsableBytes: memory << 10},
		Pci:       pciDevices(sys.Dir(sysfs.PCIDevices)),
	}
	deviceTree := sys.Dir("firmware/devicetree/base")
	inv.System.Name = cmp.Or(inv.System.Name, text(deviceTree, "model"))
	inv.System.SerialNumber = cmp.Or(inv.System.SerialNumber, text(deviceTree, "serial-number"))
	return inv, nil
}

// text reads an attribute, "" if it is not there or cannot be read.
func text(dir sysfs.Dir, name string) string {
	text, _ := dir.Attribute(name)
	return text
}

func processor(sys sysfs.Root) *inventory.CPUInfo {
	cpus, _ := filepath.Glob(string(sys.Dir("devices/system/cpu/cpu[0-9]*"))) // beside cpufreq and cpuidle
	cores := map[[2]string]bool{}
	for _, cpu := range cpus {
		topology := sysfs.Dir(cpu).Dir("topology")
		if core := text(topology, "core_id"); core != "" {
			cores[[2]string{text(topology, "physical_package_id"), core}] = true
		}
	}
	return &inventory.CPUInfo{TotalCores: int32(len(cores)), TotalThreads: int32(len(cpus))}
}

// pciDevices lists the devices of a bus by address. Ids are hexadecimal, as in sysfs; the agent has no database of names.
func pciDevices(bus sysfs.Dir) []*inventory.PCIeDeviceInfo {
	names, _ := bus.Sorted()
	var devices []*inventory.PCIeDeviceInfo
	for _, name := range names {
		device := bus.Dir(name)
		d := &inventory.PCIeDeviceInfo{
			Address: name, Vendor: text(device, "vendor"), Product: text(device, "device"), Revision: text(device, "revision"),
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
