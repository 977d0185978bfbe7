package deviceplugin

import (
	"cmp"
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/node/cdi"
)

const (
	// cdiClass is not that of claims, whose devices have other names and lives.
	cdiClass = "deviceplugin"
	cdiKind  = v1alpha1.GroupName + "/" + cdiClass
)

// CDI gives containers their device nodes by files that the runtime reads, one for each resource. A file lists every
// Function of the resource that has nodes, not only those that are allocated: containers are made again after a reboot,
// when the directory is empty and the kubelet does not ask again. What it lists stays until neither the resource nor a
// pod has the Function, whether this process runs or not. Its methods may be called by several goroutines at once;
// those of a nil CDI do nothing.
type CDI struct {
	dir *cdi.Dir

	mutex sync.Mutex
	// files are what the files list, sorted by name.
	files map[string][]specs.Device
	// unneeded are the names of devices that nobody needed at the last prune.
	unneeded map[string]bool
}

// NewCDI keeps the files in dir, which the runtime reads: "/var/run/cdi".
func NewCDI(dir string) (*CDI, error) {
	opened, err := cdi.Open(dir)
	if err != nil {
		return nil, err
	}
	return &CDI{dir: opened, files: opened.Files(cdiKind)}, nil
}

// include has the resource's file list these Functions as they are now, beside those that it lists already.
func (c *CDI) include(resource string, contents []content) error {
	if c == nil {
		return nil
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	devices := map[string]specs.Device{}
	for _, d := range c.files[cdiFile(resource)] {
		devices[d.Name] = d
	}
	for _, one := range contents {
		name := cdiDeviceName(resource, one.function.ID)
		if delete(devices, name); len(one.Nodes) > 0 {
			devices[name] = specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{DeviceNodes: cdi.Nodes(one.Nodes)}}
		}
	}
	return c.replace(cdiFile(resource), slices.SortedFunc(maps.Values(devices), func(a, b specs.Device) int {
		return cmp.Compare(a.Name, b.Name)
	}))
}

// prune has the files forget devices that are not needed now and were not at the last call. The kubelet says that a pod
// has a Function only after the Allocate that listed it.
func (c *CDI) prune(needed map[string]bool) error {
	if c == nil {
		return nil
	}
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

// replace writes a file unless it lists the same already; without devices there is none.
func (c *CDI) replace(file string, devices []specs.Device) error {
	if len(devices) == 0 && len(c.files[file]) == 0 || reflect.DeepEqual(devices, c.files[file]) {
		return nil
	}
	if err := c.dir.Write(file, cdiKind, devices); err != nil {
		return err
	}
	if c.files[file] = devices; len(devices) == 0 {
		delete(c.files, file)
	}
	return nil
}

// cdiFile is the name of a resource's file: "xpu.opiproject.org-deviceplugin-intel.com_dpdk.json". It has its ending,
// as the library would take what is behind the last dot for one.
func cdiFile(resource string) string {
	return v1alpha1.GroupName + "-" + cdiClass + "-" + strings.ReplaceAll(resource, "/", "_") + ".json"
}

// cdiDeviceName has the resource in it, so that a Function that moves to another pool while a pod still has it is never
// two devices of the same name.
func cdiDeviceName(resource string, id function.ID) string {
	return strings.ReplaceAll(resource, "/", "_") + "_" + id.DeviceName()
}

func cdiDeviceID(resource string, id function.ID) string {
	return parser.QualifiedName(v1alpha1.GroupName, cdiClass, cdiDeviceName(resource, id))
}
