// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
)

// GB300 returns the cards of a machine like a compute tray of a GB300 NVL72: four ConnectX-8, each
// with one PF and this many VFs, and a GPU behind each of them. It is reconstructed from public
// documents, and no such machine was seen.
//
//   - A ConnectX-8 has its PF in one PCI segment and a Data Direct function, a side DMA engine, in
//     another one, where the GPU is too (NVIDIA ConnectX-8 firmware release notes 40.44.1036,
//     "Direct NIC-GPU Datapath"). Vendor and device of the function are 15b3:2100
//     (drivers/infiniband/hw/mlx5/data_direct.c of Linux).
//   - The two are matched by the keyword V3 of their Vital Product Data, and in the segment the
//     devices are a Grace root port, two nested switches of the ConnectX-8, the Data Direct
//     function behind the outer one and the GPU behind the inner one (kernel-boot/rdma_topo of
//     rdma-core, which also has the device ids).
//   - The segments 0008, 0009, 0018 and 0019 with root port 00:00.0, and the outer switch's ports
//     02:00.0 to the Data Direct function and 02:01.0 or 02:03.0 to the GPU, are those of a kernel
//     command line that rdma_topo wrote on such a machine.
//   - The segments of the PFs, which segment belongs to which PF, NUMA nodes, buses below the inner
//     switch, the classes of the Data Direct functions and the GPUs' device id are assumed.
func GB300(vfs int) []Card {
	var cards []Card
	for i, segments := range [][2]string{
		{"0000", "0008"}, {"0002", "0009"}, {"0010", "0018"}, {"0012", "0019"},
	} {
		cards = append(cards, Card{
			PFs: 1, VFs: vfs, Bus: "03", PCIeRoot: "pci" + segments[0] + ":00",
			Device: "1023", VFDevice: "101e", NUMANode: i / 2, LinkSpeed: 800000,
			Serial:     fmt.Sprintf("MT2500X0000%d", i),
			Identifier: fmt.Sprintf("9b1c52f1d1b0ef118000a088c200000%d", i),
			DataDirect: "pci" + segments[1] + ":00",
		})
	}
	return cards
}

// GPU is a GPU beside a card's Data Direct function.
type GPU struct {
	Address  pci.Address
	PCIeRoot string
	NUMANode int
}

// GPUs returns the GPUs, in the order of the cards.
func (h *Host) GPUs() (gpus []GPU) {
	for _, card := range h.config.Cards {
		if card.DataDirect != "" {
			gpus = append(gpus, GPU{
				Address: card.dataDirect("06:00.0"), PCIeRoot: card.DataDirect,
				NUMANode: card.NUMANode,
			})
		}
	}
	return gpus
}

// dataDirect returns the address of a device in the segment of the Data Direct function.
func (c Card) dataDirect(device string) pci.Address {
	return pci.Address(rootName.FindStringSubmatch(c.DataDirect)[1] + ":" + device)
}

// addDataDirect adds the root port of a card's Data Direct function, and what is behind it.
func (h *Host) addDataDirect(card Card) error {
	toGPU := "02:01.0"
	if card.DataDirect == "pci0008:00" || card.DataDirect == "pci0018:00" {
		toGPU = "02:03.0"
	}

	path := card.DataDirect
	for _, d := range []struct {
		address, id, class, driver string
		leaf                       bool // the next device is not behind this one
	}{
		{"00:00.0", "10de:22b1", "060400", "pcieport", false},
		{"01:00.0", "15b3:197c", "060400", "pcieport", false},
		{"02:00.0", "15b3:197c", "060400", "pcieport", true},
		{toGPU, "15b3:197c", "060400", "pcieport", false},
		{"04:00.0", "15b3:197c", "060400", "pcieport", false},
		{"05:00.0", "15b3:197c", "060400", "pcieport", false},
		{"06:00.0", "10de:31c2", "030200", "nvidia", true},
	} {
		address := card.dataDirect(d.address)
		if err := h.addOther(card, address, path, d.id, d.class, d.driver); err != nil {
			return err
		}
		if !d.leaf {
			path = filepath.Join(path, string(address))
		}
	}

	outer := filepath.Join(card.DataDirect, string(card.dataDirect("00:00.0")),
		string(card.dataDirect("01:00.0")), string(card.dataDirect("02:00.0")))
	return h.addOther(card, card.dataDirect("03:00.0"), outer, "15b3:2100", "080100", "mlx5_ib")
}

// addOther adds a device that is no function of the host. A Data Direct function has the card's
// Vital Product Data.
func (h *Host) addOther(card Card, address pci.Address, parent, id, class, driver string) error {
	d := &device{
		address: address, parent: parent, driver: driver,
		attributes: map[string]string{
			"vendor": "0x" + id[:4], "device": "0x" + id[5:], "class": "0x" + class,
			"numa_node": strconv.Itoa(card.NUMANode),
		},
	}
	if id == "15b3:2100" {
		d.attributes["vpd"] = card.vitalProductData()
	}
	if err := h.tree.add(d); err != nil {
		return fmt.Errorf("device %s: %w", address, err)
	}
	return nil
}
