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
)

// describe returns the content of a Function's file, nil for a Function that the specification cannot describe.
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

// writeDeviceInfo atomically replaces a Function's device-info file in dir, from which Multus learns what a device ID
// stands for. The file stays as long as a pod has the Function, whether this process runs or not. Nothing is synced: the
// directory is in memory.
func writeDeviceInfo(dir, resource string, c content) (err error) {
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
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	name := deviceInfoName(resource, c.function.ID)
	temporary := filepath.Join(dir, "."+name)
	if err := os.WriteFile(temporary, text, 0o644); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(dir, name))
}

const deviceInfoSuffix = "-device.json"

// deviceInfoName is the file name that readers expect.
func deviceInfoName(resource string, id function.ID) string {
	return deviceInfoPrefix(resource) + strings.ReplaceAll(id.String(), "/", "-") + deviceInfoSuffix
}

func deviceInfoPrefix(resource string) string { return strings.ReplaceAll(resource, "/", "-") + "-" }

// removeDeviceInfo removes this plugin's device-info files, except those that are needed and those that are young.
func removeDeviceInfo(dir string, resources []string, needed map[string]bool) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("device-info files: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		if needed[entry.Name()] || !ours(entry.Name(), resources) {
			continue
		}
		info, err := entry.Info()
		if err != nil || time.Since(info.ModTime()) < young {
			continue // it is gone, or new
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// ours says whether a file, finished or not, is of one of the resources or has the project's own prefix. Another plugin's
// resource may have a name that begins with the name of one of ours, so an address must follow.
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
