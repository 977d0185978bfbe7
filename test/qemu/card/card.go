// SPDX-License-Identifier: Apache-2.0

// Package card reads and changes the PCI devices of a guest by sysfs, for tests. It does not use
// the product's code, so that tests can compare the results.
package card

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// Devices is the directory of PCI devices.
const Devices = "/sys/bus/pci/devices"

// InGuest skips a test unless it runs in the named guest of test/qemu, whose devices tests may
// change.
func InGuest(t *testing.T, guest string) {
	t.Helper()
	if os.Getenv(plan.GuestVariable) != guest {
		t.Skipf("changes the machine's PCI devices: make test-qemu runs it in guest %s", guest)
	}
}

// PFs returns the guest's PFs, sorted.
func PFs(t *testing.T) []pci.Address {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(Devices, "*/sriov_numvfs"))
	if err != nil || len(found) == 0 {
		t.Fatalf("no PF: %v", err)
	}

	var pfs []pci.Address
	for _, file := range found {
		pfs = append(pfs, pci.Address(filepath.Base(filepath.Dir(file))))
	}

	slices.Sort(pfs)
	return pfs
}

// VF returns the address of a VF by the PF's SR-IOV capability. The VF's routing ID is the PF's
// routing ID plus an offset, plus a stride for each VF before it (PCI Express 6.0, section
// 9.2.1.2).
func VF(t *testing.T, pf pci.Address, index int) pci.Address {
	t.Helper()
	var domain, bus, device, function int
	if _, err := fmt.Sscanf(string(pf), "%04x:%02x:%02x.%d", &domain, &bus, &device,
		&function); err != nil {
		t.Fatal(err)
	}

	id := bus<<8 | device<<3 | function
	id += Number(t, pf, "sriov_offset") + index*Number(t, pf, "sriov_stride")
	return pci.Address(fmt.Sprintf("%04x:%02x:%02x.%d", domain, id>>8, id>>3&0x1f, id&7))
}

// Attribute returns the content of a file of a device.
func Attribute(t *testing.T, device pci.Address, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(Devices, string(device), name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(content))
}

// Number returns the content of a file of a device, which must be a number.
func Number(t *testing.T, device pci.Address, name string) int {
	t.Helper()
	n, err := strconv.Atoi(Attribute(t, device, name))
	if err != nil {
		t.Fatalf("%s of %s: %v", name, device, err)
	}
	return n
}

// SetAttribute writes value to a file of a device.
func SetAttribute(t *testing.T, device pci.Address, name, value string) {
	t.Helper()
	Set(t, filepath.Join(Devices, string(device), name), value)
}

// Set writes a file of sysfs.
func Set(t *testing.T, file, value string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		t.Fatalf("write %q: %v", value, err)
	}
}

// Link returns the last part of the target of a device's symbolic link, or "" if it is missing.
func Link(device pci.Address, name string) string {
	target, err := os.Readlink(filepath.Join(Devices, string(device), name))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// Netdev returns the name of the device's netdev on the host, or "" if it has none.
func Netdev(device pci.Address) string {
	entries, err := os.ReadDir(filepath.Join(Devices, string(device), "net"))
	if err != nil || len(entries) == 0 {
		return ""
	}
	return entries[0].Name()
}
