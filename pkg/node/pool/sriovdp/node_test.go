// SPDX-License-Identifier: Apache-2.0

package sriovdp

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/hostuse"
	"github.com/opiproject/xpu-device-plugin/pkg/node/inventory"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// device is a PCI device of the node, or a subfunction.
type device struct {
	address string
	class   string // "02" if empty
	ids     string // "8086:1592"
	driver  string
	netdev  string
	typ     string // link type of the netdev, "1" if empty
	rdma    string // RDMA device; "-" for one in a pod
	pkey    string
	vdpa    string // driver of a vDPA device
	acpi    string
	vfs     []device
	sfs     []device // address is the sfnum
}

// node is a node with a card of every kind that the examples use.
var node = []device{
	// The node's own NIC, and the one next to it.
	{address: "0000:19:00.0", ids: "8086:1533", driver: "igb", netdev: "eno1", acpi: "1"},
	{address: "0000:19:00.1", ids: "8086:1533", driver: "igb", netdev: "eno2", acpi: "2"},
	// A NIC without a driver.
	{address: "0000:1a:00.0", ids: "8086:1533"},
	// Intel X710.
	{address: "0000:18:00.0", ids: "8086:1572", driver: "i40e", netdev: "enp0s0f0", vfs: []device{
		{address: "0000:18:02.0", ids: "8086:154c", driver: "iavf", netdev: "enp0s0f0v0"},
		{address: "0000:18:02.1", ids: "8086:154c", driver: "vfio-pci"},
		{address: "0000:18:02.2", ids: "8086:154c", driver: "vfio-pci"},
		{address: "0000:18:02.3", ids: "8086:154c"},
	}},
	// Intel E810, two ports. The second VF of each port is in a pod.
	{address: "0000:3b:00.0", ids: "8086:1592", driver: "ice", netdev: "ens785f0", vfs: []device{
		{address: "0000:3b:01.0", ids: "8086:1889", driver: "iavf", netdev: "ens785f0v0",
			rdma: "irdma0"},
		{address: "0000:3b:01.1", ids: "8086:1889", driver: "iavf", rdma: "-"},
		{address: "0000:3b:01.2", ids: "8086:1889", driver: "vfio-pci"},
		{address: "0000:3b:01.3", ids: "8086:1889", driver: "iavf", netdev: "ens785f0v3"},
	}},
	{address: "0000:3b:00.1", ids: "8086:1592", driver: "ice", netdev: "ens785f1", vfs: []device{
		{address: "0000:3b:11.0", ids: "8086:1889", driver: "iavf", netdev: "ens785f1v0"},
		{address: "0000:3b:11.1", ids: "8086:1889", driver: "iavf"},
	}},
	// ConnectX-4 Lx and ConnectX-5.
	{address: "0000:5e:00.0", ids: "15b3:1015", driver: "mlx5_core", netdev: "enp94s0f0",
		vfs: []device{
			{address: "0000:5e:00.2", ids: "15b3:1016", driver: "mlx5_core", netdev: "enp94s0f0v0",
				rdma: "mlx5_2"},
			{address: "0000:5e:00.3", ids: "15b3:1016", driver: "mlx5_core", netdev: "enp94s0f0v1"},
		}},
	{address: "0000:5f:00.0", ids: "15b3:1017", driver: "mlx5_core", netdev: "enp95s0f0",
		vfs: []device{
			{address: "0000:5f:00.2", ids: "15b3:1018", driver: "mlx5_core", netdev: "enp95s0f0v0",
				rdma: "mlx5_4"},
			{address: "0000:5f:00.3", ids: "15b3:1018", driver: "mlx5_core", rdma: "-"},
		}},
	// ConnectX-6 Dx with vDPA devices, and an SF.
	{address: "0000:af:00.0", ids: "15b3:101d", driver: "mlx5_core", netdev: "enp175s0f0",
		vfs: []device{
			{address: "0000:af:00.2", ids: "15b3:101e", driver: "mlx5_core", netdev: "enp175s0f0v0",
				vdpa: "virtio_vdpa"},
			{address: "0000:af:00.3", ids: "15b3:101e", driver: "mlx5_core", netdev: "enp175s0f0v1",
				vdpa: "vhost_vdpa"},
			{address: "0000:af:00.4", ids: "15b3:101e", driver: "mlx5_core",
				netdev: "enp175s0f0v2"},
		}, sfs: []device{
			{address: "8", driver: "mlx5_core.sf", netdev: "enp175s0f0s8", rdma: "mlx5_9"},
		}},
	// BlueField-2, which has SFs only.
	{address: "0000:03:00.0", ids: "15b3:a2d6", driver: "mlx5_core", netdev: "p0", sfs: []device{
		{address: "1", driver: "mlx5_core.sf", netdev: "en3f0pf0sf1"},
		{address: "5", driver: "mlx5_core.sf"},
		{address: "6", driver: "mlx5_core.sf", netdev: "en3f0pf0sf6"},
	}},
	// InfiniBand.
	{address: "0000:d8:00.0", ids: "15b3:101b", class: "02", driver: "mlx5_core", netdev: "ib0",
		typ: "32", rdma: "mlx5_10", vfs: []device{
			{address: "0000:d8:00.1", ids: "15b3:101c", driver: "mlx5_core",
				netdev: "ib1", typ: "32",
				rdma: "mlx5_11", pkey: "0x7fff"},
			{address: "0000:d8:00.2", ids: "15b3:101c", driver: "mlx5_core",
				netdev: "ib2", typ: "32",
				rdma: "mlx5_12", pkey: "0x8050"},
			{address: "0000:d8:00.3", ids: "15b3:101c", driver: "mlx5_core", rdma: "-"},
		}},
	// Broadcom.
	{address: "0000:86:00.0", ids: "14e4:1751", driver: "bnxt_en", netdev: "enp134s0f0",
		vfs: []device{
			{address: "0000:86:02.0", ids: "14e4:1750", driver: "bnxt_en", netdev: "enp134s0f0v0"},
		}},
	// Accelerators.
	{address: "0000:65:00.0", class: "12", ids: "8086:0d90", driver: "vfio-pci"},
	{address: "0000:65:00.1", class: "12", ids: "8086:0d90"},
	// A device in a virtual machine.
	{address: "0000:00:07.0", ids: "8086:154c", driver: "vfio-pci"},
	{address: "0000:00:08.0", ids: "8086:154c", driver: "vfio-pci"},
	{address: "0000:00:09.0", ids: "8086:154c", driver: "iavf", netdev: "ens9"},
	{address: "0000:00:0a.0", ids: "8086:154c", driver: "vfio-pci"},
}

