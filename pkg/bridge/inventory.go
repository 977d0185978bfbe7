// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/devlink"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/sysfs"
	"github.com/opiproject/xpu-device-plugin/pkg/opi"
)

// inventoryServer serves InventoryService. It reads sysfs for each call, and leaves a field empty
// that sysfs does not have.
type inventoryServer struct {
	inventory.UnimplementedInventoryServiceServer
	root    string   // where /sys and /proc are; empty is "/"
	hostPFs []HostPF // that were told
	// ports lists the devlink ports, and serial says which card a PF of this machine belongs to.
	ports  func() ([]devlink.Port, error)
	serial func(sysRoot string, pf pci.Address) (function.Card, error)
}

// GetInventory describes the xPU. The request's name is ignored: there is one inventory.
func (s inventoryServer) GetInventory(
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
		},
		Processor: processor(sys),
		Memory:    &inventory.MemoryInfo{TotalUsableBytes: memory << 10},
		Pci:       pciDevices(sys.Dir(sysfs.PCIDevices)),
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

// devlinkPorts lists the ports of all cards. Its socket is its own, as the data plane must not wait
// for a card that hangs.
func devlinkPorts() ([]devlink.Port, error) {
	conn, err := devlink.Dial("")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Ports()
}

// findHostPFs returns the PFs that the xPU gives its host, sorted by name: those that the eswitches
// have ports of, with what was told of them, and others that were told. It leaves out those whose
// address at the host was told: clients name their Functions by that.
func (s inventoryServer) findHostPFs(sys sysfs.Root) ([]opi.HostPF, error) {
	ports, err := s.ports()
	if err != nil && !errors.Is(err, devlink.ErrNoDevlink) {
		return nil, err
	}

	found := map[string]opi.HostPF{}
	for _, port := range ports {
		if port.Flavour != devlink.PCIPF || !port.External {
			continue
		}

		pf := opi.HostPF{Name: nameOf(port).pf, MAC: port.Function.MAC}
		if address, err := pci.Parse(port.Device.Name); err == nil {
			card, err := s.serial(string(sys), address)
			if err != nil {
				return nil, fmt.Errorf("serial number of the card at %s: %w", address, err)
			}
			pf.Serial = card.Serial
		}

		found[pf.Name] = pf
	}

	for _, told := range s.hostPFs {
		if told.Address != "" {
			delete(found, told.name)
			continue
		}
		pf := found[told.name]
		found[told.name] = opi.HostPF{
			Name: told.name, MAC: cmp.Or(told.MAC, pf.MAC), Serial: cmp.Or(told.Serial, pf.Serial),
		}
	}

	return slices.SortedFunc(maps.Values(found), func(a, b opi.HostPF) int {
		return cmp.Compare(a.Name, b.Name)
	}), nil
}

// text reads an attribute, "" if it is not there or cannot be read.
func text(dir sysfs.Dir, name string) string {
	text, _ := dir.Attribute(name)
	return text
}

func processor(sys sysfs.Root) *inventory.CPUInfo {
	// beside cpufreq and cpuidle
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

// pciDevices lists the devices of a bus by address. Ids are hexadecimal, as in sysfs; the agent has
// no database of names.
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
