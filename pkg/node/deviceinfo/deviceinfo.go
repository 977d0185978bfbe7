// SPDX-License-Identifier: Apache-2.0

// Package deviceinfo describes a Function in the format of the device-info specification of the
// Network Plumbing Working Group. Multus copies this description into the annotations of a pod.
package deviceinfo

import (
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// version is the version of the specification.
const version = "1.1.0"

// Info is the part of a device-info file that applies to Functions.
type Info struct {
	Type    string `json:"type"`
	Version string `json:"version"`
	PCI     *PCI   `json:"pci,omitempty"`
	VDPA    *VDPA  `json:"vdpa,omitempty"`
}

// PCI is a PCI function.
type PCI struct {
	Address   string `json:"pci-address"`
	VhostNet  string `json:"vhost-net,omitempty"`
	RDMA      string `json:"rdma-device,omitempty"` // names, separated by commas
	PFAddress string `json:"pf-pci-address,omitempty"`
}

// VDPA is a vDPA device.
type VDPA struct {
	Parent    string `json:"parent-device"`
	Driver    string `json:"driver"`         // "vhost" or "virtio"
	Path      string `json:"path,omitempty"` // of the character device; "" for a virtio device
	Address   string `json:"pci-address,omitempty"`
	PFAddress string `json:"pf-pci-address,omitempty"`
}

// Of returns the description of a Function. asVDPA says whether the pod gets the Function's vDPA
// device. Of returns nil for an SF without a vDPA device, because the specification has no format
// for an SF: its only PCI address is the one of its PF.
func Of(f function.Function, asVDPA bool) *Info {
	address, pfAddress := string(f.ID.Address), string(f.PF)
	switch f.Kind {
	case function.PF:
		pfAddress = ""
	case function.SF:
		address = ""
	}

	if asVDPA && f.VDPA.Name != "" {
		vdpa := &VDPA{
			Parent: f.VDPA.Name, Driver: strings.TrimSuffix(f.VDPA.Driver, "_vdpa"),
			Address: address, PFAddress: pfAddress,
		}
		if f.VDPA.CharDevice != "" {
			vdpa.Path = "/dev/" + f.VDPA.CharDevice
		}
		return &Info{Type: "vdpa", Version: version, VDPA: vdpa}
	}

	if address == "" {
		return nil
	}

	return &Info{Type: "pci", Version: version, PCI: &PCI{Address: address, PFAddress: pfAddress}}
}
