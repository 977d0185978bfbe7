// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
)

const (
	// cdiClass differs from the class of claims, whose devices have other names and lifetimes.
	cdiClass = "deviceplugin"
	cdiKind  = v1alpha1.GroupName + "/" + cdiClass
)

// CDI writes one file for each resource, with the device nodes of all Functions that the resource
// or a pod has, allocated or not. After a reboot the directory is empty, and the kubelet creates
// containers again without an Allocate. The methods are safe for concurrent use.
type CDI struct {
	dir *cdi.Dir

	mutex sync.Mutex
	// files has the devices of each file, by file name. Devices are sorted by name.
	files map[string][]specs.Device
	// unneeded has the names of the devices that were not needed at the last prune.
	unneeded map[string]bool
}

// NewCDI returns a CDI for the files in dir, "/var/run/cdi". It reads the files that exist.
func NewCDI(dir string) (*CDI, error) {
	opened, err := cdi.Open(dir)
	if err != nil {
		return nil, err
	}
	files := opened.Files(cdiKind)
	for file := range files {
		opened.Adopt(file)
	}
	return &CDI{dir: opened, files: files}, nil
}

// Restore writes files again that somebody removed from the directory, and returns their names.
func (c *CDI) Restore() ([]string, error) { return c.dir.Restore() }

// include adds Functions to the resource's file, or replaces them there. It removes those without
// device nodes.
func (c *CDI) include(resource string, contents []content) error {
	return c.includeNow(resource, func() []content { return contents })
}

// includeNow is include for what find returns. No other call changes the file from when find looks
// until it is written, so that an older look does not replace a newer one.
func (c *CDI) includeNow(resource string, find func() []content) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	contents := find()
	devices := map[string]specs.Device{}
	for _, d := range c.files[cdiFile(resource)] {
		devices[d.Name] = d
	}

	for _, one := range contents {
		name := cdiDeviceName(resource, one.function.ID)
		if delete(devices, name); len(one.Nodes) > 0 {
			devices[name] = specs.Device{
				Name: name, ContainerEdits: specs.ContainerEdits{DeviceNodes: one.Nodes},
			}
		}
	}

	return c.replace(cdiFile(resource),
		slices.SortedFunc(maps.Values(devices), func(a, b specs.Device) int {
			return cmp.Compare(a.Name, b.Name)
		}))
}

// prune removes devices that were needed neither at this call nor at the last one. The kubelet
// reports a Function as assigned only after its Allocate, so that one call is not enough.
func (c *CDI) prune(needed map[string]bool) error {
	c.mutex.Lock()
	defer c.mutex.Unlock()

	var errs []error
	before := c.unneeded
	c.unneeded = map[string]bool{}
	for file, devices := range c.files {
		left := slices.DeleteFunc(slices.Clone(devices), func(d specs.Device) bool {
			c.unneeded[d.Name] = !needed[d.Name]
			return c.unneeded[d.Name] && before[d.Name]
		})
		errs = append(errs, c.replace(file, left))
	}

	return errors.Join(errs...)
}

// replace writes a file unless it has these devices already. Without devices it removes the file.
func (c *CDI) replace(file string, devices []specs.Device) error {
	// a list without devices may be nil or empty
	if equality.Semantic.DeepEqual(devices, c.files[file]) {
		return nil
	}
	if err := c.dir.Write(file, cdiKind, devices); err != nil {
		return err
	}

	c.files[file] = devices
	return nil
}

// cdiFile returns the name of a resource's file:
// "xpu.opiproject.org-deviceplugin-intel.com_dpdk.json".
func cdiFile(resource string) string {
	return v1alpha1.GroupName + "-" + cdiClass + "-" + strings.ReplaceAll(resource, "/", "_") +
		".json"
}

// cdiDeviceName returns the name of a Function's CDI device. It contains the resource, because a
// Function that a pod has may move to another pool, and is listed twice then.
func cdiDeviceName(resource string, id function.ID) string {
	return strings.ReplaceAll(resource, "/", "_") + "_" + id.DeviceName()
}
