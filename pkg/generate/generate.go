// SPDX-License-Identifier: Apache-2.0

// Package generate makes the objects of imaginary clusters: Nodes, and ResourceSlices with the
// devices of hosts of a [Shape]. An API server accepts the objects. The same [Options] give the
// same objects.
package generate

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Options set the size of the cluster.
type Options struct {
	Nodes int // at least 1
	PFs   int // of each host with SR-IOV; 0 means the shape's default
	VFs   int // of each PF; 0 means the shape's default
	// Allocated is the share of devices that are allocated to claims, from 0 to 1. The pods of the
	// claims do not exist.
	Allocated float64
}

// Shape is a kind of hosts.
type Shape struct {
	Name        string
	Description string // half a sentence
	Classes     []*resourceapi.DeviceClass
	pools       func(node string, index int, o Options) []pool
	// selects the devices that Options.Allocated counts; nil means all
	allocatable func(resourceapi.Device) bool
	sized       bool // whether Options.PFs and VFs apply
}

// pool is a resource pool of a node.
type pool struct {
	driver, name string
	slices       [][]resourceapi.Device
	counters     []resourceapi.CounterSet // in separate slices
}

// Shapes returns all shapes, sorted by name.
func Shapes() []Shape {
	all := slices.Concat([]Shape{dgxA100()}, foozers(), sriovs())
	slices.SortFunc(all, func(a, b Shape) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// Find returns the shape with this name.
func Find(name string) (Shape, error) {
	var names []string
	for _, shape := range Shapes() {
		if shape.Name == name {
			return shape, nil
		}
		names = append(names, shape.Name)
	}

	return Shape{}, fmt.Errorf("there is no shape %q; there are %s", name,
		strings.Join(names, ", "))
}

// Cluster holds the generated objects.
type Cluster struct {
	Nodes   []*corev1.Node
	Classes []*resourceapi.DeviceClass
	Slices  []*resourceapi.ResourceSlice
	Claims  []*resourceapi.ResourceClaim // for Options.Allocated, with their devices
}

// Objects returns all objects.
func (c *Cluster) Objects() []runtime.Object {
	var all []runtime.Object
	for _, node := range c.Nodes {
		all = append(all, node)
	}

	for _, class := range c.Classes {
		all = append(all, class)
	}

	for _, slice := range c.Slices {
		all = append(all, slice)
	}

	for _, claim := range c.Claims {
		all = append(all, claim)
	}

	return all
}

// Generate returns a cluster of hosts with the shape.
func Generate(shape Shape, o Options) (*Cluster, error) {
	if err := check(shape, o); err != nil {
		return nil, err
	}

	cluster := &Cluster{Classes: shape.Classes}
	digits := len(fmt.Sprint(o.Nodes - 1))
	for i := range o.Nodes {
		name := fmt.Sprintf("%s-%0*d", shape.Name, max(digits, 2), i)
		cluster.Nodes = append(cluster.Nodes, node(name))
		for _, p := range shape.pools(name, i, o) {
			cluster.Slices = append(cluster.Slices, p.resourceSlices(name)...)
		}
	}

	cluster.allocate(shape, o.Allocated)
	return cluster, nil
}

func check(shape Shape, o Options) error {
	switch {
	case o.Nodes < 1 || o.Nodes > 100000:
		return fmt.Errorf("nodes: is %d, must be 1 to 100000", o.Nodes)
	case !shape.sized && (o.PFs != 0 || o.VFs != 0):
		return fmt.Errorf(
			"shape %s: its hosts always have the same devices, pfs and vfs do not apply",
			shape.Name,
		)
	case o.PFs < 0 || o.PFs > 16:
		return fmt.Errorf("pfs: is %d, must be 1 to 16", o.PFs)
	case o.VFs < 0 || o.VFs > 256:
		return fmt.Errorf("vfs: is %d, must be 1 to 256", o.VFs)
	case !(o.Allocated >= 0 && o.Allocated <= 1): // also for NaN
		return fmt.Errorf("allocated: is %g, must be 0%% to 100%%", 100*o.Allocated)
	}
	return nil
}

// class returns a DeviceClass with one selector.
func class(name, expression string) *resourceapi.DeviceClass {
	return &resourceapi.DeviceClass{
		TypeMeta: metav1.TypeMeta{
			APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "DeviceClass",
		},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.DeviceClassSpec{
			Selectors: []resourceapi.DeviceSelector{
				{CEL: &resourceapi.CELDeviceSelector{Expression: expression}},
			},
		},
	}
}

func node(name string) *corev1.Node {
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname: name, corev1.LabelArchStable: "amd64",
			corev1.LabelOSStable: "linux",
		}},
		Status: corev1.NodeStatus{
			Allocatable: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("64"),
				corev1.ResourceMemory: resource.MustParse("256Gi"),
				corev1.ResourcePods:   resource.MustParse("110"),
			},
			Conditions: []corev1.NodeCondition{
				{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Generated"},
			},
		},
	}
}

// resourceSlices returns the pool's slices. Slices with counters come first.
func (p pool) resourceSlices(node string) []*resourceapi.ResourceSlice {
	var specs []resourceapi.ResourceSliceSpec
	for counters := range slices.Chunk(p.counters, resourceapi.ResourceSliceMaxCounterSets) {
		specs = append(specs, resourceapi.ResourceSliceSpec{SharedCounters: counters})
	}

	for _, devices := range p.slices {
		specs = append(specs, resourceapi.ResourceSliceSpec{Devices: devices})
	}

	made := make([]*resourceapi.ResourceSlice, len(specs))
	for i, spec := range specs {
		spec.Driver, spec.NodeName = p.driver, &node
		spec.Pool = resourceapi.ResourcePool{
			Name: p.name, Generation: 1, ResourceSliceCount: int64(len(specs)),
		}
		made[i] = &resourceapi.ResourceSlice{
			TypeMeta: metav1.TypeMeta{
				APIVersion: resourceapi.SchemeGroupVersion.String(), Kind: "ResourceSlice",
			},
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%s-%d", strings.ReplaceAll(p.name, "/", "-"), p.driver, i),
			},
			Spec: spec,
		}
	}

	return made
}

// inSlices distributes devices over slices that the API accepts. Slices whose devices use counters
// or taints hold fewer.
func inSlices(devices []resourceapi.Device) [][]resourceapi.Device {
	most := resourceapi.ResourceSliceMaxDevices
	if slices.ContainsFunc(devices, func(d resourceapi.Device) bool {
		return len(d.ConsumesCounters) > 0 || len(d.Taints) > 0
	}) {
		most = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	}
	return slices.Collect(slices.Chunk(devices, most))
}
