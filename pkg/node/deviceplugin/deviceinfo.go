package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	"github.com/opiproject/xpu-device-plugin/pkg/node/deviceinfo"
	"github.com/opiproject/xpu-device-plugin/pkg/node/podresources"
)

// DeviceInfo keeps the device-info files, from which Multus learns what stands behind a device ID. A file is written
// when its Function is allocated and stays as long as a pod has the Function, whether this process runs or not. Its
// methods may be called by several goroutines at once, for one Function by one at a time.
type DeviceInfo struct {
	dir string
	now func() time.Time
}

// NewDeviceInfo keeps the files in the directory dp below dir, which is "/var/run/k8s.cni.cncf.io/devinfo". It is made
// when it is needed.
func NewDeviceInfo(dir string) *DeviceInfo {
	return &DeviceInfo{dir: filepath.Join(dir, "dp"), now: time.Now}
}

// describe is what the file says of a Function; nil where the specification has no word for it.
func describe(c content) *deviceinfo.Info {
	_, asVDPA := c.Info["vdpa"]
	info := deviceinfo.Of(c.function, asVDPA)
	if info == nil || info.PCI == nil {
		return info
	}
	info.PCI.VhostNet = c.Info["vhost"]["net-mount"]
	if _, ok := c.Info["rdma"]; ok {
		info.PCI.RDMA = strings.Join(c.function.RDMADevices, ",")
	}
	return info
}

// write replaces the file of a Function. Who reads sees the old one or the new one, whole. The directory is in memory
// and does not survive a crash of the node any more than the pods do, so nothing is synced.
func (d *DeviceInfo) write(resource string, c content) (err error) {
	info := describe(c)
	if info == nil {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("device-info file of Function %s: %w", c.function.ID, err)
		}
	}()
	text, err := json.Marshal(info)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(d.dir, 0o755); err != nil {
		return err
	}
	name := deviceInfoName(resource, c.function.ID)
	temporary := filepath.Join(d.dir, "."+name)
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(d.dir, name))
}

const deviceInfoSuffix = "-device.json"

// deviceInfoName is the name that readers look for.
func deviceInfoName(resource string, id function.ID) string {
	return deviceInfoPrefix(resource) + strings.ReplaceAll(id.String(), "/", "-") + deviceInfoSuffix
}

func deviceInfoPrefix(resource string) string { return strings.ReplaceAll(resource, "/", "-") + "-" }

// removeUnassigned removes the files of Functions that no pod has. Files of other device plugins stay: ours are those
// of the resources and all with the project's own prefix.
func (d *DeviceInfo) removeUnassigned(resources []string, assigned map[string]podresources.Assignment) error {
	entries, err := os.ReadDir(d.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("device-info files: %w", err)
	}
	keep := map[string]bool{}
	for text, a := range assigned {
		if id, err := function.ParseID(text); err == nil {
			keep[deviceInfoName(a.Resource, id)] = true
		}
	}
	var errs []error
	for _, entry := range entries {
		if keep[entry.Name()] || !ours(entry.Name(), resources) {
			continue
		}
		info, err := entry.Info()
		if err != nil || d.now().Sub(info.ModTime()) < young {
			continue // it went, or has just come
		}
		if err := os.Remove(filepath.Join(d.dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// ours also knows files that were not finished. The name of another plugin's resource may begin with that of one of
// ours, so what follows must be an address.
func ours(name string, resources []string) bool {
	name, isInfo := strings.CutSuffix(strings.TrimPrefix(name, "."), deviceInfoSuffix)
	if !isInfo {
		return false
	}
	if strings.HasPrefix(name, v1alpha1.GroupName+"-") {
		return true
	}
	return slices.ContainsFunc(resources, func(resource string) bool {
		id, ok := strings.CutPrefix(name, deviceInfoPrefix(resource))
		_, err := pci.Parse(id)
		return ok && err == nil
	})
}
