// SPDX-License-Identifier: Apache-2.0

package generate

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
)

const (
	gpuDriver   = "gpu.example.com"
	gpusPerDGX  = 8
	gpuMemory   = "40Gi"
	memorySlots = 8 // slices of a GPU's memory; a partition has some adjacent ones
)

// partition is a profile of NVIDIA's Multi-Instance GPU for the A100 with 40 GB: the resources of
// an instance, and the memory slices at which it may begin (NVIDIA Multi-Instance GPU User Guide,
// "Supported MIG Profiles").
type partition struct {
	profile                         string
	multiprocessors, copies, decode int64
	media                           int64 // JPEG decoder and optical flow accelerator
	memory                          string
	slots                           int
	begins                          []int
}

// partitions lists the profiles of an A100. The last is the whole GPU, without Multi-Instance GPU.
var partitions = [...]partition{
	{"1g.5gb", 14, 1, 0, 0, "4864Mi", 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.5gb.me", 14, 1, 1, 1, "4864Mi", 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.10gb", 14, 1, 1, 0, "9856Mi", 2, []int{0, 2, 4, 6}},
	{"2g.10gb", 28, 2, 1, 0, "9856Mi", 2, []int{0, 2, 4}},
	{"3g.20gb", 42, 3, 2, 0, "19968Mi", 4, []int{0, 4}},
	{"4g.20gb", 56, 4, 2, 0, "19968Mi", 4, []int{0}},
	{"7g.40gb", 98, 7, 5, 1, "40192Mi", 8, []int{0}},
	{"whole", 98, 7, 5, 1, gpuMemory, 8, []int{0}},
}

func dgxA100() Shape {
	return Shape{
		Name: "dgx-a100",
		Description: "8 GPUs that can be partitioned, each as 26 devices that share its " +
			"counters, in the way of a DGX A100",
		Classes: []*resourceapi.DeviceClass{
			class(gpuDriver, `device.driver == "`+gpuDriver+`" && device.attributes["`+gpuDriver+
				`"].profile == "whole"`),
			class("mig."+gpuDriver, `device.driver == "`+gpuDriver+`" && device.attributes["`+
				gpuDriver+`"].profile != "whole"`),
		},
		pools: func(node string, _ int, _ Options) []pool {
			p := pool{driver: gpuDriver, name: node}
			var devices []resourceapi.Device
			for gpu := range gpusPerDGX {
				p.counters = append(p.counters, gpuCounters(gpu))
				devices = append(devices, gpuDevices(gpu)...)
			}
			p.slices = inSlices(devices)
			return []pool{p}
		},
		allocatable: func(d resourceapi.Device) bool {
			return *d.Attributes["profile"].StringValue == "whole"
		},
	}
}

func counterSet(gpu int) string { return fmt.Sprintf("gpu-%d", gpu) }

func gpuCounters(gpu int) resourceapi.CounterSet {
	whole := partitions[len(partitions)-1]
	return resourceapi.CounterSet{Name: counterSet(gpu), Counters: whole.consumes(0)}
}

func gpuDevices(gpu int) []resourceapi.Device {
	var devices []resourceapi.Device
	numa := gpu / 2 // a DGX A100 has 8 NUMA nodes, 4 of them with GPUs
	for _, p := range partitions {
		for _, begin := range p.begins {
			name := fmt.Sprintf("gpu-%d", gpu)
			if p.profile != "whole" {
				name = fmt.Sprintf("gpu-%d-mig-%s-%d", gpu, strings.ReplaceAll(p.profile, ".", "-"),
					begin)
			}

			devices = append(devices, resourceapi.Device{
				Name: name,
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"model":   text("A100-40GB"),
					"profile": text(p.profile),
					"index":   {IntValue: new(int64(gpu))},
					deviceattribute.StandardDeviceAttributePCIBusID: text(
						fmt.Sprintf("0000:%02x:00.0", 0x07+0x40*numa+8*(gpu%2)),
					),
					deviceattribute.StandardDeviceAttributePCIeRoot: text(pcieRoot(numa)),
					deviceattribute.StandardDeviceAttributeNUMANode: {IntValue: new(int64(numa))},
				},
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
					"memory": {Value: resource.MustParse(p.memory)},
					"multiprocessors": {
						Value: *resource.NewQuantity(p.multiprocessors, resource.DecimalSI),
					},
				},
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{
					{CounterSet: counterSet(gpu), Counters: p.consumes(begin)},
				},
			})
		}
	}

	return devices
}

// consumes returns the counters that an instance takes, whose memory begins at a slice. Each memory
// slice is a counter of its own, so that two instances cannot have the same slice.
func (p partition) consumes(begin int) map[string]resourceapi.Counter {
	counters := map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(p.memory)}}
	for name, value := range map[string]int64{
		"multiprocessors": p.multiprocessors, "copy-engines": p.copies, "decoders": p.decode,
		"jpeg-engines": p.media, "ofa-engines": p.media,
	} {
		if value > 0 {
			counters[name] = resourceapi.Counter{
				Value: *resource.NewQuantity(value, resource.DecimalSI),
			}
		}
	}

	for slot := range p.slots {
		counters[fmt.Sprintf("memory-slice-%d", begin+slot)] = resourceapi.Counter{
			Value: resource.MustParse("1"),
		}
	}

	return counters
}
