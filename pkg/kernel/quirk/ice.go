// SPDX-License-Identifier: Apache-2.0

package quirk

// DDPDriver is the only driver that reports its DDP package by devlink. DDPVersion is the name of
// the version that it reports. See "DDP package".
const (
	DDPDriver  = "ice"
	DDPVersion = "fw.app.name"
)

var ice = []Quirk{{
	Driver: "ice", Name: "DDP package",
	Does: "tells the Dynamic Device Personalization package that it loaded as a running version " +
		"of devlink. " +
		"Asking takes its firmware a while",
	Answer: "only PFs with this driver are asked, and only once for each time that it was bound " +
		"or reloaded",
	Source: "Documentation/networking/devlink/ice.rst",
	Row:    "PFs and VFs found: address, PF, index, driver, NUMA node, IOMMU group, PCIe root",
}}