// sysfs is a directory that looks like the kernel's sysfs.
type sysfs struct {
	t    testing.TB
	root string
}

func (s sysfs) file(path, content string) {
	s.t.Helper()
	full := filepath.Join(s.root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.WriteFile(full, []byte(content+"\n"), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func (s sysfs) link(path, to string) {
	s.t.Helper()
	full := filepath.Join(s.root, path)
	if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Symlink(to, full); err != nil {
		s.t.Fatal(err)
	}
}

func (s sysfs) pci(d device) {
	dir := "devices/pci0000:00/" + d.address
	s.link("bus/pci/devices/"+d.address, "../../../"+dir)
	vendor, id, _ := strings.Cut(d.ids, ":")
	class := d.class
	if class == "" {
		class = "02"
	}

	for name, content := range map[string]string{
		"class": "0x" + class + "0000", "vendor": "0x" + vendor, "device": "0x" +
			id, "numa_node": "0",
	} {
		s.file(dir+"/"+name, content)
	}

	if d.acpi != "" {
		s.file(dir+"/acpi_index", d.acpi)
	}

	s.common(dir, d)
	if len(d.vfs) > 0 {
		s.file(dir+"/sriov_totalvfs", "16")
	}

	for i, vf := range d.vfs {
		s.pci(vf)
		s.link("devices/pci0000:00/"+vf.address+"/physfn", "../"+d.address)
		s.link(dir+"/virtfn"+strconv.Itoa(i), "../"+vf.address)
	}

	for _, sf := range d.sfs {
		// The kernel counts auxiliary devices. Their numbers are usually not related to the sfnum.
		name := fmt.Sprintf("mlx5_core.sf.%s%s", d.address[5:7], sf.address)
		s.link("bus/auxiliary/devices/"+name, "../../../"+dir+"/"+name)
		s.file(dir+"/"+name+"/sfnum", sf.address)
		s.common(dir+"/"+name, sf)
	}
}

func (s sysfs) common(dir string, d device) {
	if d.driver != "" {
		s.link(dir+"/driver", "../../../bus/drivers/"+d.driver)
	}

	if d.netdev != "" {
		typ := d.typ
		if typ == "" {
			typ = "1"
		}
		s.file(dir+"/net/"+d.netdev+"/type", typ)
		s.file(dir+"/net/"+d.netdev+"/carrier", "1")
	}

	switch d.rdma {
	case "":
	case "-":
		if err := os.MkdirAll(filepath.Join(s.root, dir, "infiniband"), 0o755); err != nil {
			s.t.Fatal(err)
		}
	default:
		s.file(dir+"/infiniband/"+d.rdma+"/ports/1/pkeys/0", d.pkey)
	}

	if d.vdpa != "" {
		name := "vdpa-" + d.address
		s.link("bus/vdpa/devices/"+name, "../../../"+dir+"/"+name)
		s.link(dir+"/"+name+"/driver", "../../../../bus/vdpa/drivers/"+d.vdpa)
	}
}

// functions returns the Functions of the node, whose default route goes through eno1.
func functions(t testing.TB) []function.Function {
	t.Helper()
	s := sysfs{t, t.TempDir()}
	for _, d := range node {
		s.pci(d)
	}

	i := inventory.New(inventory.Options{
		SysRoot: s.root,
		HostNetdevs: func() (hostuse.Netdevs, error) {
			return hostuse.Netdevs{"eno1": {DefaultRoute: true}}, nil
		},
		DDPProfile: func(pf pci.Address) (string, error) {
			return map[pci.Address]string{
				"0000:3b:00.0": "ICE OS Default Package", "0000:3b:00.1": "ICE COMMS Package",
			}[pf], nil
		},
	})

	defer must.Run(t, i.Run)()
	if !i.Synced(t.Context()) {
		t.Fatal("the inventory is not there")
	}

	return i.Snapshot()
}
