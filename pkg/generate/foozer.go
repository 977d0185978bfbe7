// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

// Foozers are accelerators of an imaginary vendor, from the first prototypes of DRA in Kubernetes.
const foozerDriver = "foozer.example.com"

// foozers returns the shapes of hosts with foozers.
func foozers() []Shape {
	var shapes []Shape
	for _, model := range []string{"foozer-1000", "foozer-4000"} {
		for _, size := range []struct {
			name          string
			numa, perNUMA int
		}{{"tiny", 1, 2}, {"small", 1, 4}, {"medium", 2, 4}, {"large", 4, 4}} {
			shapes = append(shapes, Shape{
				Classes: []*resourceapi.DeviceClass{
					class(foozerDriver, `device.driver == "`+foozerDriver+`"`),
				},
				Name: model + "-" + size.name,
				Description: fmt.Sprintf("%d NUMA nodes with %d accelerators of model %s each",
					size.numa, size.perNUMA, model),
				pools: func(node string, _ int, _ Options) []pool {
					return []pool{
						{driver: foozerDriver, name: node,
							slices: inSlices(foozerDevices(model, size.numa, size.perNUMA))},
					}
				},
			})
		}
	}

	return shapes
}

func foozerDevices(model string, numaNodes, perNUMA int) []resourceapi.Device {
	var devices []resourceapi.Device
	for numa := range numaNodes {
		for i := range perNUMA {
			bus := 0x10 + 0x40*numa + 4*i
			devices = append(devices, resourceapi.Device{
				Name: fmt.Sprintf("dev-%02d", len(devices)),
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"vendor":          text("example.com"),
					"model":           text(model),
					"firmwareVersion": {VersionValue: new("1.8.2")},
					"driverVersion":   {VersionValue: new("4.2.1-gen3")},
					deviceattribute.StandardDeviceAttributePCIBusID: text(
						fmt.Sprintf("0000:%02x:00.0", bus),
					),
					deviceattribute.StandardDeviceAttributePCIeRoot: text(pcieRoot(numa)),
					deviceattribute.StandardDeviceAttributeNUMANode: {IntValue: new(int64(numa))},
				},
			})
		}
	}

	return devices
}

// pcieRoot returns the root complex of a NUMA node. Each node has one, with 64 buses.
func pcieRoot(numa int) string { return fmt.Sprintf("pci0000:%02x", 0x40*numa) }

func text(value string) resourceapi.DeviceAttribute {
	return resourceapi.DeviceAttribute{StringValue: &value}
}
