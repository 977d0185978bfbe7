// SPDX-License-Identifier: Apache-2.0

package quirk

// VirtioDriver binds PCI devices whose netdev belongs to a virtio device below them. See "netdev
// below virtio".
const VirtioDriver = "virtio-pci"

var virtio = []Quirk{{
	Driver: "virtio-pci", Name: "netdev below virtio",
	Does:   "has no netdev in the PCI device's directory: it is in the directory of the virtio device below",
	Answer: "it is looked for there too",
	Source: "drivers/virtio/virtio.c and drivers/net/virtio_net.c",
	Row:    "netdev moved and given back, with all its properties",
}}
