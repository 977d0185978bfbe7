package bridge

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
)

// inventoryServer serves InventoryService from sysfs, all of it anew for each call. What the machine does not tell is
// left empty: many xPUs have neither DMI nor a serial number in the device tree.
type inventoryServer struct {
	inventory.UnimplementedInventoryServiceServer
	root string // where /sys and /proc are; empty is "/"
}

// GetInventory describes the xPU. The request's name is ignored: there is one inventory.
func (s inventoryServer) GetInventory(context.Context, *inventory.GetInventoryRequest) (*inventory.Inventory, error) {
	// Documentation/ABI/testing/sysfs-class-dmi of the kernel
	dmi := func(name string) string { return s.text("sys/class/dmi/id", name) }
	inv := &inventory.Inventory{
		Bios: &inventory.BIOSInfo{Vendor: dmi("bios_vendor"), Version: dmi("bios_version"), Date: dmi("bios_date")},
		System: &inventory.SystemInfo{
			Family: dmi("product_family"), Name: dmi("product_name"), Vendor: dmi("sys_vendor"), SerialNumber: dmi("product_serial"),
			Uuid: dmi("product_uuid"), Sku: dmi("product_sku"), Version: dmi("product_version"),
		},
		Baseboard: &inventory.BaseboardInfo{
			AssetTag: dmi("board_asset_tag"), SerialNumber: dmi("board_serial"), Vendor: dmi("board_vendor"), Version: dmi("board_version"), Product: dmi("board_name"),
		},
		Chassis: &inventory.ChassisInfo{
			AssetTag: dmi("chassis_asset_tag"), SerialNumber: dmi("chassis_serial"), Type: dmi("chassis_type"), Vendor: dmi("chassis_vendor"), Version: dmi("chassis_version"),
		},
		Processor: s.processor(),
		Memory:    &inventory.MemoryInfo{TotalUsableBytes: s.memory()},
		Pci:       s.pci(),
	}
	if inv.System.Name == "" {
		inv.System.Name = s.text("sys/firmware/devicetree/base", "model")
	}
	if inv.System.SerialNumber == "" {
		inv.System.SerialNumber = s.text("sys/firmware/devicetree/base", "serial-number")
	}
	return inv, nil
}

// text reads a small file of one value, empty if it cannot. Device tree strings end with a NUL.
func (s inventoryServer) text(dir, name string) string {
	data, err := os.ReadFile(filepath.Join("/", s.root, dir, name))
	if err != nil {
		return ""
	}
	return strings.ToValidUTF8(strings.Trim(string(data), " \t\r\n\x00"), "")
}

func (s inventoryServer) processor() *inventory.CPUInfo {
	const dir = "sys/devices/system/cpu"
	cores := map[[2]string]bool{}
	cpus, _ := filepath.Glob(filepath.Join("/", s.root, dir, "cpu[0-9]*"))
	for _, cpu := range cpus {
		topology := filepath.Join(dir, filepath.Base(cpu), "topology")
		if core := s.text(topology, "core_id"); core != "" {
			cores[[2]string{s.text(topology, "physical_package_id"), core}] = true
		}
	}
	return &inventory.CPUInfo{TotalCores: int32(len(cores)), TotalThreads: int32(len(cpus))}
}

func (s inventoryServer) memory() int64 {
	f, err := os.Open(filepath.Join("/", s.root, "proc/meminfo"))
	if err != nil {
		return 0
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 1 && fields[0] == "MemTotal:" {
			kib, _ := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

// pci lists the devices by address. Ids are hexadecimal, as in sysfs: names would need a database.
func (s inventoryServer) pci() []*inventory.PCIeDeviceInfo {
	const dir = "sys/bus/pci/devices"
	entries, _ := os.ReadDir(filepath.Join("/", s.root, dir))
	var devices []*inventory.PCIeDeviceInfo
	for _, entry := range entries {
		of := filepath.Join(dir, entry.Name())
		d := &inventory.PCIeDeviceInfo{
			Address: entry.Name(), Vendor: s.text(of, "vendor"), Product: s.text(of, "device"), Revision: s.text(of, "revision"),
			Subsystem: s.text(of, "subsystem_device"),
		}
		// class is 0xCCSSPP: base class, subclass, programming interface
		if class := s.text(of, "class"); len(class) == len("0xccsspp") {
			d.Class, d.Subclass = class[:4], "0x"+class[4:6]
		}
		if driver, err := os.Readlink(filepath.Join("/", s.root, of, "driver")); err == nil {
			d.Driver = filepath.Base(driver)
		}
		devices = append(devices, d)
	}
	return devices
}
